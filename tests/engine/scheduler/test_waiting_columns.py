"""Figures of the waiting requests, by column."""

from __future__ import annotations

import math

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


@given(CHANGES)
def test_sums_and_bounds_are_those_of_the_rows(changes):
    columns, rows = WaitingColumns(), []
    for number, (comes, place) in enumerate(changes):
        if comes or not rows:
            figures_of = figures((7 * number) % 31)
            columns.insert(len(rows), figures_of)
            rows.append(figures_of)
        else:
            index = round(place * (len(rows) - 1))
            columns.remove(index)
            del rows[index]
        if place > 0.7:
            columns.tighten()
            assert columns.least_due_s == min((row.due_s for row in rows), default=math.inf)
            least_s = min((row.last_chance_s for row in rows), default=math.inf)
            assert columns.least_chance_s == least_s
        assert all(columns.least_due_s <= row.due_s for row in rows)
        assert all(columns.least_chance_s <= row.last_chance_s for row in rows)
        assert columns.total_work_tokens == sum(row.work_tokens for row in rows)
        assert sorted(columns.classes) == sorted({row.priority for row in rows})
        for priority in range(4):
            assert columns.num_of(priority) == sum(row.priority == priority for row in rows)
    columns.clear()
    assert columns.least_due_s == columns.least_chance_s == math.inf
    assert columns.total_work_tokens == 0
    assert not columns.classes


def test_a_queue_that_moves_on_for_ever_stays_as_small_as_what_waits():
    columns = WaitingColumns()
    for number in range(10_000):
        columns.insert(len(columns), figures(number))
        if len(columns) > 50:
            columns.remove(0)
    assert columns.due_s.tolist() == [float(number) for number in range(9_950, 10_000)]
    assert columns.due_s.base is not None
    assert columns.due_s.base.shape[1] <= 256
