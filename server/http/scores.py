"""Log-probabilities in the shapes of OpenAI's old completions and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from octavo.engine.output.outputs import Logprob, TokenLogprobs
from octavo.engine.text.detokenizer import IncrementalDetokenizer
from octavo.engine.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def finite(score: Logprob) -> float:
    """The log-probability, or the least one that JSON is told of."""
    return max(score.logprob, LEAST_LOGPROB)


class Offsets:
    """Where tokens stand in the text that they spell.

    Args:
        tokenizer: of the model.
        begin: characters that stand before the first of them.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int, *, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._num_chars = begin

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Characters of the text before each of the next tokens. A character that several tokens
        spell is there once the last of them is."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._detokenizer.append_one(token_id))
        return offsets


def scores_of(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs], offsets: Offsets
) -> dict[str, Any]:
    """OpenAI's `logprobs` object of generated tokens."""
    pairs = list(zip(token_ids, scores, strict=True))
    return {
        "tokens": [entry[token_id].decoded_token or "" for token_id, entry in pairs],
        "token_logprobs": [finite(entry[token_id]) for token_id, entry in pairs],
        "top_logprobs": [_by_text(entry) for entry in scores],
        "text_offset": offsets.of(token_ids),
    }


def echoed_scores(
    token_ids: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    num_top: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """OpenAI's `logprobs` object of a prompt that is echoed: nothing comes before its first token,
    which has no probability.

    Args:
        scores: fewer than tokens if the request was cancelled before its prompt was read.
        num_top: most likely tokens told beside each token.
    """
    tops: list[dict[str, float] | None] = []
    chosen: list[float | None] = []
    for token_id, entry in zip_longest(token_ids, scores):
        chosen.append(None if entry is None else finite(entry[token_id]))
        tops.append(None if entry is None else _by_text(_top(entry, token_id, num_top)))
    return {
        "tokens": [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids],
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": Offsets(tokenizer, 0, skip_special_tokens=True).of(token_ids),
    }


def prompt_scores(
    token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, by token id.

    Args:
        scores: fewer than tokens if the request was cancelled before its prompt was read.
        num_top: most likely tokens told beside each token.
    """
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(score), "rank": score.rank, "decoded_token": score.decoded_token
            }
            for token, score in _top(entry, token_id, num_top).items()
        }
        for token_id, entry in zip_longest(token_ids, scores)
    ]  # fmt: skip


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two of OpenAI's `logprobs` objects, one after the other."""
    return {name: first[name] + then[name] for name in first}


def _top(entry: TokenLogprobs, token_id: int, num_top: int) -> TokenLogprobs:
    return {
        token: score for token, score in entry.items() if token == token_id or score.rank <= num_top
    }


def _by_text(scores: TokenLogprobs) -> dict[str, float]:
    """Log-probabilities by text; of tokens that spell alike, such as parts of characters, the
    likeliest."""
    by_text: dict[str, float] = {}
    for score in scores.values():
        text, value = score.decoded_token or "", finite(score)
        by_text[text] = max(value, by_text.get(text, LEAST_LOGPROB))
    return by_text
