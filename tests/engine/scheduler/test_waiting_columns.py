"""Figures of the waiting requests, by column."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.scheduler.waiting_columns import WaitingColumns, WaitingFigures

CHANGES = st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=300)


def figures(number):
    return WaitingFigures(number, number + 0.25, number + 0.5, number + 0.75, number % 4)


@given(CHANGES)
def test_columns_keep_the_order_of_a_list_wherever_rows_come_and_go(changes):
    columns, rows = WaitingColumns(), []
    for number, (comes, place) in enumerate(changes):
        if comes or not rows:
            index = round(place * len(rows))
            columns.insert(index, figures(number))
            rows.insert(index, figures(number))
        else:
            index = round(place * (len(rows) - 1))
            columns.remove(index)
            del rows[index]
    found = zip(
        columns.due_s,
        columns.work_tokens,
        columns.last_chance_s,
        columns.place,
        columns.priority,
        strict=True,
    )
    assert [WaitingFigures(*map(float, row)) for row in found] == rows


def test_a_queue_that_moves_on_for_ever_stays_as_small_as_what_waits():
    columns = WaitingColumns()
    for number in range(10_000):
        columns.insert(len(columns), figures(number))
        if len(columns) > 50:
            columns.remove(0)
    assert columns.due_s.tolist() == [float(number) for number in range(9_950, 10_000)]
    assert columns.due_s.base is not None
    assert columns.due_s.base.shape[1] <= 256
