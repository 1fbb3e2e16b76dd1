"""How one request wants its tokens chosen: names, defaults and ranges as users know them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.params import StructuredOutputsParams

MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKENS = 16
MAX_STOP_IDS = 24
"""Different tokens that end a request, the model's own among them."""
MAX_ALLOWED_TOKENS = 16_384
MAX_LOGIT_BIASES = 4_096
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 16
"""Of the longest bad word, as the model spells it."""
MAX_REPETITION_PENALTY = 1e4
"""And its inverse the least: logits that it divides or multiplies stay numbers of float32."""
MAX_SEED = 2**63 - 1
MAX_ID_DIGITS = 10
"""Of a token id written as text: no token has more, and Python reads no number of thousands."""


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = "cumulative"
    """Everything generated so far."""
    DELTA = "delta"
    """Only what is new since the last output."""
    FINAL_ONLY = "final_only"
    """One output, at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Validated on construction; immutable.

    Attributes:
        n: how many completions to return for the prompt, 1 to 64; greedy needs 1.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens already
            generated, once and per occurrence; [-2, 2].
        repetition_penalty: logits of tokens in the prompt or the output are divided (positive) or
            multiplied (negative) by it; from 0.0001 to 10,000, 1 is off.
        temperature: [0, 2]; 0 is greedy.
        top_p: (0, 1]; smallest set of tokens with this much probability.
        top_k: 0 (or -1) is off, else ≥ 1.
        min_p: [0, 1]; tokens below this share of the top probability are dropped.
        seed: tokens depend only on it and their position; None, and -1, draws one at random.
        stop: strings that end the text; not included unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the sequence, besides the model's own.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        max_tokens: most tokens to generate, ≥ 1; None is as many as the context allows.
        min_tokens: no stop before this many tokens; 0 ≤ min_tokens ≤ max_tokens.
        logprobs: number of top log-probabilities returned with each token (0: only the chosen
            token's own), None for none; ≤ 20.
        prompt_logprobs: the same for the prompt's tokens; ≤ 20.
        logit_bias: token id -> number in [-100, 100] added to its logit; at most 4,096.
        allowed_token_ids: only these may be generated; at most 16,384.
        bad_words: strings that may not be generated; at most 64, of 256 characters each.
        structured_outputs: a grammar that the text keeps to, as `StructuredOutputsParams` or as a
            mapping of its fields. The grammar says when the text ends: with it there are no
            `min_tokens`, `ignore_eos`, `allowed_token_ids` or `bad_words`.
        detokenize: whether outputs carry text.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string in the text.
        output_kind: what the outputs of a stream hold.

    Raises:
        InvalidRequestError: a value is out of its range; names field, value and range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in self.__slots__:
            put(self, name, as_plain(getattr(self, name)))
        put(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        put(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        put(self, "bad_words", tuple(self.bad_words or ()))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            put(self, "logit_bias", _bias(self.logit_bias))
        if self.structured_outputs is not None:
            parsed = StructuredOutputsParams.parse(self.structured_outputs)
            put(self, "structured_outputs", parsed)
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.seed == -1:
            put(self, "seed", None)
        self._check()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def clone(self) -> SamplingParams:
        """Itself, as nothing can change it: for code written for vLLM."""
        return self

    def _check(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0)
        least = 1 / MAX_REPETITION_PENALTY
        _number("repetition_penalty", self.repetition_penalty, least, MAX_REPETITION_PENALTY)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens",
                self.min_tokens,
                f"0 to max_tokens ({self.max_tokens})",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.is_greedy and self.n > 1:
            raise InvalidRequestError("n", self.n, "1 when temperature is 0 (greedy)")
        self._check_collections()

    def _check_collections(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                "stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}"
            )
        for stop in self.stop:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    "stop", stop, f"strings of 1 to {MAX_STOP_STRING_CHARS} characters"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequestError(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKENS}"
            )
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids", [], "at least one token id, or None")
            if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
                given = f"{len(self.allowed_token_ids)} ids"
                raise InvalidRequestError(
                    "allowed_token_ids", given, f"at most {MAX_ALLOWED_TOKENS}"
                )
            if not are_plain_integers(self.allowed_token_ids, 0, 2**31 - 1):
                for token_id in self.allowed_token_ids:
                    _integer("allowed_token_ids", token_id, 0, 2**31 - 1)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                "bad_words", f"{len(self.bad_words)} strings", f"at most {MAX_BAD_WORDS}"
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                raise InvalidRequestError(
                    "bad_words", word, f"strings of 1 to {MAX_BAD_WORD_CHARS} characters"
                )
        if self.structured_outputs is not None:
            self._check_with_grammar()
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(name, getattr(self, name), "true or false")
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop", self.stop, "empty when detokenize is false")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError("output_kind", self.output_kind, "a RequestOutputKind")

    def _check_with_grammar(self) -> None:
        """Refuses what may forbid the only tokens that the grammar allows."""
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
            if getattr(self, name):
                allowed = "not given with structured_outputs, whose grammar says what may come"
                raise InvalidRequestError(name, getattr(self, name), allowed)


def are_plain_integers(values: Sequence[int], low: int, high: int) -> bool:
    """Whether all are integers of Python's own type within the bounds; quick, whatever they are."""
    return not values or (
        set(map(type, values)) == {int} and low <= min(values) <= max(values) <= high
    )


def as_plain(value: Any) -> Any:
    """A number or an array of NumPy's, JAX's or torch's as a number or a list of Python's, and so
    all entries of a list that begins or ends with one. Anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    is_listed = isinstance(value, list | tuple) and value
    if is_listed and (hasattr(value[0], "tolist") or hasattr(value[-1], "tolist")):
        return [as_plain(each) for each in value]
    return value


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Neither NaN nor infinity is within; and no float holds some integers.
    if not ok or not (low < value if low_open else low <= value) or not value <= high:
        bounds = f"{'(' if low_open else '['}{low:g}, {high:g}]"
        raise InvalidRequestError(name, value, f"a finite number in {bounds}")


def _bias(bias: Mapping[Any, float]) -> dict[int, float]:
    checked: dict[int, float] = {}
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            "logit_bias", f"{len(bias)} token ids", f"at most {MAX_LOGIT_BIASES}"
        )
    for key, value in bias.items():
        is_number = isinstance(key, str) and key.isdecimal() and len(key) <= MAX_ID_DIGITS
        token_id, value = int(key) if is_number else as_plain(key), as_plain(value)
        _integer("logit_bias", token_id, 0, 2**31 - 1)
        _number("logit_bias", value, -100.0, 100.0)
        checked[token_id] = float(value)
    return checked
