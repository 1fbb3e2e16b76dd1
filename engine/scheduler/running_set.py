"""Requests that hold a row on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.decoding_rows import DecodingRows
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.row_columns import RowColumns


class RunningSet:
    """Slots and who is in them: entries whose pages arrive, still in prefill, and that decode.

    Args:
        columns: the rows' figures.

    Attributes:
        free_slots: slots that nobody holds; the last one is taken first. For reading only.
        num_changes: entries that came or went, over all time.
        decoding: entries whose last known token was dispatched, in the order in which that
            happened.
    """

    def __init__(self, columns: RowColumns) -> None:
        self._num_slots = len(columns.number)
        self.num_changes = 0
        self.free_slots = list(range(self._num_slots - 1, -1, -1))
        self._arriving: dict[int, LiveRequest] = {}
        self._prefilling: dict[int, LiveRequest] = {}
        self.decoding = DecodingRows(columns)
        self._in_order: tuple[int, tuple[Request, ...]] = (-1, ())

    def __len__(self) -> int:
        return self._num_slots - len(self.free_slots)

    def __iter__(self) -> Iterator[LiveRequest]:
        return chain(self._arriving.values(), self._prefilling.values(), self.decoding)

    @property
    def prefilling(self) -> list[LiveRequest]:
        """Entries with known tokens that no dispatched step computes, in order of admission."""
        return list(self._prefilling.values())

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everybody's, in order of acceptance."""
        num_changes, requests = self._in_order
        if num_changes != self.num_changes:
            entries = sorted(self, key=lambda entry: entry.number)
            requests = tuple([entry.request for entry in entries])
            self._in_order = (self.num_changes, requests)
        return requests

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

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

    def end_prefill(self, entry: LiveRequest) -> None:
        """Moves an entry on to decoding."""
        self.decoding.append(self._prefilling.pop(entry.number))

    def remove(self, entry: LiveRequest) -> None:
        """Takes an entry's slot. The next step may use it: steps run in dispatch order."""
        request, number = entry.request, entry.number
        slot = request.slot
        assert slot is not None, request.request_id
        if self._prefilling.pop(number, None) is None and self._arriving.pop(number, None) is None:
            self.decoding.remove(entry)
        request.slot = None
        entry.is_placed = False
        self.num_changes += 1
        self.free_slots.append(slot)

    def check_integrity(self) -> None:
        """Asserts that each slot is free or held by exactly one running entry."""
        held = [entry.request.slot for entry in self]
        decoding = {entry.number for entry in self.decoding}
        assert not self._prefilling.keys() & decoding
        assert not self._arriving.keys() & (self._prefilling.keys() | decoding)
        self.decoding.check_integrity()
        assert len(held) == len(self)
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


class RunningRequests(Sequence[Request]):
    """The requests of a running set in order of acceptance, put in order when looked at."""

    def __init__(self, running: RunningSet) -> None:
        self._running = running

    def __len__(self) -> int:
        return len(self._running)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._running.requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._running.requests)
