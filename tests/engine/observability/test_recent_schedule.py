"""A live engine's schedule of the last seconds: as its log has it, and gone when nobody looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.observability import recent_schedule
from octavo.engine.observability.event_log import start_log
from octavo.engine.observability.schedule import Cell, Schedule, read_schedule
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.simulation.replay import read_log

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def submit(engine: Any, num_requests: int) -> None:
    for number in range(num_requests):
        engine.submit(engine.inputs.process(f"r{number}", [40 + number, 41], LONG, now_s=0.0))


def cells(schedule: Schedule) -> dict[int, tuple[Cell, ...]]:
    return {step.step_id: step.cells for step in schedule.steps}


@pytest.mark.parametrize("num_before", [0, 7])
def test_it_is_what_the_log_has_whenever_the_looking_begins(
    make_llm: Callable[..., Any], tmp_path: Path, num_before: int
) -> None:
    engine = make_llm(overlap=True).engine
    log = start_log(engine.core, engine.config, tmp_path / "log")
    submit(engine, 5)
    for _ in range(num_before):
        engine.step()
    engine.schedules()
    while engine.has_unfinished:
        engine.step()
    (seen,) = engine.schedules()
    log.__exit__(None, None, None)
    logged = cells(read_schedule(read_log(tmp_path / "log")[1]))
    shown = cells(seen)
    assert len(shown) >= len(logged) - num_before
    assert len(shown) > 5
    assert all(logged[step_id] == row for step_id, row in shown.items())
    assert "length" in {mark.kind for mark in seen.marks}


def test_plans_have_reasons_while_somebody_looks_and_cost_nothing_afterwards(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_schedule, "UNWATCHED_S", 0.0)
    engine = make_llm().engine
    engine.schedules()
    assert engine.core.log is not None
    submit(engine, 5)
    engine.step()
    assert engine.core.log is None, "nobody has looked since"
    monkeypatch.setattr(recent_schedule, "UNWATCHED_S", 60.0)
    engine.schedules()
    submit(engine, 5)
    while engine.has_unfinished:
        engine.step()
    (seen,) = engine.schedules()
    reasons = {cell.reason for step in seen.steps for cell in step.cells}
    assert any(reason.startswith("admitted: ") for reason in reasons)


def test_much_is_cut_to_the_newest(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_schedule, "MOST_CELLS", 12)
    engine = make_llm().engine
    engine.schedules()
    submit(engine, 4)
    last = 0
    while engine.has_unfinished:
        engine.step()
        last = engine.core.num_turns
    (seen,) = engine.schedules()
    assert last > 12
    assert 12 <= sum(len(step.cells) for step in seen.steps) <= 12 + 2 * 4
    (again,) = engine.schedules()
    assert again == seen


def test_what_cannot_be_read_costs_the_engine_nothing(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_llm().engine
    engine.schedules()

    def fail(self: Any, line: Any) -> None:
        raise RuntimeError("not read")

    monkeypatch.setattr(recent_schedule.ScheduleReader, "read", fail)
    submit(engine, 3)
    outputs = []
    while engine.has_unfinished:
        outputs += [output for output in engine.step() if output.finished]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 3
    assert engine.core.recovery.num_recoveries == 0
