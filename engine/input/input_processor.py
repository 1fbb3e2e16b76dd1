"""From what a user hands in to requests that the scheduler can take."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.engine.errors import DeadlineExceededError, InvalidRequestError
from octavo.engine.input.request_ids import RequestIds
from octavo.engine.input.targets import NO_TARGETS, Targets
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS, Tokenization
from octavo.engine.output.outputs import Generated
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.pooling.pooler import Pooler
from octavo.engine.request import Priority, Request
from octavo.engine.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_IDS,
    RequestOutputKind,
    SamplingParams,
    are_plain_integers,
    as_plain,
)
from octavo.engine.structured.compiler import GrammarCompiler
from octavo.engine.structured.grammar import CompiledGrammar
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.text.bad_words import bad_word_token_sequences
from octavo.engine.text.tokenizer import SHORT_TEXT_CHARS, Tokenizer

Prompt = str | Sequence[int]
"""A prompt's text, or its token ids."""
PromptLike = Prompt | Mapping[str, Any] | np.ndarray
"""A prompt as users hand it in: also as `{"prompt": text}` or `{"prompt_token_ids": ids}`, with a
`cache_salt` beside it if it has its own."""

POOLED = SamplingParams(
    temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
"""Parameters of a request that generates nothing: one output, at its end."""
MAX_ID_CHARS = 256
SHORT_PROMPT_TOKENS = 16_384
"""Token ids that take under a millisecond to check."""


def text_or_ids(prompt: PromptLike) -> Prompt:
    """The prompt without its name, and with numbers of Python's. Token ids go before the text that
    they are of.

    Raises:
        InvalidRequestError: other names, or neither.
    """
    if not isinstance(prompt, Mapping):
        return as_plain(prompt)  # type: ignore[no-any-return]
    prompt = {name: value for name, value in prompt.items() if value is not None}
    names = [name for name in ("prompt_token_ids", "prompt") if name in prompt]
    if not names or len(names) != len(prompt):
        raise InvalidRequestError(
            "prompt", list(prompt), "either {'prompt': text} or {'prompt_token_ids': ids}"
        )
    for name in names:
        if isinstance(prompt[name], str) != (name == "prompt"):
            wanted = "a string" if name == "prompt" else "a list of token ids"
            raise InvalidRequestError(name, prompt[name], wanted)
    return as_plain(prompt[names[0]])  # type: ignore[no-any-return]


def apart_from_salt(prompt: PromptLike, cache_salt: str) -> tuple[Prompt, str]:
    """The prompt as `text_or_ids` has it, and the salt of its cached prefixes.

    Args:
        cache_salt: of the call, for a prompt that has none of its own.

    Raises:
        InvalidRequestError: as `text_or_ids`; also two salts, or one that is no text.
    """
    if not isinstance(prompt, Mapping) or prompt.get("cache_salt") is None:
        return text_or_ids(prompt), cache_salt
    own = prompt["cache_salt"]
    if not isinstance(own, str) or cache_salt not in ("", own):
        allowed = "a string, and no other than the call's cache_salt"
        raise InvalidRequestError("cache_salt", own, allowed)
    rest = {name: value for name, value in prompt.items() if name != "cache_salt"}
    return text_or_ids(rest), own


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checked user request: `n` sequences over one prompt.

    Attributes:
        request_id: the engine's own id; no other submission has or had it.
        prompt: the text, if it was given as text and nothing of it was cut off.
        params: as the caller gave them.
        sequences: one engine request a completion, in index order.
        grammar: what they keep to, if anything.
        generated: of each sequence, what another engine generated, where this one is to go on;
            empty where nothing was.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    sequences: tuple[Request, ...]
    grammar: CompiledGrammar | None = None
    generated: tuple[Generated, ...] = ()

    @property
    def shown_id(self) -> str:
        """What its outputs call it: the client's own id, or the engine's where there is none."""
        return self.sequences[0].label or self.request_id


class InputProcessor:
    """Checks and tokenizes. Holds no state of requests: safe from any thread.

    Args:
        tokenizer: of the model.
        vocab_size: token ids that may be given are below it.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: the model's end-of-sequence ids.
        seed: seeds requests that bring none.
        incarnation: begins every id; see `RequestIds`.
        pooler: of an engine that takes pooled requests; None where none does.
        generates: whether the engine generates.
        default_max_tokens: tokens of requests that name no limit. Those of such a limit are cut to
            what the context leaves, and not refused.

    Attributes:
        ids: makes the ids of submissions.
        grammars: compiles what requests keep to.
        pooler, generates: as they were given.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
        incarnation: str | None = None,
        pooler: Pooler | None = None,
        generates: bool = True,
        default_max_tokens: int | None = None,
    ) -> None:
        self.ids = RequestIds(incarnation)
        self.pooler = pooler
        self.generates = generates
        self._tokenizer = tokenizer
        _ = tokenizer.token_sizes  # now, while nobody waits for a token
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._default_max_tokens = default_max_tokens
        self._seeds = random.Random(seed)
        self.grammars = GrammarCompiler(
            tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids
        )

    def process(
        self,
        label: str | None,
        prompt: PromptLike,
        params: SamplingParams,
        *,
        now_s: float,
        priority: Priority | str | int | None = None,
        timeout_s: float | None = None,
        targets: Targets = NO_TARGETS,
        output_len_class: str = "",
        tenant: str = "",
        cache_salt: str = "",
        request_id: str | None = None,
        trace_parent: str = "",
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        compile_grammar: bool = True,
        pooling: PoolingParams | None = None,
    ) -> Submission:
        """Checks a user's request and makes its sequences; waits until its grammar is compiled.

        Args:
            label: the client's own id, 1 to 256 characters; None for none.
            prompt: text or token ids, not empty; see `PromptLike`.
            params: validated sampling parameters.
            now_s: engine clock.
            priority: a class, its name or number.
            timeout_s: seconds from now after which the answer is worthless.
            targets: when tokens are wanted.
            output_len_class, tenant, cache_salt, trace_parent: see `Request`.
            request_id: the engine's id, fresh from `ids`; None takes the next one.
            compile_grammar: False leaves the submission without; it may not be handed to the
                engine before `grammar_of` has told what it keeps to.
            pooling: what a pooled request wants; `params` are `POOLED` then.

        Raises:
            InvalidRequestError: something can never be served; names the field.
            DeadlineExceededError: the timeout has passed already.
        """
        check_label(label)
        deadline_s = _deadline(timeout_s, now_s)
        prompt, cache_salt = apart_from_salt(prompt, cache_salt)
        if pooling is not None:
            pooler = self.pooler_or_refuse()
            pooling, longest = pooler.resolve(pooling), pooler.config.max_seq_length
            is_text = isinstance(prompt, str) and not pooling.classify
            if is_text and longest is not None and longest <= self._max_model_len:
                tokenization = tokenization.cut_as_trained(longest, self._tokenizer)
        elif not self.generates:
            allowed = "generate or both, to generate text: start the engine with that task"
            raise InvalidRequestError("task", "embed", allowed)
        # A pooled request generates nothing: its prompt may fill the context.
        context = self._max_model_len + (pooling is not None)
        limit = None if params.max_tokens == self._default_max_tokens else params.max_tokens
        most = tokenization.most_tokens(context, limit)
        given_ids = self._tokens(prompt, tokenization, most, context)
        token_ids = tokenization.cut(given_ids, most)
        max_tokens = self._max_tokens(len(token_ids), params, limit, context)
        self._check_ids(params)
        bad_words = self._bad_words(params)
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        _check_stops(params, bad_words, eos_token_ids)
        request_id = request_id or self.ids.next()
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        sequences = tuple(
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                sampling_params=params,
                seed=(seed + index) % (1 << 63),
                eos_token_ids=eos_token_ids,
                max_tokens=max_tokens,
                arrival_s=now_s,
                priority=Priority.parse(priority),
                deadline_s=deadline_s,
                ttft_target_s=targets.ttft_target_s,
                tpot_target_s=targets.tpot_target_s,
                e2e_target_s=targets.e2e_target_s,
                output_len_class=output_len_class,
                bad_word_token_ids=bad_words,
                tenant=tenant,
                cache_salt=cache_salt,
                pooling=pooling,
                label=label or "",
                trace_parent=trace_parent,
            )
            for index in range(params.n)
        )
        return Submission(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) and token_ids is given_ids else None,
            params=params,
            sequences=sequences,
            grammar=self.grammar_of(params) if compile_grammar else None,
        )

    def takes_long(self, prompt: Prompt, params: SamplingParams) -> bool:
        """Whether an event loop had better not call `process` itself."""
        if params.structured_outputs is not None:
            return True
        text = sum(map(len, params.bad_words))
        if isinstance(prompt, str):
            return text + len(prompt) > SHORT_TEXT_CHARS
        return text > SHORT_TEXT_CHARS or (
            isinstance(prompt, Sized) and len(prompt) > SHORT_PROMPT_TOKENS
        )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        sequences = bad_word_token_sequences(self._tokenizer, params.bad_words)
        longest = max(map(len, sequences), default=0)
        if longest > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                "bad_words", f"{longest} tokens", f"words of at most {MAX_BAD_WORD_TOKENS} tokens"
            )
        return tuple(map(tuple, sequences))

    def grammar_of(self, params: SamplingParams) -> CompiledGrammar | None:
        """What a request keeps to, if anything, once it is compiled; waits for it.

        Raises:
            InvalidRequestError: it cannot be compiled.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return None
        assert isinstance(wanted, StructuredOutputsParams)
        return self.grammars.compile(wanted)

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, is_cut: bool = False
    ) -> list[int]:
        """A prompt's tokens. Text that cannot fit the context, by its length, is not tokenized.

        Args:
            add_special_tokens: put BOS and EOS where the model wants them.
            is_cut: whether a prompt that is too long will be cut to a length that fits.

        Raises:
            InvalidRequestError: it is too long, or cannot be tokenized.
        """
        if not is_cut:
            self._check_length(text, self._max_model_len)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_length(self, text: str, context: int) -> None:
        """Refuses a text that cannot fit, by its length: nobody tokenizes it."""
        if isinstance(text, str) and len(text) > SHORT_TEXT_CHARS:
            least = self._tokenizer.least_tokens(text)
            if least >= context:
                raise self._too_long(f"{len(text)} characters, at least {least} tokens", context)

    def _too_long(self, given: str, context: int) -> InvalidRequestError:
        relation = "one less than" if context == self._max_model_len else "all of"
        allowed = (
            f"at most {context - 1} tokens, {relation} the context "
            f"(max_model_len {self._max_model_len})"
        )
        return InvalidRequestError("prompt", given, allowed)

    def _tokens(
        self, prompt: Prompt, tokenization: Tokenization, most: int | None, context: int
    ) -> list[int]:
        """A prompt's tokens, fewer than `context` unless `most` of them are kept."""
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("prompt", prompt, "text that is not empty")
            if most is None:
                self._check_length(prompt, context)
            token_ids = self._tokenizer.encode(
                tokenization.shortened(prompt, most, self._tokenizer),
                add_special_tokens=tokenization.add_special_tokens,
            )
            if not token_ids:
                raise InvalidRequestError("prompt", prompt, "text that is at least one token")
            return token_ids
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise InvalidRequestError("prompt", prompt, "a string or a list of token ids")
        if most is None and len(prompt) >= context:
            raise self._too_long(f"{len(prompt)} tokens", context)
        token_ids = [*prompt]
        if not token_ids:
            raise InvalidRequestError("prompt_token_ids", token_ids, "at least one token id")
        self._check_range("prompt_token_ids", token_ids)
        return token_ids

    def pooler_or_refuse(self) -> Pooler:
        """What makes vectors of hidden states.

        Raises:
            InvalidRequestError: the engine takes no pooled requests.
        """
        if self.pooler is None:
            allowed = "embed or both, for embeddings and scores: start the engine with that task"
            raise InvalidRequestError("task", "generate", allowed)
        return self.pooler

    def _max_tokens(
        self, num_prompt_tokens: int, params: SamplingParams, limit: int | None, context: int
    ) -> int:
        room = context - num_prompt_tokens
        if room < 1:
            raise self._too_long(f"{num_prompt_tokens} tokens", context)
        if limit is None:
            if params.min_tokens > room:
                raise InvalidRequestError(
                    "min_tokens", params.min_tokens, f"at most {room}, what the context leaves"
                )
            return room if params.max_tokens is None else min(room, params.max_tokens)
        if limit > room:
            raise InvalidRequestError(
                "max_tokens",
                limit,
                f"at most {room}: the context (max_model_len {self._max_model_len}) less the "
                f"prompt's {num_prompt_tokens} tokens",
            )
        return limit

    def _check_ids(self, params: SamplingParams) -> None:
        self._check_range("stop_token_ids", params.stop_token_ids)
        self._check_range("allowed_token_ids", params.allowed_token_ids or ())
        self._check_range("logit_bias", tuple(params.logit_bias or ()))

    def _check_range(self, field: str, token_ids: Sequence[int]) -> None:
        if are_plain_integers(token_ids, 0, self._vocab_size - 1):
            return
        for token_id in token_ids:
            if (
                isinstance(token_id, bool)
                or not isinstance(token_id, int)
                or not 0 <= token_id < self._vocab_size
            ):
                raise InvalidRequestError(
                    field, token_id, f"token ids from 0 to {self._vocab_size - 1}"
                )


def _check_stops(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], eos_token_ids: Sequence[int]
) -> None:
    """Refuses more stop tokens than a row holds, and a first token that could be none."""
    stop_ids = {*eos_token_ids, *params.stop_token_ids}
    if len(stop_ids) > MAX_STOP_IDS:
        own = MAX_STOP_IDS - len(set(eos_token_ids))
        raise InvalidRequestError(
            "stop_token_ids", list(params.stop_token_ids), f"at most {own} besides the model's own"
        )
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {word[0] for word in bad_words if len(word) == 1}
    if not left or (params.min_tokens and left <= stop_ids):
        allowed = "at least one token that is no bad word"
        if params.min_tokens:
            allowed += f" and does not end the text, as min_tokens is {params.min_tokens}"
        raise InvalidRequestError("allowed_token_ids", list(params.allowed_token_ids), allowed)


def check_label(label: object) -> None:
    """Raises InvalidRequestError unless a client's id is None or a string of a sound length."""
    if label is not None and not (isinstance(label, str) and 1 <= len(label) <= MAX_ID_CHARS):
        raise InvalidRequestError(
            "request_id", label, f"a string of 1 to {MAX_ID_CHARS} characters, or not given"
        )


def _deadline(timeout_s: float | None, now_s: float) -> float | None:
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise InvalidRequestError("timeout_s", timeout_s, "a number of seconds")
    if timeout_s != timeout_s:
        raise InvalidRequestError("timeout_s", timeout_s, "a number of seconds")
    if timeout_s <= 0:
        raise DeadlineExceededError(
            f"timeout_s = {timeout_s!r} is not allowed: the deadline has passed already"
        )
    return now_s + timeout_s
