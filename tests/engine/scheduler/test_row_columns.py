"""Figures of the running rows by slot."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.row_columns import RowColumns

NUM_SLOTS = 4
PAGE_SIZE = 4
TARGETS = st.none() | st.sampled_from((0.01, 0.5, 3.0))


def entry_of(number: int, now_s: float, tpot_s: float | None, e2e_s: float | None) -> LiveRequest:
    request = Request(
        request_id=str(number),
        prompt_token_ids=[1] * (1 + number % 7),
        sampling_params=SamplingParams(max_tokens=9),
        seed=0,
        eos_token_ids=(),
        max_tokens=9,
        arrival_s=now_s,
        tpot_target_s=tpot_s,
        e2e_target_s=e2e_s,
    )
    pages = SequencePages(request=request, root=b"", reads_cache=False)
    return LiveRequest(request=request, number=number, pages=pages)


def check_bounds(columns: RowColumns) -> None:
    pace_s = columns.paced_from_s + columns.tpot_s * columns.num_computed
    assert columns.latest_pace_s >= pace_s.max()
    assert columns.latest_unpaced_s >= columns.unpaced_s.max()
    assert columns.most_length >= columns.length.max()
    assert columns.most_context >= columns.num_computed.max()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("come", "go", "step", "tighten")), TARGETS, TARGETS),
        max_size=40,
    )
)
def test_bounds_hold_for_every_row_until_it_goes(changes):
    columns = RowColumns(NUM_SLOTS, PAGE_SIZE)
    here: list[LiveRequest] = []
    free = list(range(NUM_SLOTS))
    for number, (kind, tpot_s, e2e_s) in enumerate(changes):
        now_s = 0.1 * number
        if kind == "come" and free:
            entry = entry_of(number, now_s, tpot_s, e2e_s)
            entry.request.slot = free.pop()
            columns.expect(entry)
            columns.enter(entry)
            here.append(entry)
        elif kind == "go" and here:
            entry = here.pop(number % len(here))
            columns.leave(entry)
            free.append(entry.request.slot)
            entry.request.slot = None
        elif kind == "step":
            for entry in here:
                request = entry.request
                request.num_computed_tokens = min(
                    request.num_computed_tokens + 3, entry.last_position
                )
                if request.metrics.first_token_s is None:
                    request.metrics.first_token_s = now_s
                    columns.begin_output(entry)
        elif kind == "tighten":
            columns.tighten()
        check_bounds(columns)


def test_a_row_that_went_is_in_no_bound_once_it_is_tightened():
    columns = RowColumns(NUM_SLOTS, PAGE_SIZE)
    entry = entry_of(0, 7.0, None, None)
    entry.request.slot = 2
    columns.expect(entry)
    columns.enter(entry)
    assert columns.latest_unpaced_s == 7.0
    columns.leave(entry)
    assert columns.latest_unpaced_s == 7.0
    columns.tighten()
    assert columns.latest_unpaced_s < 0


def test_rows_that_grow_find_their_pages_once_they_are_handed_out():
    columns = RowColumns(NUM_SLOTS, PAGE_SIZE)
    entries = [entry_of(number, 0.0, None, None) for number in range(2)]
    for entry, slot, page_ids in zip(entries, (3, 1), ([5], [6, 7]), strict=True):
        entry.request.slot = slot
        entry.pages.page_ids += page_ids
        columns.enter(entry)
    assert list(columns.grow([3, 1], [1, 2], [8, 9])) == [(3, 1, 8), (1, 2, 9)]
    for change in (columns.widen, columns.widen, columns.hand_out, columns.hand_out):
        change()
        assert columns.capacity[[3, 1]].tolist() == [8, 12]
    assert [entry.pages.page_ids for entry in entries] == [[5, 8], [6, 7, 9]]
