"""What of a stream's gap counts as planned: steps with prompts, at their price and no more."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.hostile import planned

    yield planned
    sys.modules.pop("benchmarks.hostile.planned", None)


CALM = [(float(number), 20.0) for number in range(9)]


def test_a_gap_without_a_prompt_counts_whole_beyond_the_median(planned) -> None:
    gaps = planned.measure([*CALM, (10.0, 150.0)], [])
    assert gaps == planned.Gaps(20.0, 130.0, 130.0)


def test_a_step_with_a_prompt_is_taken_off_at_its_price(planned) -> None:
    step = planned.Step(end_s=9.99, planned_s=0.1)
    gaps = planned.measure([*CALM, (10.0, 150.0)], [step])
    assert gaps.longest == pytest.approx(130.0)
    assert gaps.unplanned == pytest.approx(50.0)  # not less by a decode step besides


def test_what_of_a_step_lies_in_another_gap_is_not_taken_off(planned) -> None:
    before = planned.Step(end_s=9.87, planned_s=0.1)  # 20 ms of it are in the gap
    after = planned.Step(end_s=10.05, planned_s=0.08)  # 30 ms
    gaps = planned.measure([*CALM, (10.0, 150.0)], [before, after])
    assert gaps.unplanned == pytest.approx(100.0)


def test_the_log_is_read_while_it_is_written(planned, tmp_path: Path) -> None:
    lines = [
        {"t": 1.0, "turn": {"step": 0, "prefill": [["a", 0]]}},
        {"t": 1.1, "turn": {"step": 1, "prefill": []}},
        {"t": 1.2, "turn": None},
        {"t": 1.3, "commit": 0, "duration_s": 0.3, "priced_s": 0.2},
        {"t": 1.4, "commit": 1, "duration_s": 0.1, "priced_s": 0.1},
        {"t": 1.5, "turn": {"step": 2, "prefill": [["b", 0]]}},
        {"t": 1.6, "commit": 2, "duration_s": 0.1, "priced_s": 0.2},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = tmp_path / "log"
    path.write_text("")
    log, found = planned.StepLog(path), []
    with path.open("a") as file:
        for begin in range(0, len(text), 50):  # most lines come in pieces
            file.write(text[begin : begin + 50])
            file.flush()
            found += log.steps()
    log.close()
    # Never more than a step took: what was priced too dear hides no stall.
    assert found == [planned.Step(1.3, 0.2), planned.Step(1.6, 0.1)]
