"""From the engine's outputs to OpenAI's objects."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.http.scores import (
    Offsets,
    echoed_scores,
    finite,
    joined,
    prompt_scores,
    scores_of,
)

MAX_SCORES = 2**19
"""Log-probabilities of prompts' tokens in one answer, over all its choices: some 30 MB of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What an answer tells besides the text that was generated.

    Attributes:
        echo: the prompt, before the text.
        logprobs: likeliest tokens told beside each generated one, and each of a prompt that is
            echoed; None for no log-probabilities.
        prompt_logprobs: the same of the prompt's tokens, in a field of its own.
        token_ids: ids of the prompt's and the generated tokens.
        skip_special_tokens: whether special tokens are left out of the text.
        generated: whether the generated token is told: one is always made, also where a client
            asked for none because it wants the prompt's log-probabilities.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    skip_special_tokens: bool = True
    generated: bool = True

    @property
    def scores_prompt(self) -> int | None:
        """Likeliest tokens to have of each token of the prompt; None if nobody wants them."""
        echoed = self.logprobs if self.echo else None
        wanted = [num for num in (echoed, self.prompt_logprobs) if num is not None]
        return max(wanted, default=None)


class Usage:
    """Counts the tokens of an answer that may have several prompts."""

    def __init__(self, num_prompts: int) -> None:
        self._prompt = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._completion = 0
        self.num_reasoning_tokens: int | None = None
        """Of all thoughts so far; None where none are told apart."""

    def saw(self, place: int, output: RequestOutput) -> None:
        """Takes in an output that holds only what is new, or everything once."""
        self._prompt[place] = len(output.prompt_token_ids)
        self._cached[place] = output.num_cached_tokens
        self._completion += sum([len(item.token_ids) for item in output.outputs])

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(self._prompt)
        thought = self.num_reasoning_tokens
        details = (
            {} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            **details,
        }


class CompletionAnswer:
    """Objects of /v1/completions.

    Args:
        request_id: of the answer.
        model: the served model's name.
        n: completions a prompt.
        tokenizer: spells tokens.
        tells: what there is besides the text.
    """

    whole_kind = part_kind = "text_completion"

    def __init__(
        self, request_id: str, model: str, n: int, tokenizer: Tokenizer, tells: Telling
    ) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._n = n
        self._tokenizer = tokenizer
        self._tells = tells
        self._num_scores = 0
        self._untold: dict[str, Any] = {}
        """What the next event of a stream has beside its choices."""
        self._offsets: dict[int, Offsets] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def whole(self, outputs: list[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """The unary answer.

        Args:
            outputs: one a prompt, each with its prompt's place.
        """
        usage = Usage(len(outputs))
        choices = []
        for place, output in sorted(outputs, key=lambda item: item[0]):
            output = self._shown(output)
            usage.saw(place, output)
            choices += self._choices(place, output, usage)
        return self._head | {
            "object": self.whole_kind, "choices": choices, "usage": usage.as_json()
        } | self._beside(outputs[0][1])  # fmt: skip

    def check(self, output: RequestOutput) -> None:
        """Takes note of an output of the unary answer.

        Raises:
            InvalidRequestError: the answer would have too many log-probabilities.
        """
        num_top = self._tells.scores_prompt
        if num_top is None:
            return
        self._num_scores += len(output.prompt_token_ids) * (num_top + 1) * self._n
        if self._num_scores > MAX_SCORES:
            allowed = f"at most {MAX_SCORES} of prompts' tokens in one answer"
            raise InvalidRequestError("logprobs", f"{self._num_scores} numbers", allowed)

    def events(self, place: int, output: RequestOutput, usage: Usage) -> list[list[dict[str, Any]]]:
        """The choices that an output of a stream has news of, those of one event together.

        Args:
            usage: counts the output's tokens.
        """
        output = self._shown(output)
        usage.saw(place, output)
        choices = self._parts(place, output)
        return [choices] if choices else []

    def part(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """One event of a stream."""
        chunk = self._head | {"object": self.part_kind, "choices": choices} | self._untold
        self._untold = {}
        return chunk if usage is None else chunk | {"usage": usage.as_json()}

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """The output as the client asked for it: without what was generated, if for none."""
        if self._tells.generated:
            return output
        blank = [
            dataclasses.replace(
                each, text="", token_ids=[], logprobs=None if each.logprobs is None else [],
                finish_reason=each.finish_reason and "length", stop_reason=None,
            )
            for each in output.outputs
        ]  # fmt: skip
        return dataclasses.replace(output, outputs=blank)

    def _beside(self, output: RequestOutput) -> dict[str, Any]:
        """What stands beside the choices."""
        return {}

    def _choices(self, place: int, output: RequestOutput, usage: Usage) -> list[dict[str, Any]]:
        return [self._choice(place, output, completion) for completion in output.outputs]

    def _choice(
        self, place: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        """A completion, whole or what is new of it."""
        index = place * self._n + completion.index
        is_first = index not in self._begun
        self._begun.add(index)
        tells, scores = self._tells, completion.logprobs
        echo = ""
        if is_first and tells.echo:
            given, prompt_ids = output.prompt, output.prompt_token_ids
            echo = self._tokenizer.decode(prompt_ids) if given is None else given
        told = None
        if scores is not None:
            if index not in self._offsets:
                self._offsets[index] = Offsets(
                    self._tokenizer, len(echo), skip_special_tokens=tells.skip_special_tokens
                )
            told = scores_of(completion.token_ids, scores, self._offsets[index])
            if is_first and tells.echo:
                assert output.prompt_logprobs is not None
                assert tells.logprobs is not None
                echoed = echoed_scores(
                    prompt_ids, output.prompt_logprobs, tells.logprobs, self._tokenizer
                )
                told = joined(echoed, told)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + completion.text,
            "logprobs": told,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if is_first:
            choice |= _of_prompt(tells, output)
        if tells.token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _parts(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        return [
            self._choice(place, output, completion)
            for completion in output.outputs
            if self._has_news(place, completion)
        ]

    def _has_news(self, place: int, completion: CompletionOutput) -> bool:
        index = place * self._n + completion.index
        if index in self._ended:
            return False
        if completion.finish_reason is not None:
            self._ended.add(index)
            return True
        has_ids = self._tells.token_ids and completion.token_ids
        return bool(completion.text or completion.logprobs or has_ids)


class ChatAnswer(CompletionAnswer):
    """Objects of /v1/chat/completions; arguments as for `CompletionAnswer`."""

    whole_kind = "chat.completion"
    part_kind = "chat.completion.chunk"

    def _beside(self, output: RequestOutput) -> dict[str, Any]:
        return _of_prompt(self._tells, output)

    def _choices(self, place: int, output: RequestOutput, usage: Usage) -> list[dict[str, Any]]:
        return [
            self._said(completion, "message", {"role": "assistant", "content": completion.text})
            for completion in output.outputs
        ]

    def _parts(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            if not self._has_news(place, completion):
                continue
            if not self._begun:
                self._untold = self._beside(output)
            delta = {"content": completion.text} if completion.text else {}
            if completion.index not in self._begun:
                self._begun.add(completion.index)
                delta = {"role": "assistant", "content": completion.text}
            choices.append(self._said(completion, "delta", delta))
        return choices

    def _said(
        self, completion: CompletionOutput, name: str, said: dict[str, Any]
    ) -> dict[str, Any]:
        scores = completion.logprobs
        content = None
        if scores is not None:
            pairs = zip(completion.token_ids, scores, strict=True)
            content = [self._entry(token_id, top) for token_id, top in pairs]
        choice = {
            "index": completion.index,
            name: said,
            "logprobs": None if content is None else {"content": content, "refusal": None},
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        return choice | ({"token_ids": completion.token_ids} if self._tells.token_ids else {})

    def _entry(self, token_id: int, scores: TokenLogprobs) -> dict[str, Any]:
        # The chosen token stands among the scores even when it is none of the top ones.
        top = sorted(scores.items(), key=lambda item: item[1].rank)[: self._tells.logprobs]
        return self._token(token_id, scores[token_id]) | {
            "top_logprobs": [self._token(*item) for item in top]
        }

    def _token(self, token_id: int, score: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes.piece(token_id, first=False)
        return {
            "token": score.decoded_token or "",
            "logprob": finite(score),
            "bytes": list(raw),
        }


def _of_prompt(tells: Telling, output: RequestOutput) -> dict[str, Any]:
    """What was asked for about the prompt, but for its echo."""
    facts: dict[str, Any] = {}
    if tells.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        facts["prompt_logprobs"] = prompt_scores(
            output.prompt_token_ids, output.prompt_logprobs, tells.prompt_logprobs
        )
    if tells.token_ids:
        facts["prompt_token_ids"] = output.prompt_token_ids
    return facts
