"""What became of requests: counts and distributions that the metrics page shows.

Fed by the fronts in the event loop, from the moments that each output carries: the engine's thread
does nothing for it. Times are on the engine's clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

from octavo.engine.errors import DeadlineExceededError, OctavoError
from octavo.engine.input.targets import Targets
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.request import Priority
from octavo.server.status import reason_of

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0),
)
REQUEST_S = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0),
)
NUM_TOKENS = tuple(float(1 << power) for power in range(18))

NUM_PREDICTIONS = 512
"""Requests over which quantiles of prediction errors are taken."""
GOOD_ENDS = frozenset(("stop", "length"))


class Histogram:
    """Counts by bucket; what is above the last bound has a bucket of its own.

    Args:
        bounds: inclusive upper bounds, ascending.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class RequestStats:
    """Counts since the start. Not thread-safe: the event loop alone feeds and reads it.

    Attributes:
        ttft_s: of requests with a first token; of those whose answer comes whole, once it came.
        tpot_s, e2e_s, queue_s, prefill_s, decode_s: of requests that ended well.
        itl_s: between a completion's tokens; those that came in one message share its wait evenly.
        prompt_tokens, generation_tokens: by request, of those that ended well.
        num_failed: requests that ended in an error, refused ones with them.
        ends: requests that began and ended, by finish reason.
        refusals: answers that are errors, by kind ("overloaded", "invalid_request"): each protocol
            counts those that it gives.
        slo: (class, target, met) -> requests that had the target.
        good_requests, good_tokens: by class, of requests that ended well within all their targets.
    """

    def __init__(self) -> None:
        self.ttft_s = Histogram(TTFT_S)
        self.itl_s = Histogram(TOKEN_S)
        self.tpot_s = Histogram(TOKEN_S)
        self.e2e_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(NUM_TOKENS)
        self.generation_tokens = Histogram(NUM_TOKENS)
        self._prediction_errors: deque[float] = deque(maxlen=NUM_PREDICTIONS)
        self.num_failed = 0
        self.ends: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.slo: Counter[tuple[str, str, bool]] = Counter()
        self.good_requests: Counter[str] = Counter()
        self.good_tokens: Counter[str] = Counter()

    def predicted(self, predicted_s: float, took_s: float) -> None:
        """Takes in what a request's time to the first token was expected to be, and was."""
        self._prediction_errors.append(abs(predicted_s - took_s) / max(took_s, 1e-6))

    def prediction_error(self, quantile: float) -> float:
        """A quantile of the errors of predicted times to the first token, each over the real time,
        of the last 512 requests; 0 before any."""
        ordered = sorted(self._prediction_errors)
        return ordered[int(quantile * (len(ordered) - 1))] if ordered else 0.0

    def refused(self, error: OctavoError | str) -> None:
        """Counts a refusal by the kind of its error; by its name if a protocol alone knows it."""
        kind = error if isinstance(error, str) else reason_of(type(error)).lower()
        self.refusals[kind] += 1


class RequestWatch:
    """Follows one request and tells `stats` of it, once.

    Args:
        stats: to be told.
        priority: its class.
        targets: its goals.
        is_delta: whether each output holds only what is new.

    Attributes:
        num_tokens: generated so far, over all completions.
        finish_reason: how it ended; None while it runs.
        newest: its newest output.
    """

    __slots__ = (
        *("finish_reason", "newest", "num_tokens"),
        *("_has_begun", "_is_delta", "_last_s", "_priority", "_stats", "_targets"),
    )

    def __init__(
        self, stats: RequestStats, priority: Priority, targets: Targets, *, is_delta: bool
    ) -> None:
        self._stats = stats
        self._priority = priority.name.lower()
        self._targets = targets
        self._is_delta = is_delta
        self._has_begun = False
        self._last_s: float | None = None
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.newest: RequestOutput | None = None

    def saw(self, output: RequestOutput) -> None:
        """Takes in the next output."""
        self.newest = output
        num_tokens = sum([len(completion.token_ids) for completion in output.outputs])
        num_new = num_tokens if self._is_delta else num_tokens - self.num_tokens
        self.num_tokens += num_new
        first_s, now_s = output.metrics.first_token_s, output.metrics.last_token_s
        if num_tokens and first_s is not None and not self._has_begun:
            # Now, and not at its end, which may be minutes away.
            self._has_begun = True
            self._stats.ttft_s.observe(first_s - output.metrics.arrival_s)
            if output.metrics.predicted_ttft_s is not None:
                took_s = first_s - output.metrics.arrival_s
                self._stats.predicted(output.metrics.predicted_ttft_s, took_s)
        if num_new and now_s is not None:
            since_s, num_waits = self._last_s, num_new
            if since_s is None:  # each completion's first token is no wait between tokens
                since_s = output.metrics.first_token_s
                num_waits -= sum([bool(completion.token_ids) for completion in output.outputs])
            if since_s is not None and num_waits:
                self._stats.itl_s.observe(max(now_s - since_s, 0.0) / num_waits, num_waits)
            self._last_s = now_s
        if output.finished:
            self._ended(output)

    def failed(self, error: OctavoError) -> None:
        """It ended in a typed error."""
        if self.finish_reason is None:
            is_late = isinstance(error, DeadlineExceededError)
            self.finish_reason = "deadline" if is_late else "failed"
            self._stats.num_failed += 1
            self._count_targets(None)

    def cancelled(self) -> None:
        """Whoever waited for it left."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            self._stats.ends["cancelled"] += 1

    def _ended(self, output: RequestOutput) -> None:
        reasons = {completion.finish_reason or "failed" for completion in output.outputs}
        bad = reasons - GOOD_ENDS
        self.finish_reason = min(bad or reasons)
        self._stats.ends[self.finish_reason] += 1
        if bad:
            if self.finish_reason != "cancelled":
                self._count_targets(None)
            return
        stats, moments = self._stats, output.metrics
        stats.prompt_tokens.observe(len(output.prompt_token_ids))
        stats.generation_tokens.observe(self.num_tokens)
        begun_s, first_s = moments.first_scheduled_s, moments.first_token_s
        last_s = moments.last_token_s
        if begun_s is not None:
            stats.queue_s.observe(max(begun_s - moments.arrival_s, 0.0))
        if first_s is not None and last_s is not None:
            stats.e2e_s.observe(last_s - moments.arrival_s)
            stats.decode_s.observe(last_s - first_s)
            if begun_s is not None:
                stats.prefill_s.observe(first_s - begun_s)
            tpot_s = moments.tpot_s(self._tokens_of_first(output))
            if tpot_s is not None:
                stats.tpot_s.observe(tpot_s)
        self._count_targets(output)

    def _tokens_of_first(self, output: RequestOutput) -> int:
        """Tokens of the completion whose moments the output carries, if all are equally long."""
        return self.num_tokens // max(len(output.outputs), 1)

    def _count_targets(self, output: RequestOutput | None) -> None:
        """Counts each target as met or missed (all missed without an output), and goodput."""
        stats, targets = self._stats, self._targets
        took: dict[str, float | None] = {"ttft": None, "tpot": None, "e2e": None}
        if output is not None:
            moments = output.metrics
            took["ttft"] = moments.ttft_s
            # One token alone waited for nobody.
            took["tpot"] = moments.tpot_s(self._tokens_of_first(output)) or 0.0
            if moments.last_token_s is not None:
                took["e2e"] = moments.last_token_s - moments.arrival_s
        is_good = output is not None
        for name, seconds in took.items():
            target_s = getattr(targets, f"{name}_target_s")
            if target_s is None:
                continue
            met = seconds is not None and seconds <= target_s
            stats.slo[self._priority, name, met] += 1
            is_good &= met
        if is_good:
            stats.good_requests[self._priority] += 1
            stats.good_tokens[self._priority] += self.num_tokens
