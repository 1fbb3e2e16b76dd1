"""What a plan has decided and the state does not show yet.

The device may be waiting for a plan, so what no other decision of the plan reads is entered later:
which requests were admitted, how far rows and prompts have come, the pages that rows have got, and
sums and indices that follow from them. The scheduler's entry points see the state through `apply`,
the search for victims through `flush`. No other code needs to know.
"""

from __future__ import annotations

from octavo.engine.request import COMPUTED, INFLIGHT_STEPS, INFLIGHT_TOKENS
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.plan_builder import Dispatched, PlanCounts
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.step_plan import PrefillRow


class PendingUpdates:
    """The updates that the newest plan has left to be done.

    Args:
        table: the state; changed by `flush` and `apply`.
        counts: of all plans; changed by `apply`.

    Attributes:
        newcomers: requests that were admitted and are not among the running rows yet.
    """

    def __init__(self, table: RequestTable, counts: PlanCounts) -> None:
        self._table = table
        self._counts = counts
        self._is_applied = True
        self._snapshot: Snapshot | None = None
        self._newest: Dispatched | None = None
        self.newcomers: list[LiveRequest] = []
        self._admitted_s = 0.0  # when they were admitted
        self._chunks: list[tuple[LiveRequest, PrefillRow]] = []

    def begin(self, snapshot: Snapshot) -> None:
        """A plan is going to be made, from a snapshot that names no request any more once the plan
        is applied: requests end."""
        self._is_applied = False
        self._snapshot = snapshot

    def admitted(self, entry: LiveRequest, now_s: float) -> None:
        """A waiting request was given a slot and pages: it is among the running rows, and in the
        columns, from `flush` on, and counted as admitted."""
        self.newcomers.append(entry)
        self._admitted_s = now_s

    def advanced(self, entry: LiveRequest, chunk: PrefillRow) -> None:
        """A chunk of a running request's known tokens was planned: the request has moved ahead by
        it from `flush` on, and decodes if that was the last one."""
        self._chunks.append((entry, chunk))

    def planned(self, dispatched: Dispatched) -> None:
        """The plan was made: its rows have moved ahead from `apply` on."""
        self._newest = dispatched

    def flush(self) -> None:
        """Enters admitted requests, how far prompts have come, which rows decode, and their pages.

        Of a plan's own decisions only the choice of victims depends on it, and asks for it.
        """
        table, rows = self._table, self._table.rows
        if self._chunks or self.newcomers:
            # First, as long as newcomers' counts are their own and not parts of the columns.
            for entry, chunk in self._chunks:
                counts = entry.request.counts
                counts[COMPUTED] = chunk.start + chunk.num_tokens
                counts[INFLIGHT_STEPS] += 1
                counts[INFLIGHT_TOKENS] += chunk.samples
                entry.is_placed = True
            for entry in self.newcomers:
                table.begin_to_run(entry, self._admitted_s)
            for entry, chunk in self._chunks:
                if chunk.samples:
                    rows.begin_decode(entry)
            table.quotas.serve(
                [(entry.request.priority, chunk.num_tokens) for entry, chunk in self._chunks]
            )
            self._chunks.clear()
            self.newcomers.clear()
        rows.pages.hand_out()

    def apply(self) -> None:
        """Applies the newest plan, if it was not yet: moves the state ahead as if it had run.

        What is entered by `flush` is; estimates of waiting requests and of rows' lengths are
        brought up to date, rows whose last token was planned set apart, pages behind windows given
        back, what given-up pages held is forgotten, and the next plan's rows are put together.
        """
        if self._is_applied:
            return
        self._is_applied = True
        if self._snapshot is not None:
            self._snapshot.forget_requests()
        table, measures = self._table, self._table.places.policy.measure is not None
        newest, self._newest = self._newest, None
        if newest is not None:
            self._move_ahead(newest)
        self.flush()
        if newest is not None and table.kv.has_windows:
            self._give_back(newest)
        table.work.measure_changed()
        table.waiting.flush()
        table.kv.flush()
        if newest is not None and len(newest.decoding):
            decoding, plan = newest.decoding, newest.plan
            if measures:
                table.rows.refresh_lengths(decoding, table.forecast.remaining_lengths)
            is_ending = decoding.starts + plan.decode_rows.max_new_tokens >= decoding.ends
            newest.ending.extend(is_ending.nonzero()[0].tolist())
            for index in newest.ending:
                table.rows.end_decode(table.live.entry(decoding.requests[index]))
        table.rows.prepare(paced=measures)

    def _give_back(self, dispatched: Dispatched) -> None:
        """Lets go of what no step sees any more that comes after this plan's, and gives prompts
        pages for their next chunks instead.

        The next holder of such a page writes to it in a later step, after all that this one reads.
        """
        kv, rows, plan = self._table.kv, self._table.rows, dispatched.plan
        pages = rows.pages
        for entry, chunk in zip(dispatched.prefilling, plan.prefill_rows, strict=True):
            end = chunk.start + chunk.num_tokens
            pages.gives_back_at[chunk.slot] = kv.give_back(entry.pages, end)
            pages.capacity[chunk.slot] = kv.reach_ahead(entry.pages, entry.prefill_end)
        decoding = dispatched.decoding
        slots = decoding.slots
        positions = rows.num_computed[slots]
        due = (positions >= pages.gives_back_at[slots]).nonzero()[0]
        for index, slot, position in zip(
            due.tolist(), slots[due].tolist(), positions[due].tolist(), strict=True
        ):
            entry = self._table.live.entry(decoding.requests[index])
            pages.gives_back_at[slot] = kv.give_back(entry.pages, position)

    def _move_ahead(self, dispatched: Dispatched) -> None:
        """Moves decode rows ahead by what they may emit, and the device's end of work."""
        plan, decoding, table = dispatched.plan, dispatched.decoding, self._table
        dispatched.count()
        self._counts.num_prefill_tokens += int(dispatched.features.num_prefill)
        iteration_s = table.forecast.step_time.predict_s(dispatched.features)
        plan.priced_s = iteration_s * plan.num_steps
        begins_s = max(table.busy_until_s, dispatched.now_s)
        table.busy_until_s = begins_s + plan.priced_s
        if not len(decoding):
            return
        rows, slots = table.rows, decoding.slots
        if plan.num_steps == 1:
            self._counts.num_decode_tokens += len(decoding)
            counts = rows.counts
            counts += decoding.is_row  # each of the three grows by one
        else:
            max_new_tokens = plan.decode_rows.max_new_tokens
            self._counts.num_decode_tokens += int(max_new_tokens.sum())
            rows.num_computed[slots] = decoding.starts + max_new_tokens
            rows.num_inflight_tokens[slots] += max_new_tokens
            rows.num_inflight_steps[slots] += 1
