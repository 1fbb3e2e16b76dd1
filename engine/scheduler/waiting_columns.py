"""Figures of the waiting requests as arrays, in the order of the queue."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST_SIZE = 64
_WORK, _PRIORITY, _DEMOTED_DUE = 1, 4, 5


class WaitingFigures(NamedTuple):
    """What a policy keeps of a waiting request, so that a plan can look at a thousand at once.

    They hold still while it waits.

    Attributes:
        due_s: when its prefill must be done; infinity if nothing was promised of that.
        work_tokens: prompt tokens to compute; a whole number.
        last_chance_s: when it becomes hopeless if it has not been begun; infinity if never.
        place: first component of its place in the queue.
        priority: its class.
        demoted_due_s: what `due_s` was before it was demoted; infinity if it is not.
    """

    due_s: float
    work_tokens: float
    last_chance_s: float
    place: float
    priority: float
    demoted_due_s: float = math.inf


class WaitingColumns:
    """A growing table of `WaitingFigures`, a row a waiting request, kept in the queue's order.

    There is room at both ends, and whichever side of a change is the shorter one makes way: most
    requests come last and leave first.

    Attributes:
        total_work_tokens: all rows' together.
        num_demoted: rows that were demoted and have a due time.
        least_due_s, least_chance_s: no row's `due_s`, or `last_chance_s`, is before it; exact after
            `tighten`.
    """

    def __init__(self) -> None:
        self._table = np.zeros((len(WaitingFigures._fields), _FIRST_SIZE))
        self._first = self._end = _FIRST_SIZE // 2  # rows are those from the one to the other
        self._num_of: dict[float, int] = {}
        self.num_demoted = 0
        self._is_loose = False
        self.total_work_tokens = 0.0
        self.least_due_s = self.least_chance_s = math.inf

    def __len__(self) -> int:
        return self._end - self._first

    def insert(self, index: int, figures: WaitingFigures) -> None:
        """Puts a row in before row `index`."""
        if self._first == 0 or self._end == self._table.shape[1]:
            self._make_room()
        table, first, end = self._table, self._first, self._end
        at = first + index
        if 2 * index < end - first:
            table[:, first - 1 : at - 1] = table[:, first:at]
            self._first = first - 1
            at -= 1
        else:
            if at < end:
                table[:, at + 1 : end + 1] = table[:, at:end]
            self._end = end + 1
        table[:, at] = figures
        due_s, work_tokens, last_chance_s, _, priority, demoted_due_s = figures
        self.num_demoted += demoted_due_s < math.inf
        self._num_of[priority] = self._num_of.get(priority, 0) + 1
        self.total_work_tokens += work_tokens
        self.least_due_s = min(self.least_due_s, due_s)
        self.least_chance_s = min(self.least_chance_s, last_chance_s)

    def remove(self, index: int) -> None:
        """Takes row `index` out."""
        table, first, end = self._table, self._first, self._end
        at = first + index
        self._leave(at)
        if 2 * index < end - first:
            table[:, first + 1 : at + 1] = table[:, first:at]
            self._first = first + 1
        else:
            table[:, at : end - 1] = table[:, at + 1 : end]
            self._end = end - 1

    def _leave(self, at: int) -> None:
        self._is_loose = True
        priority = self._table.item(_PRIORITY, at)
        if self._num_of[priority] == 1:
            del self._num_of[priority]
        else:
            self._num_of[priority] -= 1
        self.total_work_tokens -= self._table.item(_WORK, at)
        self.num_demoted -= self._table.item(_DEMOTED_DUE, at) < math.inf

    def clear(self) -> None:
        """Takes every row out."""
        self._first = self._end = self._table.shape[1] // 2
        self._num_of.clear()
        self.num_demoted = 0
        self.total_work_tokens = 0.0
        self.least_due_s = self.least_chance_s = math.inf

    def tighten(self) -> None:
        """Makes the bounds exact."""
        if self._is_loose:
            self._is_loose = False
            self.least_due_s = float(self.due_s.min(0, initial=math.inf))
            self.least_chance_s = float(self.last_chance_s.min(0, initial=math.inf))

    @property
    def classes(self) -> Collection[float]:
        """Those that any row is of: a view."""
        return self._num_of.keys()

    def num_of(self, priority: int) -> int:
        """Rows of a class."""
        return self._num_of.get(priority, 0)

    @property
    def due_s(self) -> Floats:
        return self._column(0)

    @property
    def work_tokens(self) -> Floats:
        return self._column(_WORK)

    @property
    def last_chance_s(self) -> Floats:
        return self._column(2)

    @property
    def place(self) -> Floats:
        return self._column(3)

    @property
    def priority(self) -> Floats:
        return self._column(_PRIORITY)

    @property
    def demoted_due_s(self) -> Floats:
        return self._column(_DEMOTED_DUE)

    def _column(self, index: int) -> Floats:
        view: Floats = self._table[index, self._first : self._end]
        return view

    def _make_room(self) -> None:
        """Puts the rows in the middle of a table that has room for twice as many."""
        size = len(self)
        table = np.zeros((len(self._table), max(2 * size, _FIRST_SIZE)))
        first = (table.shape[1] - size) // 2
        table[:, first : first + size] = self._table[:, self._first : self._end]
        self._table, self._first, self._end = table, first, first + size
