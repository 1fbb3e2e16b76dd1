"""Compiling: coarse shapes first, finer ones behind, none on the request path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.errors import StepFailedError
from octavo.engine.execution.programs import compile_manager
from octavo.engine.execution.programs.compile_manager import CompileManager
from octavo.engine.execution.step_spec import StepShape

COARSE, FINE, FINER = StepShape(64, 64, 4), StepShape(8, 8, 4), StepShape(1, 1, 4)


class Lowered:
    """What a compiler is handed; its program is its shape's name."""

    def __init__(self, shape: StepShape, before: Callable[[StepShape], None]) -> None:
        self._shape, self._before = shape, before

    def compile(self, compiler_options: Any = None) -> Any:
        self._before(self._shape)
        return str(self._shape)


def manager(before: Callable[[StepShape], None] = lambda shape: None, **options: Any) -> Any:
    return CompileManager(lambda shape: Lowered(shape, before), **options)


def test_what_was_warmed_up_is_there_and_nothing_counts_as_late() -> None:
    programs = manager()
    told: list[StepShape] = []
    programs.warm_up((COARSE, FINE), told.append)
    assert told == [COARSE, FINE]
    assert programs.has(COARSE)
    assert programs.has(FINE)
    assert not programs.has(FINER)
    assert programs.get(FINE) == str(FINE)
    assert programs.stats.num_after_ready == 0
    assert set(programs.stats.seconds) == {str(COARSE), str(FINE)}


def test_each_program_is_told_of_before_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_manager, "num_cores", lambda: 1)
    is_told = threading.Event()

    def before(shape: StepShape) -> None:
        assert shape != FINER or is_told.wait(10)

    shapes = (COARSE, FINE, FINER, StepShape(2, 2, 4))
    manager(before).warm_up(shapes, lambda shape: is_told.set())
    assert is_told.is_set()


@pytest.mark.parametrize(
    ("cores", "options", "expected"),
    [(1, {}, 1), (16, {}, 2), (2, {"max_threads": 8}, 2), (8, {"max_threads": 8}, 4)],
)
def test_as_many_programs_compile_at_once_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, options: dict[str, int], expected: int
) -> None:
    monkeypatch.setattr(compile_manager, "num_cores", lambda: cores)
    together = threading.Barrier(expected)  # which fewer at once would not pass
    most, now, lock = 0, 0, threading.Lock()

    def at_once(shape: StepShape) -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        together.wait(30)
        with lock:
            now -= 1

    programs = manager(at_once, **options)
    programs.warm_up(tuple(StepShape(n, n, 4) for n in range(1, 2 * expected + 1)))
    assert len(programs.stats.seconds) == 2 * expected
    assert most == expected


def test_ready_comes_before_the_shapes_behind_which_then_appear_in_order() -> None:
    may_go_on, order = threading.Event(), []

    def before(shape: StepShape) -> None:
        if shape != COARSE:
            assert may_go_on.wait(30)
        order.append(shape)

    programs = manager(before)
    programs.warm_up((COARSE,), behind=(FINER, FINE))
    assert programs.has(COARSE)
    assert not programs.has(FINER)
    may_go_on.set()
    programs.wait()
    assert order == [COARSE, FINER, FINE]
    assert programs.has(FINER)
    assert programs.has(FINE)
    assert programs.stats.num_after_ready == 0


def test_behind_comes_first_whose_absence_costs_most() -> None:
    begun, may_go_on, order = threading.Event(), threading.Event(), []
    least, most = StepShape(4, 4, 4), StepShape(16, 16, 4)

    def before(shape: StepShape) -> None:
        order.append(shape)
        if shape == FINER:
            begun.set()
            assert may_go_on.wait(30)

    programs = manager(before)
    assert programs.is_complete
    programs.warm_up((COARSE,), behind=(FINER, FINE, least, most))
    assert not programs.is_complete
    assert begun.wait(30)
    # While the first is compiled, steps of other sizes come, some of them oftener.
    for shape, waste in ((least, 60.0), (most, 48.0), (most, 48.0)):
        programs.miss(shape, waste)
    may_go_on.set()
    programs.wait()
    assert order == [COARSE, FINER, most, least, FINE]
    assert programs.is_complete


def test_closing_waits_for_the_shape_at_hand_and_leaves_out_the_rest() -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def before(shape: StepShape) -> None:
        if shape == FINER:
            begun.set()
            assert may_go_on.wait(30)

    programs = manager(before)
    programs.warm_up((COARSE,), behind=(FINER, FINE))
    assert begun.wait(30)
    closing = threading.Thread(target=programs.close)
    closing.start()
    assert closing.is_alive()
    assert not programs.has(FINER)
    may_go_on.set()
    closing.join(30)
    assert programs.has(FINER)
    assert not programs.has(FINE)


def test_a_shape_that_does_not_compile_behind_leaves_the_others_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def before(shape: StepShape) -> None:
        if shape == FINER:
            raise RuntimeError("out of registers")

    programs = manager(before)
    programs.warm_up((COARSE,), behind=(FINER, FINE))
    programs.wait()
    assert not programs.has(FINER)
    assert programs.has(FINE)
    assert "out of registers" in caplog.text


def test_behind_nothing_more_is_made_once_memory_is_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = iter([True, False, True])
    programs = manager(has_room=lambda: next(room))
    programs.warm_up((COARSE,), behind=(FINER, FINE, StepShape(2, 2, 4)))
    programs.wait()
    assert programs.is_complete
    assert programs.has(FINER)
    assert not programs.has(FINE)
    assert "leaving out 2 finer programs" in caplog.text


def test_a_shape_compiled_on_the_request_path_is_counted() -> None:
    programs = manager()
    programs.warm_up((COARSE,))
    assert programs.get(FINE) == str(FINE)
    assert programs.stats.num_after_ready == 1
    programs.get(FINE)
    assert programs.stats.num_after_ready == 1


def test_compiling_on_the_request_path_can_be_forbidden() -> None:
    programs = manager(fail_after_ready=True)
    programs.warm_up((COARSE,))
    with pytest.raises(StepFailedError, match="was not compiled"):
        programs.get(FINE)
