"""What the scheduler expects of the future: step times, output lengths, transfer times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.engine.request import Request
from octavo.engine.scheduler.length_estimator import LengthEstimator
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.scheduler.step_time_model import StepFeatures, StepTimeModel
from octavo.engine.scheduler.tenants import TenantCounters

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
        tenants: what each tenant was served.
        num_steps_to_trust: steps to learn from before anybody is given up on these estimates.
        uses_declared_lengths: whether a request's `known_output_len` is believed. Off unless the
            policy says so by its parameters: production does not know lengths.
        page_copy_s: seconds to copy a page between device and host, as measured.
        iteration_s: running mean of a decode iteration's duration, prefill beside it included.
        mean_prefill_context: running mean of the context before a prompt token.
        full_step_s, full_step_tokens: running means of the seconds and the prompt tokens of a step
            that holds as many of them as the policy allows, decode rows included.
        full_step_token_s: seconds a prompt token takes in such steps, the one over the other.
    """

    limits: StepLimits
    step_time: StepTimeModel
    lengths: LengthEstimator
    tenants: TenantCounters = field(default_factory=TenantCounters)
    uses_declared_lengths: bool = False
    num_steps_to_trust: int = 8
    page_copy_s: float = 2e-5
    iteration_s: float = 0.0
    full_step_s: float = 0.0
    full_step_tokens: float = 0.0
    full_step_token_s: float = 0.0
    mean_prefill_context: float = 0.0

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

    def remaining_tokens_each(self, requests: Sequence[Request]) -> list[float]:
        """As `remaining_tokens`, the means, for several at once."""
        if self.uses_declared_lengths:
            return [self.remaining_tokens(request) for request in requests]
        return self.lengths.expected_each(requests)

    @property
    def step_s(self) -> float:
        """Seconds of an iteration at the present load."""
        return self.iteration_s or self.step_time.predict_s(StepFeatures(1, 0))

    @property
    def alone_step_s(self) -> float:
        """Seconds of a decode iteration of one row, nobody beside it."""
        return self.step_time.predict_s(StepFeatures(1, 0))

    def alone_prefill_s(self, num_tokens: int) -> float:
        """Seconds until the prompt's last token is computed if the machine does nothing else."""
        most, model = self.limits.max_num_batched_tokens, self.step_time
        if num_tokens < most:
            return model.predict_prefill_s(num_tokens) if num_tokens else 0.0
        full, rest = divmod(num_tokens, most)
        seconds = full * model.predict_prefill_s(most)
        return seconds + model.predict_prefill_s(rest) if rest else seconds

    @property
    def prefill_token_s(self) -> float:
        """Seconds of device time a prompt token takes at the size of step that prompts run in."""
        if self.full_step_token_s:
            return self.full_step_token_s
        most = self.limits.max_num_batched_tokens
        return self.step_time.predict_prefill_s(most) / most

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of device time for `num_tokens` prompt tokens, decode rows beside them."""
        return num_tokens * self.prefill_token_s

    def demand_s(self, request: Request) -> float:
        """Seconds of the whole machine that the request still takes.

        Its prefill has the machine to itself; its decoding takes the larger of its shares of rows
        and of pages, for as many iterations as it has tokens to come.
        """
        limits = self.limits
        missing = request.num_tokens - request.num_computed_tokens
        remaining = self.remaining_tokens(request)
        num_pages = (request.num_tokens + remaining) / limits.page_size
        share = max(1 / limits.max_num_seqs, num_pages / (limits.num_pages - 1))
        return self.prefill_s(missing) + remaining * self.step_s * share

    def observe_step(self, features: StepFeatures, seconds: float, num_iterations: int) -> None:
        """Learns from a step that ran: `features` are of its middle iteration."""
        iteration_s = seconds / num_iterations
        self.step_time.observe(features, iteration_s)
        rate = _STEP_RATE if self.iteration_s else 1.0
        self.iteration_s += rate * (iteration_s - self.iteration_s)
        if features.num_prefill:
            context = features.prefill_context / features.num_prefill
            self.mean_prefill_context += _PREFILL_RATE * (context - self.mean_prefill_context)

    def observe_budget(self, num_prefill: int, num_decode: int, decode_context: float) -> None:
        """Learns how many prompt tokens the policy lets into a step beside the decode rows."""
        if num_prefill <= 0:
            return
        prefill_context = num_prefill * self.mean_prefill_context
        features = StepFeatures(num_decode, num_prefill, decode_context, prefill_context)
        rate = _PREFILL_RATE if self.full_step_token_s else 1.0
        # A mean of seconds over a mean of tokens: of the seconds a token, small steps between large
        # ones would make the mean several times too long.
        self.full_step_s += rate * (self.step_time.predict_s(features) - self.full_step_s)
        self.full_step_tokens += rate * (num_prefill - self.full_step_tokens)
        self.full_step_token_s = self.full_step_s / self.full_step_tokens

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
