"""What a policy sees: the scheduler's state at one moment, for reading only."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.row_columns import Floats, RowColumns
from octavo.engine.scheduler.rows import NO_ROWS, Rows
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.scheduler.waiting_columns import WaitingColumns


def _no_slots() -> NDArray[np.intp]:
    return np.empty(0, np.intp)


def _no_starts() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


def _no_lead(request: Request) -> float:
    return 0.0


# Not frozen: the planner renews one in every plan, which takes less than making another.
@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """The state a policy decides on. Its requests are for reading only.

    The sequences are views of the live state, so that making a snapshot costs nothing: they hold
    still for the length of the call they are passed to.

    Attributes:
        now_s: engine clock.
        starts_s: when the device is expected to begin this step: now, or when it is done with the
            steps that were dispatched before.
        waiting: live requests without a row: in the order of their places, or of acceptance if the
            policy gives none.
        running: live requests with a row, in order of acceptance.
        num_available_pages: pages that could be allocated now.
        num_free_rows: rows that nobody holds.
        num_awaiting: waiting requests that would have been admitted, if a running prompt were not
            computing what they begin with.
        limits: what a step can take.
        forecast: what steps, outputs and transfers are expected to take.
        columns: goals of the running rows, by slot. Requests admitted in the plan being made are
            entered before victims are looked for, or when it is done.
        waiting_columns: figures of the waiting requests, in their order, of a policy that measures.
        prefilling: running requests whose prompt is not computed yet, but for `demoted` ones.
        demoted: those of them that are served only when nobody else waits.
        decoding: requests of the rows that can decode in the step being planned.
        decode_slots, decode_starts: intp[D], int32[D], their slots, and the positions of their
            inputs.
        decode_context: positions that they attend to, all together.
        decode_pace_s, decode_least_due_s: give float64[D] and a number, as `Rows.pace_s` and
            `Rows.least_due_s`.
        pinned: ids of waiting requests that have waited their longest.
        lead: tokens by which a live request's tenant was served more than the least served tenant
            that waits, as `TenantLines.lead`; 0 for all where tenants take no turns.
    """

    now_s: float
    starts_s: float = 0.0
    waiting: Sequence[Request]
    running: Sequence[Request]
    num_available_pages: int
    limits: StepLimits
    forecast: Forecast
    columns: RowColumns
    num_free_rows: int = 0
    num_awaiting: int = 0
    waiting_columns: WaitingColumns = field(default_factory=WaitingColumns)
    prefilling: Sequence[Request] = ()
    demoted: Sequence[Request] = ()
    decoding: Sequence[Request] = ()
    decode_slots: NDArray[np.intp] = field(default_factory=_no_slots)
    decode_starts: NDArray[np.int32] = field(default_factory=_no_starts)
    pinned: Container[str] = ()
    lead: Callable[[Request], float] = _no_lead
    decode_context: float = 0.0
    decode_pace_s: Callable[[RowColumns], Floats] = NO_ROWS.pace_s
    decode_least_due_s: Callable[[RowColumns], float] = NO_ROWS.least_due_s

    def show(self, rows: Rows) -> None:
        """Takes these for the rows that can decode in the step being planned."""
        self.decoding = rows.requests
        self.decode_slots = rows.slots
        self.decode_starts = rows.starts
        self.decode_context = rows.context
        self.decode_pace_s = rows.pace_s
        self.decode_least_due_s = rows.least_due_s

    def forget_requests(self) -> None:
        """Names nobody any more who may end before it is renewed."""
        self.prefilling = self.demoted = ()
        self.show(NO_ROWS)

    def is_pinned(self, request: Request) -> bool:
        """Whether a waiting request has waited its longest."""
        return request.request_id in self.pinned
