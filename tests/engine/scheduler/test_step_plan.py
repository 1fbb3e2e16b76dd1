"""The plan's columns and rows say the same."""

from __future__ import annotations

import numpy as np

from octavo.engine.scheduler.step_plan import DecodeRow, DecodeRows, PrefillRow, StepPlan


def test_columns_read_back_as_the_rows_they_were_made_of(fakes):
    rows = tuple(
        DecodeRow(request=fakes.request(str(i)), slot=i + 1, start=10 * i, max_new_tokens=i + 2)
        for i in range(4)
    )
    columns = DecodeRows.of(rows)
    assert tuple(columns) == rows
    assert columns[2] == rows[2]
    assert columns[1:3] == rows[1:3]
    assert len(columns) == 4
    assert columns.slots.dtype == np.intp
    assert columns.starts.dtype == columns.max_new_tokens.dtype == np.int32


def test_a_plan_takes_rows_or_columns_and_counts_its_tokens(fakes):
    row = DecodeRow(request=fakes.request("a"), slot=0, start=5, max_new_tokens=1)
    chunk = PrefillRow(
        request=fakes.request("b"), slot=1, start=0, num_tokens=7, samples=False, is_new=True
    )
    plan = StepPlan(
        step_id=0, decode_rows=(row,), prefill_rows=(chunk,), num_steps=1, page_updates=()
    )
    assert isinstance(plan.decode_rows, DecodeRows)
    assert list(plan.decode_rows) == [row]
    assert (plan.num_tokens, plan.num_rows) == (8, 2)
