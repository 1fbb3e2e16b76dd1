"""How well an engine's model predicts a text, and how far that is from another engine's.

The text that ships (`accuracy_text.txt`) is a few passages of the public domain: Darwin's
introduction to the Origin of Species, and the beginnings of Moby-Dick, Alice in Wonderland and
Pride and Prejudice. Models have read them, so perplexities are low; what a measurement is for is
the difference between two engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.engine.engine import Engine
from octavo.engine.errors import InvalidConfigError
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams

TEXT_FILE = Path(__file__).with_name("accuracy_text.txt")
WINDOW_TOKENS = 256
"""A text is read in pieces of so many tokens, each without what came before it."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model says of each token of a text but the first of a window, in order.

    Attributes:
        logprobs: natural log of the probability of the token that is there.
        top_ids: the token that the model thinks likeliest.
        token_ids: the token that is there.
    """

    logprobs: Sequence[float]
    top_ids: Sequence[int]
    token_ids: Sequence[int]

    @property
    def perplexity(self) -> float:
        """exp of the mean loss a token."""
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def predict(engine: Engine, text: str, window_tokens: int = WINDOW_TOKENS) -> Predictions:
    """Scores every token of a text.

    Args:
        engine: warmed up, idle.
        text: of at least two tokens.
        window_tokens: tokens read together, at most the engine's context less one.

    Raises:
        InvalidConfigError: the window does not fit the context, or the text has no second token.
    """
    if not 2 <= window_tokens < engine.max_model_len:
        raise InvalidConfigError("window", window_tokens, f"2 to {engine.max_model_len - 1} tokens")
    token_ids = engine.tokenizer.encode(text)
    windows = [
        token_ids[start : start + window_tokens]
        for start in range(0, len(token_ids), window_tokens)
    ]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise InvalidConfigError("text", text, "a text of at least two tokens")
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=1,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    submissions = [
        engine.inputs.process(None, window, params, now_s=engine.clock.now_s())
        for window in windows
    ]
    for submission in submissions:
        engine.submit(submission)
    outputs: dict[str, RequestOutput] = {}
    while len(outputs) < len(windows):
        outputs.update((output.engine_id, output) for output in engine.step())
    logprobs: list[float] = []
    top_ids: list[int] = []
    scored: list[int] = []
    for submission, window in zip(submissions, windows, strict=True):
        rows = outputs[submission.request_id].prompt_logprobs
        assert rows is not None
        for token, row in zip(window[1:], rows[1:], strict=True):
            assert row is not None
            logprobs.append(row[token].logprob)
            top_ids.append(next(key for key, entry in row.items() if entry.rank == 1))
            scored.append(token)
    return Predictions(logprobs, top_ids, scored)


def compare(baseline: Predictions, other: Predictions) -> dict[str, Any]:
    """How far `other` is from `baseline`, on the same text.

    Returns:
        num_tokens; perplexity and baseline_perplexity, and perplexity_ratio of the two;
        top1_agreement, the share of positions where both think the same token likeliest;
        mean_abs_logprob_change, in nats.

    Raises:
        ValueError: they are of different texts.
    """
    if list(baseline.token_ids) != list(other.token_ids):
        raise ValueError("the predictions are of different texts")
    num_tokens = len(baseline.token_ids)
    agree = sum(a == b for a, b in zip(baseline.top_ids, other.top_ids, strict=True))
    moved = [abs(a - b) for a, b in zip(baseline.logprobs, other.logprobs, strict=True)]
    return {
        "num_tokens": num_tokens,
        "baseline_perplexity": baseline.perplexity,
        "perplexity": other.perplexity,
        "perplexity_ratio": other.perplexity / baseline.perplexity,
        "top1_agreement": agree / num_tokens,
        "mean_abs_logprob_change": math.fsum(moved) / num_tokens,
    }
