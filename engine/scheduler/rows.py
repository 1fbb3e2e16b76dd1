"""Decode rows of one plan, by column, as they stood when it was made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.engine.output.outputs import RequestMetrics
from octavo.engine.request import Request
from octavo.engine.scheduler.row_columns import Floats, RowColumns

Item = TypeVar("Item")


class FullRows(NamedTuple):
    """Decode rows whose pages have no room for one more token.

    Attributes:
        indices: theirs, ascending.
        slots: theirs.
        num_pages: pages that each has.
    """

    indices: list[int]
    slots: list[int]
    num_pages: list[int]


class Rows:
    """Decode rows of a plan being made.

    Attributes:
        requests: whose they are.
        outputs, metrics: of the requests: what every commit adds to.
        slots: intp[rows], theirs. Read only, as are all arrays.
        starts: int32[rows], the positions of their inputs.
        ends: int32[rows], where they end: `LiveRequest.last_position`.
        numbers: int64[rows], their requests' numbers.
        is_row: int32[slots of the device], 1 where one of these is, else 0.
    """

    __slots__ = (
        "_context", "_full", "_least_due_s", "_num_begun", "_pace_s", "ends", "is_row", "metrics",
        "numbers", "outputs", "requests", "slots", "starts",
    )  # fmt: skip

    def __init__(
        self,
        requests: tuple[Request, ...],
        outputs: tuple[list[int], ...],
        metrics: tuple[RequestMetrics, ...],
        slots: NDArray[np.intp],
        starts: NDArray[np.int32],
        ends: NDArray[np.int32],
        numbers: NDArray[np.int64],
        is_row: NDArray[np.int32],
    ) -> None:
        self.requests = requests
        self.outputs = outputs
        self.metrics = metrics
        self.slots = slots
        self.starts = starts
        self.ends = ends
        self.numbers = numbers
        self.is_row = is_row
        self._context: float | None = None
        self._full: FullRows | None = None
        self._pace_s: Floats | None = None
        self._least_due_s: float | None = None
        self._num_begun = 0  # of `RowColumns.begun`, when that was worked out

    @classmethod
    def of(
        cls,
        requests: tuple[Request, ...],
        outputs: tuple[list[int], ...],
        metrics: tuple[RequestMetrics, ...],
        slots: NDArray[np.intp],
        columns: RowColumns,
    ) -> Rows:
        """The rows in these slots, as the columns have them now."""
        is_row = np.zeros(len(columns.number), np.int32)
        is_row[slots] = 1
        return cls(
            requests,
            outputs,
            metrics,
            slots,
            columns.num_computed[slots],
            columns.last_position[slots],
            columns.number[slots],
            is_row,
        )

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def context(self) -> float:
        """Positions that they attend to, all together."""
        if self._context is None:
            self._context = float(self.starts.sum())
        return self._context

    def full(self, columns: RowColumns) -> FullRows:
        """Those that have no room for one more token by these columns; worked out once."""
        if self._full is None:
            held = columns.capacity[self.slots]
            indices = (self.starts >= held).nonzero()[0]
            self._full = FullRows(
                indices.tolist(),
                self.slots[indices].tolist(),
                (held[indices] // columns.page_size).tolist(),
            )
        return self._full

    def pace_s(self, columns: RowColumns) -> Floats:
        """float64[rows], seconds after `RowColumns.base_s` in which their next tokens are due;
        worked out once."""
        if self._pace_s is None:
            # Of every slot, as that takes less than to pick these rows from three columns.
            emitted = columns.num_computed - columns.last_prompt
            self._pace_s = (columns.tpot_s * emitted)[self.slots]
        return self._pace_s

    def least_due_s(self, columns: RowColumns) -> float:
        """When the first of their next tokens is due, in seconds; infinity if none has a goal.

        Worked out once but for those whose first token has come since.
        """
        least_s = self._least_due_s
        if least_s is None:
            due_s = columns.base_s[self.slots] + self.pace_s(columns)
            least_s = self._least_due_s = float(due_s.min(0, initial=math.inf))
            self._num_begun = len(columns.begun)
        for slot, next_due_s in columns.begun[self._num_begun :]:
            if next_due_s < least_s and self.is_row[slot]:
                least_s = next_due_s
        return least_s

    def at(self, starts: NDArray[np.int32]) -> Rows:
        """The same rows, further on."""
        return Rows(
            self.requests,
            self.outputs,
            self.metrics,
            self.slots,
            starts,
            self.ends,
            self.numbers,
            self.is_row,
        )

    def without(self, left_out: Sequence[int]) -> Rows:
        """All but those at these indices, ascending."""
        if not len(left_out):
            return self
        kept = is_kept(len(self.requests), left_out)
        is_row = self.is_row.copy()
        is_row[self.slots[left_out]] = 0
        return Rows(
            tuple(all_but(self.requests, left_out)),
            tuple(all_but(self.outputs, left_out)),
            tuple(all_but(self.metrics, left_out)),
            self.slots[kept],
            self.starts[kept],
            self.ends[kept],
            self.numbers[kept],
            is_row,
        )


def all_but(items: Sequence[Item], left_out: Sequence[int]) -> list[Item]:
    """The items without those at these indices, ascending."""
    kept = list(items)
    for index in reversed(left_out):
        del kept[index]
    return kept


def is_kept(size: int, left_out: Sequence[int]) -> NDArray[np.bool_]:
    """bool[size], whether each item is kept."""
    kept = np.empty(size, np.bool_)
    kept.fill(True)
    kept[left_out] = False
    return kept


def _no_rows() -> Rows:
    no_counts = np.empty(0, np.int32)
    return Rows(
        (), (), (), np.empty(0, np.intp), no_counts, no_counts, np.empty(0, np.int64), no_counts
    )


NO_ROWS = _no_rows()
