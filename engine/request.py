"""One sequence on its way through the engine: the host's whole knowledge of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import RequestMetrics
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.sampling_params import SamplingParams

COMPUTED, INFLIGHT_TOKENS, INFLIGHT_STEPS = 0, 1, 2
"""What stands where in `Request.counts`."""


def no_counts() -> NDArray[np.int32]:
    """`Request.counts` of a request that nothing is computed of."""
    return np.zeros(3, np.int32)


class Priority(enum.IntEnum):
    """Priority classes; a smaller number is served first."""

    REALTIME = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3

    @classmethod
    def parse(cls, value: object) -> Priority:
        """A class from itself, its name (any case) or its number; None is NORMAL.

        Raises:
            InvalidRequestError: it names no class.
        """
        if value is None:
            return cls.NORMAL
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= cls.LOW:
            return cls(value)
        raise InvalidRequestError(
            "priority", value, "realtime, high, normal or low (or 0 to 3, 0 served first)"
        )


class RequestStatus(enum.Enum):
    """Where a request stands. WAITING and RUNNING are live; the rest are terminal.

    A request is REJECTED when the scheduler gives it up for lack of capacity: its `error` is an
    `OverloadedError`.
    """

    WAITING = "waiting"
    RUNNING = "running"
    STOPPED = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"

    @property
    def is_finished(self) -> bool:
        return self not in (RequestStatus.WAITING, RequestStatus.RUNNING)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A sequence: prompt, sampling parameters, and how far it has come.

    The scheduler alone changes the fields below the line. Everything but `sampling_params` is
    plain numbers, strings and lists: a request moves between processes by its fields.

    Attributes:
        request_id: the engine's own id (`RequestIds`): no other request has or had it.
        prompt_token_ids: the prompt, ≥ 1 tokens.
        sampling_params: validated parameters.
        seed: resolved sampling seed (never None).
        eos_token_ids: the model's end-of-sequence ids (empty under `ignore_eos`).
        max_tokens: resolved limit of generated tokens.
        priority: class; smaller is served first.
        arrival_s: engine clock at acceptance.
        deadline_s: engine clock after which the answer is worthless, or None.
        ttft_target_s, tpot_target_s, e2e_target_s: goals, or None: seconds from `arrival_s` to the
            first token; mean seconds a token after it; seconds from `arrival_s` to the last one.
            A missed goal is a lesser success, not an end: see `deadline_s` for that.
        output_len_class: requests of one class are expected to answer at similar length; empty
            for the class of priority and tenant.
        known_output_len: tokens it will generate, declared or estimated by the caller, for
            policies that use such knowledge; None in production.
        bad_word_token_ids: token sequences that may not be generated.
        tenant, cache_salt: identity for fairness; prefix-cache isolation.
        pooling: how its hidden states are pooled, with nothing left to the model; None for a
            request that generates. A pooled request is prefill alone: it ends when its prompt is
            computed, and `max_tokens` is 1 and stands for its one result.
        label: the client's own id, echoed and logged; other requests may carry it too. Empty for
            none.
        trace_parent: the W3C trace context that the request came with; empty for none.

        status: see `RequestStatus`.
        output_token_ids: tokens committed so far.
        counts: int32[3], the numbers that every step changes, read by the properties below. While
            the request holds a row they are a view of the scheduler's row table, where all rows
            move at once.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        num_reusable_tokens: while it waits, the scheduler's estimate of how many of its first
            tokens need not be computed; 0 while it runs.
        slot: its row on the device while RUNNING, else None.
        stop_reason: what stopped it (string or token id), if anything.
        metrics: when things happened.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float
    priority: Priority = Priority.NORMAL
    deadline_s: float | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    e2e_target_s: float | None = None
    output_len_class: str = ""
    known_output_len: int | None = None
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()
    tenant: str = ""
    cache_salt: str = ""
    pooling: PoolingParams | None = None
    label: str = ""
    trace_parent: str = ""

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    counts: NDArray[np.int32] = field(default_factory=no_counts, init=False, repr=False)
    num_cached_tokens: int = 0
    num_reusable_tokens: int = 0
    slot: int | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    metrics: RequestMetrics = field(init=False)

    def __post_init__(self) -> None:
        assert self.prompt_token_ids, self.request_id
        self.metrics = RequestMetrics(arrival_s=self.arrival_s)

    @property
    def num_computed_tokens(self) -> int:
        """Positions whose KV is written or dispatched to be."""
        return self.counts.item(COMPUTED)

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self.counts[COMPUTED] = value

    @property
    def num_inflight_tokens(self) -> int:
        """Most output tokens that dispatched, uncommitted steps may add."""
        return self.counts.item(INFLIGHT_TOKENS)

    @num_inflight_tokens.setter
    def num_inflight_tokens(self, value: int) -> None:
        self.counts[INFLIGHT_TOKENS] = value

    @property
    def num_inflight_steps(self) -> int:
        """Dispatched steps not yet committed that hold this request."""
        return self.counts.item(INFLIGHT_STEPS)

    @num_inflight_steps.setter
    def num_inflight_steps(self, value: int) -> None:
        self.counts[INFLIGHT_STEPS] = value

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens that are left to compute: what a policy counts as its remaining prefill."""
        num_spared = self.counts.item(COMPUTED) + self.num_reusable_tokens
        return len(self.prompt_token_ids) + len(self.output_token_ids) - num_spared

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output tokens at its length limit."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and committed output tokens, as a new list."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def has_target(self) -> bool:
        """Whether anything was promised to it.

        A deadline alone is no promise: most clients set a long one on every call, and what they
        have received when it passes is of use to them.
        """
        return (
            self.ttft_target_s is not None
            or self.tpot_target_s is not None
            or self.e2e_target_s is not None
        )

    @property
    def has_grammar(self) -> bool:
        """Whether each token must be known to the host before the next one can be planned."""
        return self.sampling_params.structured_outputs is not None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token id that ends it, once: the model's and the request's own."""
        own = self.sampling_params.stop_token_ids
        return tuple(dict.fromkeys((*self.eos_token_ids, *own)))

    @property
    def stop_from(self) -> int:
        """First position of the sequence at which a stop token may come, and ends it."""
        return len(self.prompt_token_ids) + self.sampling_params.min_tokens
