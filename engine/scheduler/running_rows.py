"""Requests that hold a row on the device: in prefill, waiting for pages, or decoding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import overload

import numpy as np

from octavo.engine.output.outputs import RequestMetrics
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.row_columns import RowColumns, Slots
from octavo.engine.scheduler.rows import Rows, is_kept

_turn = attrgetter("turn")


class RunningRows:
    """Slots and who is in them.

    A request takes a slot (`seat`), and goes from prefill, or from an arrival of pages and then
    prefill, to decoding. Rows decode in the order in which they began to; a row whose last token
    was planned stays until that is committed, but stands apart: no step computes it any more.

    Args:
        columns: the rows' figures.

    Attributes:
        free_slots: slots that nobody holds; the last one is taken first. For reading only.
        num_changes: entries that came or went, over all time.
        requests: everybody's, in order of acceptance: put in order when looked at.
    """

    def __init__(self, columns: RowColumns) -> None:
        self._columns = columns
        self._num_slots = len(columns.number)
        self.num_changes = 0
        self.free_slots = list(range(self._num_slots - 1, -1, -1))
        self._arriving: dict[int, LiveRequest] = {}
        self._prefilling: dict[int, LiveRequest] = {}
        self._ending: dict[int, LiveRequest] = {}
        # Of the rows that decode on, side by side: a plan takes copies of the lists as they are.
        self._entries: list[LiveRequest] = []
        self._requests: list[Request] = []
        self._outputs: list[list[int]] = []
        self._metrics: list[RequestMetrics] = []
        self._slots = np.zeros(self._num_slots, np.intp)
        self._num_turns = 0
        self._rows: Rows | None = None  # as last asked for, until a row comes or goes
        self._is_prepared = False
        self._in_order: tuple[int, tuple[Request, ...]] = (-1, ())
        self.requests: Sequence[Request] = _Requests(self)

    def __len__(self) -> int:
        return self._num_slots - len(self.free_slots)

    def __iter__(self) -> Iterator[LiveRequest]:
        return chain(self._arriving.values(), self._prefilling.values(), self.decoding)

    def in_order(self) -> tuple[Request, ...]:
        """Everybody's requests, in order of acceptance."""
        num_changes, requests = self._in_order
        if num_changes != self.num_changes:
            entries = sorted(self, key=lambda entry: entry.number)
            requests = tuple([entry.request for entry in entries])
            self._in_order = (self.num_changes, requests)
        return requests

    @property
    def prefilling(self) -> list[LiveRequest]:
        """Entries with known tokens that no dispatched step computes, in order of admission."""
        return list(self._prefilling.values())

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def decoding(self) -> Sequence[LiveRequest]:
        """Entries whose last known token was dispatched, in the order in which that happened."""
        if not self._ending:
            return self._entries
        return sorted([*self._entries, *self._ending.values()], key=_turn)

    @property
    def num_decoding(self) -> int:
        return len(self._entries) + len(self._ending)

    @property
    def num_ending(self) -> int:
        """Rows whose last token was planned."""
        return len(self._ending)

    # A row's life.

    def seat(self, entry: LiveRequest) -> None:
        """Gives a waiting entry a slot, which must be free; it is here from `begin_prefill` on."""
        request = entry.request
        request.slot = self.free_slots.pop()
        request.status = RequestStatus.RUNNING
        self.num_changes += 1

    def begin_prefill(self, entry: LiveRequest) -> None:
        """A seated entry begins in prefill."""
        self._prefilling[entry.number] = entry
        self._in_order = (-1, ())

    def begin_arrival(self, entry: LiveRequest) -> None:
        """Takes an entry out of prefill until its pages have arrived."""
        self._arriving[entry.number] = self._prefilling.pop(entry.number)

    def end_arrival(self, entry: LiveRequest) -> None:
        """Its pages have arrived: the entry goes on in prefill."""
        self._prefilling[entry.number] = self._arriving.pop(entry.number)

    def is_arriving(self, entry: LiveRequest) -> bool:
        """Whether the entry's pages are on their way."""
        return entry.number in self._arriving

    def begin_decode(self, entry: LiveRequest) -> None:
        """All known tokens of an entry in prefill were planned: it decodes from now on."""
        del self._prefilling[entry.number]
        request, slot = entry.request, entry.request.slot
        assert slot is not None
        entry.turn = self._num_turns
        self._num_turns += 1
        if entry.prefill_end >= entry.last_position:
            self._ending[entry.number] = entry
            return
        self._slots[len(self._entries)] = slot
        self._entries.append(entry)
        self._requests.append(request)
        self._outputs.append(request.output_token_ids)
        self._metrics.append(request.metrics)
        self._rows = None

    def end_decode(self, entry: LiveRequest) -> None:
        """The last token of a row was planned."""
        self._take_out(entry)
        self._ending[entry.number] = entry

    def remove(self, entry: LiveRequest) -> None:
        """Takes an entry's slot. The next step may use it: steps run in dispatch order."""
        request, number = entry.request, entry.number
        slot = request.slot
        assert slot is not None, request.request_id
        for apart in (self._prefilling, self._arriving, self._ending):
            if apart.pop(number, None) is not None:
                break
        else:
            self._take_out(entry)
        request.slot = None
        entry.is_placed = False
        self.num_changes += 1
        self.free_slots.append(slot)

    def _take_out(self, entry: LiveRequest) -> None:
        """Takes an entry out of the rows that decode on."""
        index, size = bisect_left(self._entries, entry.turn, key=_turn), len(self._entries)
        assert self._entries[index] is entry, entry.request.request_id
        del self._entries[index], self._requests[index]
        del self._outputs[index], self._metrics[index]
        slots = self._slots
        slots[index : size - 1] = slots[index + 1 : size]
        self._rows = None

    # Rows that decode, by column.

    def decode_rows(self) -> Rows:
        """Those that decode on, as they stand now."""
        rows = self._rows
        is_prepared, self._is_prepared = self._is_prepared, False
        if rows is None:
            slots = self._slots[: len(self._entries)].copy()
            rows = self._of(self._requests, self._outputs, self._metrics, slots)
        elif not is_prepared:
            rows = rows.at(self._columns.num_computed[rows.slots])
        self._rows = rows
        return rows

    def prepare(self, *, paced: bool) -> None:
        """Works out what `decode_rows` will return when it is called next.

        No row may move ahead, or be given pages, until then; rows may come and go.

        Args:
            paced: whether it will be asked when their tokens are due.
        """
        self._is_prepared = False
        rows = self.decode_rows()
        self._is_prepared = True
        rows.full(self._columns)
        _ = rows.context
        self._columns.begun.clear()
        if paced:
            rows.least_due_s(self._columns)

    def all_decode_rows(self) -> Rows:
        """The same, with those whose last token was planned, in the order of `decoding`."""
        if not self._ending:
            return self.decode_rows()
        entries, requests = self._entries.copy(), self._requests.copy()
        outputs, metrics = self._outputs.copy(), self._metrics.copy()
        indices: list[int] = []
        for entry in sorted(self._ending.values(), key=_turn):
            index, request = bisect_left(entries, entry.turn, key=_turn), entry.request
            indices.append(index)
            entries.insert(index, entry)
            requests.insert(index, request)
            outputs.insert(index, request.output_token_ids)
            metrics.insert(index, request.metrics)
        slots = np.empty(len(entries), np.intp)
        slots[is_kept(len(entries), indices)] = self._slots[: len(self._entries)]
        slots[indices] = [entries[index].request.slot for index in indices]
        return self._of(requests, outputs, metrics, slots)

    def _of(
        self,
        requests: list[Request],
        outputs: list[list[int]],
        metrics: list[RequestMetrics],
        slots: Slots,
    ) -> Rows:
        return Rows.of(tuple(requests), tuple(outputs), tuple(metrics), slots, self._columns)

    def check_integrity(self) -> None:
        """Asserts that each slot is free or held by exactly one running entry, in one stage, and
        that the lists of rows agree."""
        stages = (self._arriving, self._prefilling, self._ending)
        decoding_on = {entry.number: entry for entry in self._entries}
        numbers = [number for stage in (*stages, decoding_on) for number in stage]
        assert len(set(numbers)) == len(numbers) == len(self)
        held = [entry.request.slot for entry in self]
        assert sorted([*self.free_slots, *(slot for slot in held if slot is not None)]) == list(
            range(self._num_slots)
        ), (held, self.free_slots)
        for entry in self:
            assert entry.is_live
            assert entry.request.status is RequestStatus.RUNNING
        for entry in self._arriving.values():
            assert entry.pages.arriving
        for entry in self._prefilling.values():
            assert not entry.pages.arriving
            assert entry.request.num_computed_tokens < entry.prefill_end
        for entry in self.decoding:
            assert entry.request.num_computed_tokens >= entry.prefill_end
        for entry in self._entries:
            assert entry.request.num_computed_tokens < entry.last_position
        for entry in self._ending.values():
            assert entry.request.num_computed_tokens >= entry.last_position
        self._check_lists()

    def _check_lists(self) -> None:
        """Asserts that the lists of rows that decode on say what their entries say."""
        requests = [entry.request for entry in self._entries]
        slots = [request.slot for request in requests]
        assert self._requests == requests
        assert self._slots[: len(slots)].tolist() == slots
        assert all(
            output is request.output_token_ids and metrics is request.metrics
            for output, metrics, request in zip(self._outputs, self._metrics, requests, strict=True)
        )
        if self._rows is not None:
            assert self._rows.requests == tuple(requests)
            assert self._rows.slots.tolist() == slots


class _Requests(Sequence[Request]):
    """The requests of the running rows in order of acceptance: a view."""

    def __init__(self, running: RunningRows) -> None:
        self._running = running

    def __len__(self) -> int:
        return len(self._running)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._running.in_order()[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._running.in_order())
