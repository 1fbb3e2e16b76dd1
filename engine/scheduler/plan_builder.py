"""A plan under construction, a plan on its way, and what plans said about each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import Request
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.rows import Rows
from octavo.engine.scheduler.step_plan import (
    Decision,
    DecodeRows,
    PageCopy,
    PrefillRow,
    Reason,
    StepPlan,
)
from octavo.engine.scheduler.step_time_model import NO_FEATURES, StepFeatures

MAX_WAITED = 4096
"""Waiting requests of which it is kept what they were told to wait for."""


@dataclass(slots=True, kw_only=True)
class PreemptionCost:
    """Preemptions of one kind, and what they cost. Counts on.

    Attributes:
        num_requests: how often a request was preempted.
        num_tokens: tokens that they had computed by then.
        cost_s: seconds that were expected to undo them, at the time.
    """

    num_requests: int = 0
    num_tokens: int = 0
    cost_s: float = 0.0

    def add(self, num_tokens: int, cost_s: float) -> None:
        """Counts one more."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.cost_s += cost_s


@dataclass(slots=True, kw_only=True)
class PlanCounts:
    """What plans held, since the start.

    Attributes:
        num_plans: plans made.
        num_prefill_tokens, num_decode_tokens: tokens planned, prompts' and outputs'.
        num_rejected: requests rejected while they waited.
        swaps: preemptions whose pages were copied out.
        recomputes: those whose pages were not: their tokens are computed again.
    """

    num_plans: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_rejected: int = 0
    swaps: PreemptionCost = field(default_factory=PreemptionCost)
    recomputes: PreemptionCost = field(default_factory=PreemptionCost)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens planned so far, prompts' and outputs'."""
        return self.num_prefill_tokens + self.num_decode_tokens


class PlanBuilder:
    """Notes for the next plan. They are kept until there is one.

    Args:
        explains: whether reasons are kept.

    Attributes:
        page_updates: as in `StepPlan`.
        preempted: ids of requests that lost their slot.
        preempted_numbers: their numbers, of this attempt at a plan alone.
        copy_outs, copy_ins: page copies.
        reasons: why.
        ended: requests that were ended by the plan and not reported yet.
        counts: of all plans.
    """

    def __init__(self, *, explains: bool) -> None:
        self.explains = explains
        self.page_updates: list[tuple[int, ...]] = []
        self.preempted: list[str] = []
        self.preempted_numbers: set[int] = set()
        self.copy_outs: list[PageCopy] = []
        self.copy_ins: list[PageCopy] = []
        self.reasons: list[Reason] = []
        self.ended: list[Request] = []
        self.counts = PlanCounts()
        self._waited: dict[int, str] = {}

    def begin(self) -> None:
        """Starts an attempt at a plan."""
        if self.page_updates:
            self.page_updates.clear()
        if self.preempted_numbers:
            self.preempted_numbers.clear()

    def add_pages(self, slot: int, index: int, pages: SequencePages) -> None:
        """Notes what the row in a slot has at an index of its block tables."""
        self.page_updates.append((slot, index, *[table[index] for table in pages.tables]))

    @property
    def has_copies(self) -> bool:
        return bool(self.copy_outs or self.copy_ins)

    def explain(
        self,
        request_id: str,
        decision: Decision,
        text: str,
        *,
        beneficiary: str = "",
        num_tokens: int = 0,
        cost_s: float = 0.0,
    ) -> None:
        """Notes a reason, if anybody asked for reasons."""
        if self.explains:
            self.reasons.append(Reason(request_id, decision, text, beneficiary, num_tokens, cost_s))

    def waited(self, number: int, request_id: str, what_for: str) -> None:
        """Notes that a request was tried and not admitted; once for each reason and wait."""
        if self.explains and self._waited.get(number) != what_for:
            self._waited[number] = what_for
            self.explain(request_id, Decision.WAITED, what_for)
            if len(self._waited) > MAX_WAITED:
                del self._waited[next(iter(self._waited))]

    def admitted(self, number: int) -> None:
        """A request waits no longer."""
        self._waited.pop(number, None)

    def forget_copies(self) -> None:
        """Takes back the copies that no plan has announced, and nobody will make."""
        self.copy_outs.clear()
        self.copy_ins.clear()

    def build(
        self, decode_rows: DecodeRows, prefill_rows: list[PrefillRow], num_steps: int
    ) -> StepPlan:
        """The plan of these rows and all notes, which are forgotten."""
        plan = StepPlan(
            step_id=self.counts.num_plans,
            decode_rows=decode_rows,
            prefill_rows=tuple(prefill_rows),
            num_steps=num_steps,
            page_updates=tuple(self.page_updates),
            preempted=tuple(self.preempted),
            copy_outs=tuple(self.copy_outs),
            copy_ins=tuple(self.copy_ins),
            reasons=tuple(self.reasons),
        )
        self.counts.num_plans += 1
        for notes in (self.preempted, self.copy_outs, self.copy_ins, self.reasons):
            if notes:
                notes.clear()
        return plan


@dataclass(slots=True, eq=False)
class Dispatched:
    """A plan on its way.

    Attributes:
        plan: the plan.
        now_s: when it was made.
        decoding: its decode rows.
        prefilling: the records of its other rows' requests.
        ending: decode rows, by index, that come to their limit with it, ascending. This and
            `features` are known once `Planner.apply_plan` was called.
        overlaps: whether another plan was on its way when it was made.
        features: what its time depends on.
    """

    plan: StepPlan
    now_s: float
    decoding: Rows
    prefilling: list[LiveRequest]
    ending: list[int] = field(default_factory=list)
    overlaps: bool = False
    features: StepFeatures = NO_FEATURES

    @property
    def requests(self) -> tuple[Request, ...]:
        """All its rows' requests, in their order."""
        return (*self.decoding.requests, *[entry.request for entry in self.prefilling])

    def count(self) -> None:
        """Works out `features`."""
        num_prefill = prefill_context = 0
        for row in self.plan.prefill_rows:
            num_tokens = row.num_tokens
            num_prefill += num_tokens
            prefill_context += num_tokens * row.start
        self.features = StepFeatures(
            len(self.decoding), num_prefill, self.decoding.context, float(prefill_context)
        )


MAX_TRACES = 4096
MAX_EVENTS = 256


class TraceEvent(NamedTuple):
    """A decision about one request: see `Reason`."""

    at_s: float
    decision: Decision
    text: str
    beneficiary: str
    num_tokens: int
    cost_s: float


class Traces:
    """The newest events of the requests that were decided about last."""

    def __init__(self) -> None:
        self._events: OrderedDict[str, list[TraceEvent]] = OrderedDict()

    def note(self, reasons: Iterable[Reason], now_s: float) -> None:
        """Adds a plan's reasons."""
        for reason in reasons:
            if not reason.request_id:
                continue
            events = self._events.setdefault(reason.request_id, [])
            self._events.move_to_end(reason.request_id)
            if len(events) < MAX_EVENTS:
                events.append(TraceEvent(now_s, *reason[1:]))
        while len(self._events) > MAX_TRACES:
            self._events.popitem(last=False)

    def of(self, request_id: str) -> tuple[TraceEvent, ...]:
        """A request's events, oldest first."""
        return tuple(self._events.get(request_id, ()))
