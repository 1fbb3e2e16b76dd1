"""What the scheduler expects of the future: step times, output lengths, transfer times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.kv.page_needs import PageNeeds
from octavo.engine.request import Request
from octavo.engine.scheduler.length_estimator import LengthEstimator
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.scheduler.step_time_model import NO_FEATURES, StepFeatures, StepTimeModel

Floats = NDArray[np.float64]

_WINDOW = 16


class RecentValues:
    """The last 16 values: their median, and their tenth percentile. 0 before there is any.

    Attributes:
        middle: the median.
        low: the tenth percentile.
    """

    __slots__ = ("_values", "low", "middle")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self.middle = self.low = 0.0

    def observe(self, value: float) -> None:
        """Takes in a value; the oldest of 16 leaves."""
        self._values.append(value)
        ordered = sorted(self._values)
        self.middle = ordered[len(ordered) // 2]
        self.low = ordered[len(ordered) // 10]


_STEP_RATE = 0.02
_PREFILL_RATE = 0.05
_SHORTER_COPY_RATE = 0.3
_LONGER_COPY_RATE = 0.02
_TIMED_COPY_RATE = 0.2
_FEW_PAGES = 16

CAUTIOUS, TYPICAL, GENEROUS = 0, 1, 2
"""Quantiles of the remaining length, as indices into the estimator's."""


@dataclass(slots=True, kw_only=True)
class Forecast:
    """Estimates shared by the policies; only the scheduler feeds them.

    Attributes:
        limits: what a step can take.
        step_time: seconds of a step.
        lengths: output lengths by class.
        num_steps_to_trust: steps to learn from before anybody is given up on these estimates.
        uses_declared_lengths: whether a request's `known_output_len` is believed. Off unless the
            policy says so by its parameters: production does not know lengths.
        page_copy_s: seconds to copy a page between device and host, as measured.
        mean_prefill_context: running mean of the context before a prompt token.
        newest_decode: decode rows of the newest step that had any, and their context.
        host_s: seconds that a step on an idle device takes beside its time on the device: to plan
            and dispatch it, and to take in its result.
        gap_s: the same of a step that was dispatched while another one ran.
        door_s: seconds from a request's arrival at the front to its acceptance.
        ttft_targets: of accepted requests, in seconds; infinity for one without.

    Running means of seconds are kept without the level of step times (`StepErrors`), so that a
    change of the machine's speed shows in all of them at once.
    """

    limits: StepLimits
    step_time: StepTimeModel
    lengths: LengthEstimator
    uses_declared_lengths: bool = False
    num_steps_to_trust: int = 8
    page_copy_s: float = 2e-5
    mean_prefill_context: float = 0.0
    newest_decode: StepFeatures = NO_FEATURES
    host_s: RecentValues = field(default_factory=RecentValues)
    gap_s: RecentValues = field(default_factory=RecentValues)
    door_s: RecentValues = field(default_factory=RecentValues)
    ttft_targets: RecentValues = field(default_factory=RecentValues)
    _iteration: float = 0.0
    _mean_full: StepFeatures = NO_FEATURES
    _full_step: float = 0.0
    _full_step_token: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether step times rest on more than a guess."""
        return self.step_time.num_observed >= self.num_steps_to_trust

    def remaining_tokens(self, request: Request, quantile: int | None = None) -> float:
        """Output tokens still to come, ≥ 1: the mean, or one of the kept quantiles."""
        if self.uses_declared_lengths and request.known_output_len is not None:
            return max(1.0, request.known_output_len - len(request.output_token_ids))
        if quantile is None:
            return self.lengths.expected(request)
        return self.lengths.quantile(request, quantile)

    def remaining_lengths(self, requests: Sequence[Request]) -> list[tuple[float, float]]:
        """The mean of `remaining_tokens` and its cautious quantile, for several at once."""
        if self.uses_declared_lengths:
            means = [self.remaining_tokens(request) for request in requests]
        else:
            means = self.lengths.expected_each(requests)
        return list(zip(means, [self.remaining_tokens(r, CAUTIOUS) for r in requests], strict=True))

    @property
    def step_s(self) -> float:
        """Seconds of an iteration at the present load."""
        return self._iteration * self.step_time.decode.level or self.alone_step_s

    @property
    def alone_step_s(self) -> float:
        """Seconds of a decode iteration of one row, nobody beside it."""
        return self.step_time.predict_s(StepFeatures(1, 0))

    def alone_prefill_s(self, num_tokens: int) -> float:
        """Seconds until the prompt's last token is computed if the machine does nothing else."""
        return self._alone_s(num_tokens, 1.0, self.host_s.middle, self.gap_s.middle)

    def least_prefill_s(self, num_tokens: int, now_s: float) -> float:
        """As `alone_prefill_s`, at the low quantile of what steps take: see `StepErrors`."""
        share = self.step_time.least_share(now_s, is_prefill=True)
        sunk = 1.0 / self.step_time.prefill.doubt(now_s)
        return self._alone_s(num_tokens, share, self.host_s.low * sunk, self.gap_s.low * sunk)

    def best_prefill_s(self, num_tokens: int) -> float:
        """As `least_prefill_s`, as if it had just been measured: what an idle machine can do."""
        share = self.step_time.prefill.best
        return self._alone_s(num_tokens, share, self.host_s.low, self.gap_s.low)

    def _alone_s(self, num_tokens: int, share: float, host_s: float, gap_s: float) -> float:
        if not num_tokens:
            return 0.0
        most, model = self.limits.max_num_batched_tokens, self.step_time
        full, rest = divmod(num_tokens, most)
        seconds = full * model.predict_prefill_s(most) if full else 0.0
        if rest:
            seconds += model.predict_prefill_s(rest)
        return seconds * share + host_s + gap_s * (full + (rest > 0) - 1)

    def least_step_s(self, now_s: float) -> float:
        """As `alone_step_s`, at the low quantile of what steps take."""
        return self.alone_step_s * self.step_time.least_share(now_s, is_prefill=False)

    @property
    def best_step_s(self) -> float:
        """As `least_step_s`, as if it had just been measured."""
        return self.alone_step_s * self.step_time.decode.best

    def prompts_s(self, num_tokens: int, num_prompts: int, num_decode: int) -> float:
        """Seconds until so many prompts are computed beside the rows that decode now.

        Args:
            num_tokens: of all prompts together.
            num_decode: rows that decode beside them.
        """
        if not num_tokens:
            return 0.0
        limits = self.limits
        most: float = limits.max_num_batched_tokens - num_decode
        most = max(1.0, min(self._mean_full.num_prefill or most, most))
        num_steps = max(math.ceil(num_tokens / most), -(-num_prompts // limits.max_prefill_rows))
        chunk = -(-num_tokens // num_steps)
        before, newest = self.mean_prefill_context, self.newest_decode
        context = newest.decode_context * num_decode / max(newest.num_decode, 1)
        step_s = self.step_time.predict_s(StepFeatures(num_decode, chunk, context, chunk * before))
        return num_steps * (step_s + self.gap_s.middle)

    @property
    def prefill_token_s(self) -> float:
        """Seconds of device time a prompt token takes at the size of step that prompts run in."""
        if self._full_step_token:
            return self._full_step_token * self.step_time.prefill.level
        most = self.limits.max_num_batched_tokens
        return self.step_time.predict_prefill_s(most) / most

    @property
    def marginal_token_s(self) -> float:
        """Seconds that a prompt token adds to a step of decode rows, at the size of step that
        prompts run in."""
        mean = self._mean_full
        if not mean.num_prefill:
            return self.step_time.prefill_token_s(self.mean_prefill_context)
        alone = StepFeatures(mean.num_decode, 0, mean.decode_context)
        added_s = self.step_time.predict_s(mean) - self.step_time.predict_s(alone)
        return max(added_s / mean.num_prefill, 0.0)

    @property
    def full_step_s(self) -> float:
        """Seconds of a step that holds as many prompt tokens as the policy allows."""
        if self._full_step_token:
            return self._full_step * self.step_time.prefill.level
        return self.step_time.predict_prefill_s(self.limits.max_num_batched_tokens)

    def prefill_s(self, num_tokens: float) -> float:
        """Seconds of device time for `num_tokens` prompt tokens, decode rows beside them."""
        return num_tokens * self.prefill_token_s

    def demand_s(self, request: Request) -> float:
        """Seconds of the whole machine that the request still takes.

        Its prefill has the machine to itself; its decoding takes the larger of its shares of rows
        and of pages, for as many iterations as it has tokens to come.
        """
        limits = self.limits
        missing = request.num_missing_tokens
        remaining = self.remaining_tokens(request)
        num_pages = limits.needs.mean_held(request.num_tokens + remaining)
        share = max(1 / limits.max_num_seqs, num_pages / (limits.num_pages - 1))
        return self.prefill_s(missing) + remaining * self.step_s * share

    def observe_step(
        self, features: StepFeatures, seconds: float, num_iterations: int, now_s: float
    ) -> None:
        """Learns from a step that ended by `now_s`: `features` are of its middle iteration."""
        iteration_s, model = seconds / num_iterations, self.step_time
        model.observe(features, iteration_s, now_s)
        rate = max(_STEP_RATE, 1.0 / model.num_observed)
        # What the model says of such a step, and not what this one took: it may have hung.
        level = (model.prefill if features.num_prefill else model.decode).level
        self._iteration += rate * (model.predict_s(features) / level - self._iteration)
        if features.num_prefill:
            context = features.prefill_context / features.num_prefill
            self.mean_prefill_context += _PREFILL_RATE * (context - self.mean_prefill_context)
        if features.num_decode:
            self.newest_decode = features

    def observe_budget(self, num_prefill: int, num_decode: int, decode_context: float) -> None:
        """Learns how many prompt tokens the policy lets into a step beside the decode rows."""
        if num_prefill <= 0:
            return
        rate = _PREFILL_RATE if self._full_step_token else 1.0
        mean = self._mean_full
        tokens = mean.num_prefill + rate * (num_prefill - mean.num_prefill)
        self._mean_full = mean = StepFeatures(
            mean.num_decode + rate * (num_decode - mean.num_decode),
            tokens,
            mean.decode_context + rate * (decode_context - mean.decode_context),
            tokens * self.mean_prefill_context,
        )
        # What the mean step takes by what is known now: a mean of what steps were once expected to
        # take would remember for fifty steps what nobody believes any more.
        self._full_step = self.step_time.predict_s(mean) / self.step_time.prefill.level
        self._full_step_token = self._full_step / tokens

    def observe_timed_copy(self, num_pages: int, seconds: float) -> None:
        """Learns from a copy that took so long itself; one of few pages, mostly latency, teaches
        little."""
        rate = _TIMED_COPY_RATE * num_pages / (num_pages + _FEW_PAGES)
        self.page_copy_s += rate * (seconds / num_pages - self.page_copy_s)

    def observe_copy(self, num_pages: int, seconds: float) -> None:
        """Learns from one copy of pages between device and host that only its end is known of.

        A copy's end is noticed only between steps, so that a measured time is too long or just
        right: shorter ones are believed sooner.
        """
        error_s = seconds / num_pages - self.page_copy_s
        self.page_copy_s += (_SHORTER_COPY_RATE if error_s < 0 else _LONGER_COPY_RATE) * error_s


def peak_pages(contexts: Floats, remaining: Floats, needs: PageNeeds) -> float:
    """Most pages that rows will hold together if none joins and each emits what is expected.

    Every row grows by a token an iteration and gives all its pages back at its end, so the peak
    is just before some row's end. In a window, rows are taken to fill theirs all at once.

    Args:
        contexts: tokens each row holds now.
        remaining: tokens each will still emit.
    """
    if not len(contexts):
        return 0.0
    order = remaining.argsort()[::-1]
    left = remaining[order]
    held = np.cumsum(contexts[order])  # of this row and those that stay longer
    count = np.arange(1, len(order) + 1)
    whole = float(np.max((held + count * left) / needs.page_size + count))
    pages = needs.num_whole * whole
    for window in needs.windows:
        if window is not None:
            seen = np.minimum(contexts + remaining, window)
            pages += min(whole, float(seen.sum()) / needs.page_size + len(seen))
    return pages


def demand_s(
    remaining: Floats,
    contexts: Floats,
    *,
    step_s: float,
    num_rows: int,
    num_pages: int,
    needs: PageNeeds,
) -> Floats:
    """Seconds of the whole machine that decode rows still take: see `Forecast.demand_s`."""
    held = needs.mean_held_each(contexts + remaining)
    share = np.maximum(np.array(1.0 / num_rows), held / np.array(float(num_pages)))
    result: Floats = remaining * (np.array(step_s) * share)
    return result
