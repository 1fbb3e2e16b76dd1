"""What policies price by the row, as arrays over device slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.kv.kv_manager import NEVER
from octavo.engine.request import COMPUTED, INFLIGHT_STEPS, INFLIGHT_TOKENS, Request
from octavo.engine.scheduler.deadlines import pace_s
from octavo.engine.scheduler.forecast import CAUTIOUS, Forecast
from octavo.engine.scheduler.live_request import ALWAYS_READY, LiveRequest

Floats = NDArray[np.float64]
Counts = NDArray[np.int32]
Slots = NDArray[np.intp]


class RowColumns:
    """Goals and expectations of the running rows by slot: hundreds of rows in a few calls.

    Args:
        num_slots: rows of the device state.
        page_size: tokens in a page.

    Attributes:
        base_s: due time of output token 0: token k is due at `base_s + k · tpot_s`, so that early
            tokens bank slack. Infinite until the first token was committed, and without a goal.
        tpot_s: goal, seconds a token; 0 for none.
        paced_from_s: with a pace to keep, `base_s` as if the prompt had been emitted at that pace
            too: the token of position p + 1 is due at `paced_from_s + p · tpot_s`; else -infinity.
        unpaced_s: without one, when the last token is due, or else the arrival; else -infinity.
        end_due_s: due time of the last token; infinite without a goal.
        arrival_s: of the request.
        last_prompt: position of the prompt's last token: what is beyond it was emitted.
        length: the output's expected final length, in tokens.
        least_length: a length that nine in ten such outputs reach, as expected when `length` was.
        next_guess: the position from which on `length` is too short.
        priority: class.
        num_preemptions: times it lost its row before.
        is_pinned: whether it has waited its longest and is nobody's victim.
        counts: int32[3, slots], `Request.counts` of the rows' requests, which are views of it.
        num_computed, num_inflight_tokens, num_inflight_steps: its rows; `inflight`: the latter two.
        tenant: its tenant's number.
        number: of the request that holds the slot, in order of acceptance; -1 for nobody.
        last_position, ready_position: as in `LiveRequest`.
        capacity: tokens that the row's pages have room for.
        gives_back_at: position from which on the row has pages behind a window to give back.
        page_ids: the pages: `SequencePages.tables`, those of a row side by side; those of the
            newest `grow` are missing until `hand_out`.
        last_run_s: when the newest step that decodes the row was planned.
        begun: (slot, when its next token is due) of rows whose first token has come since the next
            plan's rows were prepared.
        latest_pace_s, latest_unpaced_s, most_length, most_context: bounds of all rows: no
            `paced_from_s + tpot_s · num_computed`, `unpaced_s`, `length` or `num_computed` is above
            them, nor comes there while the row lives. Close after `tighten`.
    """

    def __init__(self, num_slots: int, page_size: int, num_groups: int = 1) -> None:
        self.page_size = page_size
        self.num_groups = num_groups
        self.base_s: Floats = np.full(num_slots, np.inf)
        self.tpot_s: Floats = np.zeros(num_slots)
        self.paced_from_s: Floats = np.full(num_slots, -np.inf)
        self.unpaced_s: Floats = np.full(num_slots, -np.inf)
        self.end_due_s: Floats = np.full(num_slots, np.inf)
        self.arrival_s: Floats = np.zeros(num_slots)
        self.last_prompt: Floats = np.zeros(num_slots)
        self.length: Floats = np.zeros(num_slots)
        self.least_length: Floats = np.zeros(num_slots)
        self.next_guess: Counts = np.zeros(num_slots, np.int32)
        self.priority: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.tenant: Slots = np.zeros(num_slots, np.intp)
        self.num_preemptions: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.is_pinned: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.counts: Counts = np.zeros((3, num_slots), np.int32)
        self.inflight: Counts = self.counts[INFLIGHT_TOKENS : INFLIGHT_STEPS + 1]
        self.num_computed: Counts = self.counts[COMPUTED]
        self.num_inflight_tokens: Counts = self.counts[INFLIGHT_TOKENS]
        self.num_inflight_steps: Counts = self.counts[INFLIGHT_STEPS]
        self.number: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self.last_position: Counts = np.zeros(num_slots, np.int32)
        self.ready_position: Counts = np.full(num_slots, ALWAYS_READY, np.int32)
        self.capacity: Counts = np.zeros(num_slots, np.int32)
        self.gives_back_at: Counts = np.full(num_slots, NEVER, np.int32)
        self.page_ids: list[list[int]] = [[] for _ in range(num_slots * num_groups)]
        self.last_run_s: Floats = np.zeros(num_slots)
        self.begun: list[tuple[int, float]] = []
        self.latest_pace_s = self.latest_unpaced_s = -math.inf
        self.most_length = 0.0
        self.most_context = 0
        self._slots_to_grow: list[int] = []
        self._new_pages: list[int] = []
        self._num_widened = 0  # of the slots to grow; the capacity of the others is missing

    def expect(self, entry: LiveRequest) -> None:
        """A request is going to take a slot: the bounds hold for it from now on."""
        due_s = entry.end_due_s
        unpaced_s = due_s if due_s < math.inf else entry.request.arrival_s
        if unpaced_s > self.latest_unpaced_s:
            self.latest_unpaced_s = unpaced_s
        if entry.last_position > self.most_context:
            self.most_context = entry.last_position
        if entry.request.metrics.first_token_s is not None:
            self._bound_pace(entry)

    def tighten(self) -> None:
        """Makes the bounds those of the rows that are here now."""
        pace_s = self.paced_from_s + self.tpot_s * self.last_position
        self.latest_pace_s = float(pace_s.max(0))
        self.latest_unpaced_s = float(self.unpaced_s.max(0))
        self.most_length = float(self.length.max(0))
        self.most_context = int(self.last_position.max(0))

    def enter(self, entry: LiveRequest) -> None:
        """A request takes its slot."""
        request, slot = entry.request, entry.request.slot
        assert slot is not None
        self.base_s[slot] = np.inf
        self.tpot_s[slot] = pace_s(request) or 0.0
        self.end_due_s[slot] = due_s = entry.end_due_s
        self.unpaced_s[slot] = due_s if due_s < math.inf else request.arrival_s
        self.arrival_s[slot] = request.arrival_s
        self.last_prompt[slot] = entry.num_prompt_tokens - 1
        self.last_run_s[slot] = -math.inf
        self.length[slot] = self.least_length[slot] = 0.0
        self.next_guess[slot] = 0
        self.priority[slot] = request.priority
        self.tenant[slot] = entry.tenant
        self.num_preemptions[slot] = request.metrics.num_preemptions
        self.is_pinned[slot] = entry.is_pinned
        self.number[slot] = entry.number
        self.last_position[slot] = entry.last_position
        self.ready_position[slot] = entry.ready_position
        first = slot * self.num_groups
        self.page_ids[first : first + self.num_groups] = entry.pages.tables
        self.capacity[slot] = entry.pages.num_filled * self.page_size
        self.gives_back_at[slot] = NEVER
        self.num_computed[slot], self.num_inflight_tokens[slot], self.num_inflight_steps[slot] = (
            request.counts
        )
        request.counts = self.counts[:, slot]
        if request.metrics.first_token_s is not None:
            self.begin_output(entry)

    def leave(self, entry: LiveRequest) -> None:
        """A request gives its slot up, and takes its counts along."""
        request, slot = entry.request, entry.request.slot
        assert slot is not None
        request.counts = self.counts[:, slot].tolist()
        self.number[slot] = -1
        self.paced_from_s[slot] = self.unpaced_s[slot] = -math.inf

    def grow(
        self, slots: list[int], num_pages: list[int], pages: list[int]
    ) -> Iterable[tuple[int, ...]]:
        """Each of these rows, which has so many pages in each cache group, gets one more.

        Their `capacity` is missing until `widen` or `hand_out`, and the sequences are given theirs
        by the latter, for which nobody who waits for a plan need wait: each has a list of its own
        somewhere in memory.

        Returns:
            (slot, index in the row, page id of each group) of each.
        """
        self._slots_to_grow += slots
        self._new_pages += pages
        groups = range(self.num_groups)
        by_group = [pages[group :: self.num_groups] for group in groups]
        return zip(slots, num_pages, *by_group, strict=True)

    def last_pages(self, slots: list[int]) -> list[int]:
        """The last page of each of these rows, in each group in turn."""
        page_ids = self.page_ids
        return [page_ids[table][-1] for table in self._tables_of(slots)]

    def _tables_of(self, slots: list[int]) -> list[int]:
        """Where the tables of these rows are."""
        num_groups = self.num_groups
        if num_groups == 1:
            return slots
        return [slot * num_groups + group for slot in slots for group in range(num_groups)]

    def widen(self) -> None:
        """Counts in `capacity` the pages that rows have got."""
        slots = self._slots_to_grow[self._num_widened :]
        if slots:
            self.capacity[slots] += self.page_size
            self._num_widened = len(self._slots_to_grow)

    def hand_out(self) -> None:
        """Gives rows and sequences the pages that they have got."""
        if not self._new_pages:
            return
        self.widen()
        self._num_widened = 0
        page_ids = self.page_ids
        tables = self._tables_of(self._slots_to_grow)
        for table, page in zip(tables, self._new_pages, strict=True):
            page_ids[table].append(page)
        self._slots_to_grow.clear()
        self._new_pages.clear()

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
            self.begun.append((slot, base_s + tpot_s * num_emitted))
            self._bound_pace(entry)

    def _bound_pace(self, entry: LiveRequest) -> None:
        request = entry.request
        tpot_s, first_s = pace_s(request), request.metrics.first_token_s
        if tpot_s is not None and first_s is not None:
            from_s = first_s - tpot_s * (entry.num_prompt_tokens - 1)
            self.latest_pace_s = max(self.latest_pace_s, from_s + tpot_s * entry.last_position)

    def refresh_lengths(
        self, requests: Sequence[Request], slots: Slots, starts: Counts, forecast: Forecast
    ) -> None:
        """Guesses anew the length of rows that have come as far as was guessed.

        Args:
            requests: of decode rows.
            slots, starts: theirs, and the positions of their inputs.
        """
        indices = (starts >= self.next_guess[slots]).nonzero()[0].tolist()
        if not indices:
            return
        reached = [requests[index] for index in indices]
        remaining = forecast.remaining_tokens_each(reached)
        for index, request, left in zip(indices, reached, remaining, strict=True):
            slot, last_prompt = slots.item(index), len(request.prompt_token_ids) - 1
            self.length[slot] = length = starts.item(index) - last_prompt + max(left, 1.0)
            self.next_guess[slot] = math.ceil(length) + last_prompt
            least = forecast.remaining_tokens(request, CAUTIOUS)
            self.least_length[slot] = starts.item(index) - last_prompt + least
        self.most_length = float(self.length.max(0))
