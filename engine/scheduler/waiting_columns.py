"""Figures of the waiting requests as arrays, in the order of the queue."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST_SIZE = 64


class WaitingFigures(NamedTuple):
    """What a policy keeps of a waiting request, so that a plan can look at a thousand at once.

    They hold still while it waits.

    Attributes:
        due_s: when its prefill must be done; infinity if nothing was promised of that.
        work_tokens: prompt tokens to compute.
        last_chance_s: when it becomes hopeless if it has not been begun; infinity if never.
        place: first component of its place in the queue.
        priority: its class.
    """

    due_s: float
    work_tokens: float
    last_chance_s: float
    place: float
    priority: float


class WaitingColumns:
    """A growing table of `WaitingFigures`, a row a waiting request, kept in the queue's order."""

    def __init__(self) -> None:
        self._table = np.zeros((len(WaitingFigures._fields), _FIRST_SIZE))
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def insert(self, index: int, figures: WaitingFigures) -> None:
        """Puts a row in before row `index`."""
        size, table = self._size, self._table
        if size == table.shape[1]:
            self._table = table = np.concatenate((table, np.zeros_like(table)), axis=1)
        if index < size:
            table[:, index + 1 : size + 1] = table[:, index:size]
        table[:, index] = figures
        self._size = size + 1

    def remove(self, index: int) -> None:
        """Takes row `index` out."""
        size, table = self._size, self._table
        table[:, index : size - 1] = table[:, index + 1 : size]
        self._size = size - 1

    def clear(self) -> None:
        """Takes every row out."""
        self._size = 0

    @property
    def due_s(self) -> Floats:
        return self._column(0)

    @property
    def work_tokens(self) -> Floats:
        return self._column(1)

    @property
    def last_chance_s(self) -> Floats:
        return self._column(2)

    @property
    def place(self) -> Floats:
        return self._column(3)

    @property
    def priority(self) -> Floats:
        return self._column(4)

    def _column(self, index: int) -> Floats:
        view: Floats = self._table[index, : self._size]
        return view
