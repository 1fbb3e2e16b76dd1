"""From the engine's outputs to OpenAI's objects."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from octavo.engine.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Usage:
    """Counts the tokens of an answer that may have several prompts."""

    def __init__(self, num_prompts: int) -> None:
        self._prompt = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._completion = 0

    def saw(self, place: int, output: RequestOutput) -> None:
        """Takes in an output that holds only what is new, or everything once."""
        self._prompt[place] = len(output.prompt_token_ids)
        self._cached[place] = output.num_cached_tokens
        self._completion += sum([len(item.token_ids) for item in output.outputs])

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = sum(self._prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


class CompletionAnswer:
    """Objects of /v1/completions.

    Args:
        request_id: of the answer.
        model: the served model's name.
        n: completions a prompt.
        echoes: texts that stand before the completions, one a prompt; None without echo.
    """

    whole_kind = part_kind = "text_completion"

    def __init__(
        self, request_id: str, model: str, n: int, echoes: Sequence[str] | None = None
    ) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._n = n
        self._echoes = echoes
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The unary answer."""
        choices.sort(key=lambda choice: choice["index"])
        return self._head | {
            "object": self.whole_kind, "choices": choices, "usage": usage.as_json()
        }  # fmt: skip

    def part(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """One event of a stream."""
        chunk = self._head | {"object": self.part_kind, "choices": choices}
        return chunk if usage is None else chunk | {"usage": usage.as_json()}

    def choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        """A completion, whole or what is new of it."""
        index = place * self._n + completion.index
        text = completion.text
        if self._echoes is not None and index not in self._begun:
            text = self._echoes[place] + text
        self._begun.add(index)
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        scores = completion.logprobs
        return {
            "index": index,
            "text": text,
            "logprobs": None if scores is None else _logprobs(completion.token_ids, scores, offset),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def parts(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices that an output of a stream has news of."""
        return [
            self.choice(place, completion)
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
        return bool(completion.text or completion.logprobs)


class ChatAnswer(CompletionAnswer):
    """Objects of /v1/chat/completions.

    Args:
        tokenizer: spells tokens in bytes.
        num_top: most likely tokens told beside each token.
    """

    whole_kind = "chat.completion"
    part_kind = "chat.completion.chunk"

    def __init__(
        self, request_id: str, model: str, n: int, tokenizer: Tokenizer, num_top: int
    ) -> None:
        super().__init__(request_id, model, n)
        self._tokenizer = tokenizer
        self._num_top = num_top

    def choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        """A whole message."""
        return self._choice(
            completion, "message", {"role": "assistant", "content": completion.text}
        )

    def parts(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices that an output of a stream has news of; the first names the role."""
        choices = []
        for completion in output.outputs:
            if not self._has_news(place, completion):
                continue
            delta = {"content": completion.text} if completion.text else {}
            if completion.index not in self._begun:
                self._begun.add(completion.index)
                delta = {"role": "assistant", "content": completion.text}
            choices.append(self._choice(completion, "delta", delta))
        return choices

    def _choice(
        self, completion: CompletionOutput, name: str, said: dict[str, str]
    ) -> dict[str, Any]:
        scores = completion.logprobs
        content = None
        if scores is not None:
            pairs = zip(completion.token_ids, scores, strict=True)
            content = [self._entry(token_id, top) for token_id, top in pairs]
        return {
            "index": completion.index,
            name: said,
            "logprobs": None if content is None else {"content": content, "refusal": None},
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def _entry(self, token_id: int, scores: TokenLogprobs) -> dict[str, Any]:
        # The chosen token stands among the scores even when it is none of the top ones.
        top = sorted(scores.items(), key=lambda item: item[1].rank)[: self._num_top]
        return self._token(token_id, scores[token_id]) | {
            "top_logprobs": [self._token(*item) for item in top]
        }

    def _token(self, token_id: int, score: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes.piece(token_id, first=False)
        return {
            "token": score.decoded_token or "",
            "logprob": max(score.logprob, LEAST_LOGPROB),
            "bytes": list(raw),
        }


def _logprobs(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    tokens, offsets = [], []
    for token_id, entry in zip(token_ids, scores, strict=True):
        tokens.append(entry[token_id].decoded_token or "")
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [
            max(entry[token_id].logprob, LEAST_LOGPROB)
            for token_id, entry in zip(token_ids, scores, strict=True)
        ],
        "top_logprobs": [_by_text(entry) for entry in scores],
        "text_offset": offsets,
    }


def _by_text(scores: TokenLogprobs) -> dict[str, float]:
    """Log-probabilities by text; of tokens that spell alike, such as parts of characters, the
    likeliest."""
    by_text: dict[str, float] = {}
    for score in scores.values():
        text, value = score.decoded_token or "", max(score.logprob, LEAST_LOGPROB)
        by_text[text] = max(value, by_text.get(text, LEAST_LOGPROB))
    return by_text
