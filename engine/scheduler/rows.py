"""Rows that decode: in the order in which they began to, and as a plan holds them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.engine.output.outputs import RequestMetrics
from octavo.engine.request import Request

Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True, eq=False)
class Rows:
    """Decode rows of a plan, as the row table had them when it was made. For reading only.

    Attributes:
        requests: whose they are.
        outputs, metrics: of the requests: what every commit adds to.
        slots: intp[rows], theirs.
        starts: int32[rows], the positions of their inputs.
        ends: int32[rows], where they end: `LiveRequest.last_position`.
        numbers: int64[rows], their requests' numbers.
        is_row: int32[slots of the device], 1 where one of these is, else 0.
        context: positions that they attend to, all together.
    """

    requests: tuple[Request, ...]
    outputs: tuple[list[int], ...]
    metrics: tuple[RequestMetrics, ...]
    slots: NDArray[np.intp]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    numbers: NDArray[np.int64]
    is_row: NDArray[np.int32]
    context: float

    def __len__(self) -> int:
        return len(self.requests)

    def at(self, starts: NDArray[np.int32]) -> Rows:
        """The same rows, further on."""
        return Rows(
            requests=self.requests,
            outputs=self.outputs,
            metrics=self.metrics,
            slots=self.slots,
            starts=starts,
            ends=self.ends,
            numbers=self.numbers,
            is_row=self.is_row,
            context=float(starts.sum()),
        )

    def without(self, left_out: Sequence[int]) -> Rows:
        """All but those at these indices, ascending."""
        if not len(left_out):
            return self
        kept = is_kept(len(self.requests), left_out)
        is_row, starts = self.is_row.copy(), self.starts[kept]
        is_row[self.slots[left_out]] = 0
        return Rows(
            requests=tuple(all_but(self.requests, left_out)),
            outputs=tuple(all_but(self.outputs, left_out)),
            metrics=tuple(all_but(self.metrics, left_out)),
            slots=self.slots[kept],
            starts=starts,
            ends=self.ends[kept],
            numbers=self.numbers[kept],
            is_row=is_row,
            context=float(starts.sum()),
        )


class DecodeOrder:
    """Requests that decode on, in the order in which they began to, as lists side by side: a plan
    takes copies of them as they are.

    Args:
        num_slots: the most requests.

    Attributes:
        requests, outputs, metrics: as in `Rows`. For reading only.
    """

    def __init__(self, num_slots: int) -> None:
        self.requests: list[Request] = []
        self.outputs: list[list[int]] = []
        self.metrics: list[RequestMetrics] = []
        self._turns: list[int] = []
        self._slots = np.zeros(num_slots, np.intp)

    def slots(self) -> NDArray[np.intp]:
        """Their slots, as a new array."""
        return self._slots[: len(self._turns)].copy()

    def insert(self, turn: int, request: Request) -> None:
        """A request that holds a slot begins to decode, the `turn`-th ever."""
        turns, slots, slot = self._turns, self._slots, request.slot
        index, size = bisect_left(turns, turn), len(turns)
        assert slot is not None, request.request_id
        if index < size:
            slots[index + 1 : size + 1] = slots[index:size]
        slots[index] = slot
        turns.insert(index, turn)
        self.requests.insert(index, request)
        self.outputs.insert(index, request.output_token_ids)
        self.metrics.insert(index, request.metrics)

    def remove(self, turn: int) -> None:
        """A request decodes no longer."""
        turns, slots = self._turns, self._slots
        index, size = bisect_left(turns, turn), len(turns)
        assert turns[index] == turn
        del turns[index], self.requests[index], self.outputs[index], self.metrics[index]
        slots[index : size - 1] = slots[index + 1 : size]

    def copy(self) -> DecodeOrder:
        """These requests, in lists of their own."""
        other = DecodeOrder(0)
        other.requests, other.outputs = self.requests.copy(), self.outputs.copy()
        other.metrics, other._turns = self.metrics.copy(), self._turns.copy()
        other._slots = self._slots.copy()
        return other

    def check_integrity(self, expected: list[tuple[int, Request]]) -> None:
        """Asserts that these requests are here, each with its turn, in order, and nobody else."""
        assert list(zip(self._turns, self.requests, strict=True)) == sorted(
            expected, key=lambda item: item[0]
        )
        assert self.slots().tolist() == [request.slot for request in self.requests]
        columns = zip(self.requests, self.outputs, self.metrics, strict=True)
        for request, output, metrics in columns:
            assert output is request.output_token_ids
            assert metrics is request.metrics


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
        requests=(),
        outputs=(),
        metrics=(),
        slots=np.empty(0, np.intp),
        starts=no_counts,
        ends=no_counts,
        numbers=np.empty(0, np.int64),
        is_row=no_counts,
        context=0.0,
    )


NO_ROWS = _no_rows()
