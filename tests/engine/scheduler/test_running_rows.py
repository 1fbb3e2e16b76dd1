"""The rows that decode: side by side, in order, whoever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.deadlines import pace_s
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.row_columns import RowColumns
from octavo.engine.scheduler.rows import all_but, is_kept
from octavo.engine.scheduler.running_rows import RunningRows

NUM_SLOTS = 12
PAGE_SIZE = 4


class Device:
    """Rows that were entered in columns and decode."""

    def __init__(self) -> None:
        self.columns = RowColumns(NUM_SLOTS, PAGE_SIZE)
        self.running = RunningRows(self.columns)
        self.expected: list[LiveRequest] = []
        self.num_added = 0

    def append(self, num_left: int) -> None:
        """A row that has so many positions to go."""
        request = Request(
            request_id=str(self.num_added),
            prompt_token_ids=[1, 2],
            sampling_params=SamplingParams(max_tokens=num_left + 1),
            seed=0,
            eos_token_ids=(),
            max_tokens=num_left + 1,
            arrival_s=0.0,
            tpot_target_s=0.5,
        )
        pages = SequencePages(request=request, root=b"", reads_cache=False)
        entry = LiveRequest(request=request, number=self.num_added, pages=pages)
        entry.prefill_end = 2
        self.running.seat(entry)
        self.columns.enter(entry)
        self.running.begin_prefill(entry)
        request.num_computed_tokens = 2
        self.num_added += 1
        self.running.begin_decode(entry)
        self.expected.append(entry)

    def remove(self, index: int) -> None:
        entry = self.expected.pop(index)
        self.columns.leave(entry)
        self.running.remove(entry)

    def begin_output(self, index: int) -> None:
        """The first token of a row is committed, unless it was before."""
        request = self.expected[index].request
        if request.metrics.first_token_s is None:
            request.metrics.first_token_s = 3.0 + index
            self.columns.begin_output(self.expected[index])

    def step(self, late: int) -> None:
        """Each row that can go on moves ahead by one; `late` rows come before their end is told."""
        rows = self.running.decode_rows()
        for _ in range(min(late, len(self.running.free_slots))):
            self.append(1)
        counts = self.columns.counts
        counts += rows.is_row
        by_request = {entry.request: entry for entry in self.expected}
        for index in (rows.starts + 1 >= rows.ends).nonzero()[0].tolist():
            self.running.end_decode(by_request[rows.requests[index]])

    def prepare(self, number: int) -> None:
        """The next rows are worked out, and then somebody may come, go or get a first token."""
        self.running.prepare(paced=number % 2 == 0)
        for index in range(number % 4, len(self.expected), 4):
            self.begin_output(index)
        if number % 3 == 1 and self.running.free_slots:
            self.append(number)
        elif number % 3 == 2 and self.expected:
            self.remove(number % len(self.expected))

    def check(self) -> None:
        self.running.check_integrity()
        assert list(self.running.decoding) == self.expected
        assert self.running.num_decoding == len(self.running) == len(self.expected)
        everybody = self.running.all_decode_rows()
        going_on = [
            entry
            for entry in self.expected
            if entry.request.num_computed_tokens < entry.last_position
        ]
        for rows, expected in ((everybody, self.expected), (self.running.decode_rows(), going_on)):
            assert rows.requests == tuple(entry.request for entry in expected)
            assert rows.slots.tolist() == [entry.request.slot for entry in expected]
            assert rows.context == sum(e.request.num_computed_tokens for e in expected)
            assert len(rows.full(self.columns).slots) == len(expected)  # nobody has pages
            assert rows.pace_s(self.columns).tolist() == [
                pace_s(e.request) * (e.request.num_computed_tokens - 1) for e in expected
            ]
            assert rows.least_due_s(self.columns) == min(
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
        if kind == "append" and device.running.free_slots:
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
    rows = device.running.decode_rows()
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
    rows = device.running.decode_rows()
    left = rows.without(left_out)
    kept = [index for index in range(5) if index not in left_out]
    assert left.requests == tuple(rows.requests[index] for index in kept)
    assert left.slots.tolist() == rows.slots[kept].tolist()
    assert left.numbers.tolist() == rows.numbers[kept].tolist()
    assert np.flatnonzero(left.is_row).tolist() == sorted(left.slots.tolist())
    assert all_but(list("abcde"), left_out) == ["abcde"[index] for index in kept]
    assert is_kept(5, left_out).nonzero()[0].tolist() == kept
