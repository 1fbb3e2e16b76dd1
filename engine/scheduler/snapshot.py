"""What a policy sees: the scheduler's state at one moment, for reading only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.row_columns import RowColumns
from octavo.engine.scheduler.step_plan import StepLimits


def _no_rows() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
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
        limits: what a step can take.
        forecast: what steps, outputs and transfers are expected to take.
        columns: goals of the running rows, by slot.
        decode_slots, decode_starts: int32[D], the rows that decode in the step being planned, and
            the positions of their inputs; empty before they were selected.
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
    decode_slots: NDArray[np.int32] = field(default_factory=_no_rows)
    decode_starts: NDArray[np.int32] = field(default_factory=_no_rows)
