"""The table of rows: who decodes, in order, whoever comes and goes, and bounds of their figures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.scheduler.deadlines import pace_s
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.row_table import RowTable
from octavo.engine.scheduler.rows import all_but, is_kept
from tests.engine.made_requests import make_request

NUM_SLOTS = 12
PAGE_SIZE = 4
TARGETS = st.none() | st.sampled_from((0.01, 0.5, 3.0))


def entry_of(
    number: int, num_prompt: int, max_tokens: int, now_s: float, tpot_s: float | None,
    e2e_s: float | None = None,
) -> LiveRequest:  # fmt: skip
    request = make_request(
        str(number), num_prompt, max_tokens, arrival_s=now_s, tpot_target_s=tpot_s,
        e2e_target_s=e2e_s,
    )  # fmt: skip
    pages = SequencePages(request=request, root=b"", page_size=16, reads_cache=False)
    entry = LiveRequest(request=request, number=number, pages=pages)
    entry.prefill_end = num_prompt
    return entry


class Device:
    """Rows that were entered in a table and decode."""

    def __init__(self) -> None:
        self.table = RowTable(NUM_SLOTS, PAGE_SIZE)
        self.expected: list[LiveRequest] = []
        self.num_added = 0

    def append(self, num_left: int) -> None:
        """A row that has so many positions to go."""
        entry = entry_of(self.num_added, 2, num_left + 1, 0.0, 0.5)
        self.table.seat(entry)
        self.table.enter(entry)
        entry.request.num_computed_tokens = 2
        self.num_added += 1
        self.table.begin_decode(entry)
        self.expected.append(entry)

    def remove(self, index: int) -> None:
        entry = self.expected.pop(index)
        self.table.leave(entry)

    def begin_output(self, index: int) -> None:
        """The first token of a row is committed, unless it was before."""
        request = self.expected[index].request
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = 3.0 + index
            self.table.begin_output(self.expected[index])

    def step(self, late: int) -> None:
        """Each row that can go on moves ahead by one; `late` rows come before their end is told."""
        rows = self.table.decode_rows()
        for _ in range(min(late, len(self.table.free_slots))):
            self.append(1)
        counts = self.table.counts
        counts += rows.is_row
        by_request = {entry.request: entry for entry in self.expected}
        for index in (rows.starts + 1 >= rows.ends).nonzero()[0].tolist():
            self.table.end_decode(by_request[rows.requests[index]])

    def prepare(self, number: int) -> None:
        """The next rows are worked out, and then somebody may come, go or get a first token."""
        self.table.prepare(paced=number % 2 == 0)
        for index in range(number % 4, len(self.expected), 4):
            self.begin_output(index)
        if number % 3 == 1 and self.table.free_slots:
            self.append(number)
        elif number % 3 == 2 and self.expected:
            self.remove(number % len(self.expected))

    def check(self) -> None:
        self.table.check_integrity()
        assert list(self.table.decoding) == self.expected
        assert self.table.num_decoding == len(self.table) == len(self.expected)
        everybody = self.table.all_decode_rows()
        going_on = [
            entry
            for entry in self.expected
            if entry.request.num_computed_tokens < entry.last_position
        ]
        for rows, expected in ((everybody, self.expected), (self.table.decode_rows(), going_on)):
            assert rows.requests == tuple(entry.request for entry in expected)
            assert rows.slots.tolist() == [entry.request.slot for entry in expected]
            assert rows.context == sum(e.request.num_computed_tokens for e in expected)
            assert len(self.table.full(rows).slots) == len(expected)  # nobody has pages
            assert self.table.pace_s(rows).tolist() == [
                pace_s(e.request) * (e.request.num_computed_tokens - 1) for e in expected
            ]
            assert self.table.least_due_s(rows) == min(
                (
                    e.request.metrics.first_token_s
                    + pace_s(e.request) * (e.request.num_computed_tokens - 1)
                    for e in expected
                    if e.request.metrics.first_token_s is not None
                ),
                default=np.inf,
            )
            assert rows.numbers.tolist() == [entry.number for entry in expected]
            assert rows.starts.tolist() == [e.request.num_computed_tokens for e in expected]
            assert rows.ends.tolist() == [entry.last_position for entry in expected]
            assert np.flatnonzero(rows.is_row).tolist() == sorted(rows.slots.tolist())
            assert all(
                output is entry.request.output_token_ids and metrics is entry.request.metrics
                for entry, output, metrics in zip(expected, rows.outputs, rows.metrics, strict=True)
            )


CHANGES = st.lists(
    st.tuples(st.sampled_from(("append", "remove", "step", "prepare")), st.integers(0, 6)),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(CHANGES)
def test_rows_keep_the_order_in_which_they_began_and_stand_apart_once_they_end(changes):
    device = Device()
    for kind, number in changes:
        if kind == "append" and device.table.free_slots:
            device.append(number)
        elif kind == "remove" and device.expected:
            device.remove(number % len(device.expected))
        elif kind == "step":
            device.step(number % 3)
        elif kind == "prepare":
            device.prepare(number)
        device.check()


def test_rows_of_a_plan_stay_as_they_were_while_others_come_and_go():
    device = Device()
    for _ in range(4):
        device.append(5)
    rows = device.table.decode_rows()
    before = (rows.requests, rows.slots.tolist(), rows.starts.tolist())
    device.remove(1)
    device.append(3)
    device.step(0)
    assert (rows.requests, rows.slots.tolist(), rows.starts.tolist()) == before


@pytest.mark.parametrize("left_out", [[], [0], [2, 3], [0, 1, 2, 3, 4]])
def test_rows_without_some_are_those_of_the_others(left_out):
    device = Device()
    for _ in range(5):
        device.append(5)
    rows = device.table.decode_rows()
    left = rows.without(left_out)
    kept = [index for index in range(5) if index not in left_out]
    assert left.requests == tuple(rows.requests[index] for index in kept)
    assert left.slots.tolist() == rows.slots[kept].tolist()
    assert left.numbers.tolist() == rows.numbers[kept].tolist()
    assert np.flatnonzero(left.is_row).tolist() == sorted(left.slots.tolist())
    assert all_but(list("abcde"), left_out) == ["abcde"[index] for index in kept]
    assert is_kept(5, left_out).nonzero()[0].tolist() == kept


def check_bounds(table: RowTable) -> None:
    pace_s = table.paced_from_s + table.tpot_s * table.num_computed
    assert table.latest_pace_s >= pace_s.max()
    assert table.latest_unpaced_s >= table.unpaced_s.max()
    assert table.most_length >= table.length.max()
    assert table.most_context >= table.num_computed.max()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("come", "go", "step", "tighten")), TARGETS, TARGETS),
        max_size=40,
    )
)
def test_bounds_hold_for_every_row_until_it_goes(changes):
    table = RowTable(NUM_SLOTS, PAGE_SIZE)
    here: list[LiveRequest] = []
    for number, (kind, tpot_s, e2e_s) in enumerate(changes):
        now_s = 0.1 * number
        if kind == "come" and table.free_slots:
            entry = entry_of(number, 1 + number % 7, 9, now_s, tpot_s, e2e_s)
            table.seat(entry)
            table.enter(entry)
            here.append(entry)
        elif kind == "go" and here:
            table.leave(here.pop(number % len(here)))
        elif kind == "step":
            for entry in here:
                request = entry.request
                request.num_computed_tokens = min(
                    request.num_computed_tokens + 3, entry.last_position
                )
                if request.metrics.first_token_s is None:
                    request.metrics.first_token_s = now_s
                    table.begin_output(entry)
        elif kind == "tighten":
            table.tighten()
        check_bounds(table)


def test_a_row_that_went_is_in_no_bound_once_it_is_tightened():
    table = RowTable(NUM_SLOTS, PAGE_SIZE)
    entry = entry_of(0, 1, 9, 7.0, None)
    table.seat(entry)
    table.enter(entry)
    assert table.latest_unpaced_s == 7.0
    table.leave(entry)
    assert table.latest_unpaced_s == 7.0
    table.tighten()
    assert table.latest_unpaced_s < 0


def test_a_requests_counts_are_an_array_of_its_own_but_while_it_holds_a_row():
    table, entry = RowTable(NUM_SLOTS, PAGE_SIZE), entry_of(0, 3, 9, 0.0, None)
    request = entry.request
    request.num_inflight_tokens = 5
    table.seat(entry)
    table.enter(entry)
    slot = request.slot
    table.counts += 1
    assert request.counts.tolist() == [1, 6, 1]
    table.leave(entry)
    table.counts += 1
    assert request.counts.dtype == np.int32
    assert request.counts.tolist() == [1, 6, 1]
    assert (table.number[slot], request.slot) == (-1, None)
