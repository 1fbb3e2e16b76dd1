"""The one table of the device's rows: which request holds each, and what plans read of them.

A request takes a slot (`seat`), is entered under it (`enter`), computes its prompt, or waits for
pages that arrive first, decodes (`begin_decode`), and leaves. Where a grammar forces tokens, it
computes these as it did its prompt (`end_decode_for_prefill`, `begin_prefill`) and decodes on.
Figures of the rows stand in columns, arrays over slots, so that a plan looks at hundreds of rows in
a few calls.

The module is long because every step of a row's life keeps columns, order and pages together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import (
    COMPUTED,
    INFLIGHT_STEPS,
    INFLIGHT_TOKENS,
    Request,
    RequestStatus,
)
from octavo.engine.scheduler.deadlines import end_due_s, pace_s
from octavo.engine.scheduler.live_request import ALWAYS_READY, LiveRequest
from octavo.engine.scheduler.rows import (
    NO_ROWS,
    Counts,
    DecodeOrder,
    FullRows,
    RowPages,
    Rows,
    Slots,
)

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Figures:
    """What was worked out of some decode rows; None until it was asked for.

    Attributes:
        full, pace_s, least_due_s: as the methods of `RowTable` give them.
        num_begun: rows that had begun their output when `least_due_s` was worked out.
    """

    rows: Rows
    full: FullRows | None = None
    pace_s: Floats | None = None
    least_due_s: float | None = None
    num_begun: int = 0


class RowTable:
    """Rows of the device.

    Rows decode in the order in which they began to. A row whose last token was planned stays until
    that is committed, but stands apart: no step computes it any more.

    Args:
        num_slots: rows of the device state.
        page_size: tokens in a page.
        num_groups: cache groups.

    Attributes:
        free_slots: slots without a holder; the last one is taken first. For reading only.
        num_changes: requests that came or went, over all time.
        requests: of all rows, in order of acceptance: put in order when looked at.
        pages: the rows' pages.

    Columns, each an array over slots:

    Attributes:
        number: of the request that holds the slot, in order of acceptance; -1 for none.
        counts: int32[3, slots], `Request.counts` of the rows' requests, which are views of it.
        num_computed, num_inflight_tokens, num_inflight_steps: its rows; `inflight`: the latter two.
        last_position, ready_position: as in `LiveRequest`.
        last_prompt: position of the prompt's last token: what is beyond it was emitted.
        last_run_s: when the newest step that decodes the row was planned.
        arrival_s, priority, tenant: of the request; its tenant's number.
        num_preemptions: times it lost its row before.
        is_pinned: whether it has waited its longest and is never a victim.
        base_s: due time of output token 0: token k is due at `base_s + k · tpot_s`, so that early
            tokens bank slack. Infinite until the first token was committed, and without a goal.
        tpot_s: goal, seconds a token; 0 for none.
        end_due_s: due time of the last token; infinite without a goal.
        paced_from_s: with a pace to keep, `base_s` as if the prompt had been emitted at that pace
            too: the token of position p + 1 is due at `paced_from_s + p · tpot_s`; else -infinity.
        unpaced_s: without one, when the last token is due, or else the arrival; else -infinity.
        length: the output's expected final length, in tokens.
        least_length: a length that nine in ten such outputs reach, as expected when `length` was.
        next_guess: the position from which on `length` is too short.

    Bounds of all rows, close after `tighten`:

    Attributes:
        latest_pace_s, latest_unpaced_s, most_length, most_context: no
            `paced_from_s + tpot_s · num_computed`, `unpaced_s`, `length` or `num_computed` is above
            them, nor comes there while the row lives.
    """

    def __init__(self, num_slots: int, page_size: int, num_groups: int = 1) -> None:
        self.pages = RowPages(num_slots, page_size, num_groups)
        self.number: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self.counts: Counts = np.zeros((3, num_slots), np.int32)
        self.inflight: Counts = self.counts[INFLIGHT_TOKENS : INFLIGHT_STEPS + 1]
        self.num_computed: Counts = self.counts[COMPUTED]
        self.num_inflight_tokens: Counts = self.counts[INFLIGHT_TOKENS]
        self.num_inflight_steps: Counts = self.counts[INFLIGHT_STEPS]
        self.last_position: Counts = np.zeros(num_slots, np.int32)
        self.ready_position: Counts = np.full(num_slots, ALWAYS_READY, np.int32)
        self.last_prompt: Floats = np.zeros(num_slots)
        self.last_run_s: Floats = np.zeros(num_slots)
        self.arrival_s: Floats = np.zeros(num_slots)
        self.priority: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.tenant: Slots = np.zeros(num_slots, np.intp)
        self.num_preemptions: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.is_pinned: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.base_s: Floats = np.full(num_slots, np.inf)
        self.tpot_s: Floats = np.zeros(num_slots)
        self.end_due_s: Floats = np.full(num_slots, np.inf)
        self.paced_from_s: Floats = np.full(num_slots, -np.inf)
        self.unpaced_s: Floats = np.full(num_slots, -np.inf)
        self.length: Floats = np.zeros(num_slots)
        self.least_length: Floats = np.zeros(num_slots)
        self.next_guess: Counts = np.zeros(num_slots, np.int32)
        self.latest_pace_s = self.latest_unpaced_s = -math.inf
        self.most_length = 0.0
        self.most_context = 0

        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.num_changes = 0
        self._arriving: dict[int, LiveRequest] = {}
        self._lacking: dict[int, LiveRequest] = {}
        self._prefilling: dict[int, LiveRequest] = {}
        self._decoding: dict[int, LiveRequest] = {}  # in turn: those that end are among them
        self._ending: dict[int, LiveRequest] = {}
        self._going_on = DecodeOrder(num_slots)
        self._num_turns = 0
        self._in_order: tuple[int, tuple[Request, ...]] = (-1, ())
        self.requests: Sequence[Request] = _Requests(self)
        self._rows: Rows | None = None  # as last asked for, until a row comes or goes
        self._is_prepared = False
        self._figures = _Figures(NO_ROWS)
        # (slot, when its next token is due) of rows whose first token has come since `prepare`.
        self._begun: list[tuple[int, float]] = []

    # Entries.

    def __len__(self) -> int:
        return len(self.number) - len(self.free_slots)

    def __iter__(self) -> Iterator[LiveRequest]:
        stages = (self._arriving, self._lacking, self._prefilling)
        return chain(*[stage.values() for stage in stages], self.decoding)

    def in_order(self) -> tuple[Request, ...]:
        """The requests of all rows, in order of acceptance."""
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
    def lacking_pages(self) -> list[LiveRequest]:
        """Entries that decoded and have known tokens to compute again, which no plan has given
        pages for these yet, in the order in which they came."""
        return list(self._lacking.values())

    @property
    def decoding(self) -> list[LiveRequest]:
        """Entries whose last known token was dispatched, in the order in which that happened."""
        return list(self._decoding.values())

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def num_ending(self) -> int:
        """Rows whose last token was planned."""
        return len(self._ending)

    # A row's life.

    def seat(self, entry: LiveRequest) -> None:
        """Gives a waiting entry a slot, which must be free; `enter` must follow.

        The bounds hold for it from now on.
        """
        request = entry.request
        request.slot = self.free_slots.pop()
        request.status = RequestStatus.RUNNING
        self.num_changes += 1
        self.latest_unpaced_s = max(self.latest_unpaced_s, _unpaced_s(request))
        self.most_context = max(self.most_context, entry.last_position)
        if request.metrics.first_token_s is not None:
            self._bound_pace(entry)

    def enter(self, entry: LiveRequest) -> None:
        """Enters a seated request in the columns; it begins in prefill."""
        request, slot = entry.request, entry.request.slot
        assert slot is not None
        self.pages.enter(slot, *entry.pages.tables)
        self.number[slot] = entry.number
        self.counts[:, slot] = request.counts
        request.counts = self.counts[:, slot]
        self.last_position[slot] = entry.last_position
        self.ready_position[slot] = entry.ready_position
        self.last_prompt[slot] = entry.num_prompt_tokens - 1
        self.last_run_s[slot] = -math.inf
        self.arrival_s[slot] = request.arrival_s
        self.priority[slot] = request.priority
        self.tenant[slot] = entry.tenant
        self.num_preemptions[slot] = request.metrics.num_preemptions
        self.is_pinned[slot] = entry.is_pinned
        self.base_s[slot] = np.inf
        self.tpot_s[slot] = pace_s(request) or 0.0
        self.end_due_s[slot] = end_due_s(request)
        self.unpaced_s[slot] = _unpaced_s(request)
        self.length[slot] = self.least_length[slot] = 0.0
        self.next_guess[slot] = 0
        if request.metrics.first_token_s is not None:
            self.begin_output(entry)
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
        number = entry.number
        self._decoding[number] = self._prefilling.pop(number)
        entry.goes_on = False
        entry.turn = self._num_turns
        self._num_turns += 1
        if entry.prefill_end >= entry.last_position:
            self._ending[number] = entry
            return
        self._going_on.insert(entry.turn, entry.request)
        self._rows = None

    def end_decode_for_prefill(self, entry: LiveRequest) -> None:
        """A row that decoded has known tokens to compute again: it lacks pages for them until
        `begin_prefill`."""
        number = entry.number
        assert number not in self._ending, entry.request.request_id
        self._lacking[number] = self._decoding.pop(number)
        entry.goes_on = True
        self._going_on.remove(entry.turn)
        self._rows = None

    def begin_prefill(self, entry: LiveRequest) -> None:
        """An entry that lacked pages has them."""
        self._prefilling[entry.number] = self._lacking.pop(entry.number)

    def begin_output(self, entry: LiveRequest) -> None:
        """The request's first token is known to have come; later ones are due from here."""
        request, slot = entry.request, entry.request.slot
        tpot_s = pace_s(request)
        if slot is not None and tpot_s is not None:
            assert request.metrics.first_token_s is not None
            self.base_s[slot] = base_s = request.metrics.first_token_s
            self.paced_from_s[slot] = base_s - tpot_s * (entry.num_prompt_tokens - 1)
            self.unpaced_s[slot] = -math.inf
            num_emitted = float(self.num_computed[slot] - self.last_prompt[slot])
            self._begun.append((slot, base_s + tpot_s * num_emitted))
            self._bound_pace(entry)

    def end_decode(self, entry: LiveRequest) -> None:
        """The last token of a row was planned."""
        self._going_on.remove(entry.turn)
        self._rows = None
        self._ending[entry.number] = entry

    def leave(self, entry: LiveRequest) -> None:
        """Takes an entry's slot; its request takes its counts along.

        The next step may use the slot: steps run in dispatch order.
        """
        request, number = entry.request, entry.number
        slot = request.slot
        assert slot is not None, request.request_id
        if number in self._decoding:
            del self._decoding[number]
            if self._ending.pop(number, None) is None:
                self._going_on.remove(entry.turn)
                self._rows = None
        elif number in self._prefilling:
            del self._prefilling[number]
        else:
            del (self._lacking if number in self._lacking else self._arriving)[number]
        request.counts = self.counts[:, slot].copy()
        self.number[slot] = -1
        self.paced_from_s[slot] = self.unpaced_s[slot] = -math.inf
        request.slot = None
        entry.is_placed = entry.goes_on = False
        self.num_changes += 1
        self.free_slots.append(slot)

    # Bounds and guesses.

    def tighten(self) -> None:
        """Makes the bounds exact for the rows of this moment."""
        pace_s = self.paced_from_s + self.tpot_s * self.last_position
        self.latest_pace_s = float(pace_s.max(0))
        self.latest_unpaced_s = float(self.unpaced_s.max(0))
        self.most_length = float(self.length.max(0))
        self.most_context = int(self.last_position.max(0))

    def _bound_pace(self, entry: LiveRequest) -> None:
        request = entry.request
        tpot_s, first_s = pace_s(request), request.metrics.first_token_s
        if tpot_s is not None and first_s is not None:
            from_s = first_s - tpot_s * (entry.num_prompt_tokens - 1)
            self.latest_pace_s = max(self.latest_pace_s, from_s + tpot_s * entry.last_position)

    def refresh_lengths(
        self, rows: Rows, remaining: Callable[[Sequence[Request]], Sequence[tuple[float, float]]]
    ) -> None:
        """Guesses anew the length of rows that have come as far as was guessed.

        Args:
            remaining: output tokens still to come of each request: the mean, and a number that nine
                in ten such outputs reach.
        """
        slots, starts = rows.slots, rows.starts
        indices = (starts >= self.next_guess[slots]).nonzero()[0].tolist()
        if not indices:
            return
        guesses = remaining([rows.requests[index] for index in indices])
        for index, (left, least) in zip(indices, guesses, strict=True):
            slot = slots.item(index)
            last_prompt = len(rows.requests[index].prompt_token_ids) - 1
            self.length[slot] = length = starts.item(index) - last_prompt + max(left, 1.0)
            self.next_guess[slot] = math.ceil(length) + last_prompt
            self.least_length[slot] = starts.item(index) - last_prompt + least
        self.most_length = float(self.length.max(0))

    # Rows that decode.

    def decode_rows(self) -> Rows:
        """The rows that decode on, as they are now."""
        rows = self._rows
        is_prepared, self._is_prepared = self._is_prepared, False
        if rows is None:
            rows = self._rows_of(self._going_on)
        elif not is_prepared:
            rows = rows.at(self.num_computed[rows.slots])
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
        self.full(rows)
        self._begun.clear()
        if paced:
            self.least_due_s(rows)

    def all_decode_rows(self) -> Rows:
        """As `decode_rows`, with the rows whose last token was planned; ordered as `decoding`."""
        if not self._ending:
            return self.decode_rows()
        order = self._going_on.copy()
        for entry in self._ending.values():
            order.insert(entry.turn, entry.request)
        return self._rows_of(order)

    def _rows_of(self, order: DecodeOrder) -> Rows:
        slots, is_row = order.slots(), np.zeros(len(self.number), np.int32)
        is_row[slots] = 1
        starts = self.num_computed[slots]
        return Rows(
            requests=tuple(order.requests),
            outputs=tuple(order.outputs),
            metrics=tuple(order.metrics),
            slots=slots,
            starts=starts,
            ends=self.last_position[slots],
            numbers=self.number[slots],
            is_row=is_row,
            context=float(starts.sum()),
        )

    # What is asked of decode rows, worked out once for the rows that were asked about last.

    def _figures_of(self, rows: Rows) -> _Figures:
        if self._figures.rows is not rows:
            self._figures = _Figures(rows)
        return self._figures

    def full(self, rows: Rows) -> FullRows:
        """The ones of these rows that have no room for one more token."""
        figures = self._figures_of(rows)
        if figures.full is None:
            figures.full = self.pages.full(rows.slots, rows.starts)
        return figures.full

    def pace_s(self, rows: Rows) -> Floats:
        """float64[rows], seconds after `base_s` in which their next tokens are due."""
        figures = self._figures_of(rows)
        if figures.pace_s is None:
            # Of every slot, as that takes less than to pick these rows from three columns.
            emitted = self.num_computed - self.last_prompt
            figures.pace_s = (self.tpot_s * emitted)[rows.slots]
        return figures.pace_s

    def least_due_s(self, rows: Rows) -> float:
        """When the first of their next tokens is due, in seconds; infinity if none has a goal."""
        figures = self._figures_of(rows)
        least_s = figures.least_due_s
        if least_s is None:
            due_s = self.base_s[rows.slots] + self.pace_s(rows)
            least_s = figures.least_due_s = float(due_s.min(0, initial=math.inf))
            figures.num_begun = len(self._begun)
        # Rows whose first token has come since.
        for slot, next_due_s in self._begun[figures.num_begun :]:
            if next_due_s < least_s and rows.is_row[slot]:
                least_s = next_due_s
        return least_s

    def check_integrity(self) -> None:
        """Asserts that each slot is free or held by exactly one entry, in one stage, and that order
        and columns say what the records say."""
        numbers = [*self._arriving, *self._lacking, *self._prefilling, *self._decoding]
        assert len(set(numbers)) == len(numbers) == len(self)
        assert self._ending.keys() <= self._decoding.keys()
        holders = {entry.request.slot: entry for entry in self}
        slots = [*self.free_slots, *(slot for slot in holders if slot is not None)]
        assert sorted(slots) == list(range(len(self.number))), (holders.keys(), self.free_slots)
        for entry in self:
            assert entry.is_live
            assert entry.request.status is RequestStatus.RUNNING
        for entry in self._arriving.values():
            assert entry.pages.arriving
        for entry in (*self._lacking.values(), *self._prefilling.values()):
            assert not entry.pages.arriving
            assert entry.request.num_computed_tokens < entry.prefill_end
        going_on = []
        for entry in self._decoding.values():
            assert entry.request.num_computed_tokens >= entry.prefill_end
            is_ending = entry.request.num_computed_tokens >= entry.last_position
            assert is_ending == (entry.number in self._ending)
            if not is_ending:
                going_on.append((entry.turn, entry.request))
        self._going_on.check_integrity(going_on)
        if self._rows is not None:
            assert self._rows.requests == tuple(self._going_on.requests)
            assert self._rows.slots.tolist() == self._going_on.slots().tolist()
        for slot, number in enumerate(self.number.tolist()):
            holder = holders.get(slot)
            if holder is not None:
                self._check_columns(holder, slot)
            else:
                assert number == -1
                assert self.paced_from_s[slot] == self.unpaced_s[slot] == -math.inf

    def _check_columns(self, entry: LiveRequest, slot: int) -> None:
        """Asserts that the columns say of a row what its records say."""
        request = entry.request
        assert self.number[slot] == entry.number
        assert np.shares_memory(request.counts, self.counts)
        assert self.counts[:, slot].tolist() == request.counts.tolist()
        assert self.last_position[slot] == entry.last_position
        assert self.ready_position[slot] == entry.ready_position
        self.pages.check_integrity(slot, *entry.pages.tables)


def _unpaced_s(request: Request) -> float:
    """Where a request without a pace stands: see `RowTable.unpaced_s`."""
    due_s = end_due_s(request)
    return due_s if due_s < math.inf else request.arrival_s


class _Requests(Sequence[Request]):
    """The requests of the table in order of acceptance: a view."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._table.in_order()[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._table.in_order())
