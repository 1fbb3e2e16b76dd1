"""A step that never ends is noticed."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.errors import EngineDeadError
from octavo.engine.sampling_params import SamplingParams
from octavo.server.watchdog import LoopAlarm, Watchdog


@pytest.fixture
def stand(tmp_path):
    with (tmp_path / "stacks").open("w") as file:
        engine = SimpleNamespace(num_turns=0, is_in_turn=False)
        clock = SimpleNamespace(now_s=0.0)
        watchdog = Watchdog(engine, 10.0, clock=lambda: clock.now_s, file=file)

        def look(now_s: float, num_turns: int, is_in_turn: bool) -> bool:
            clock.now_s, engine.num_turns, engine.is_in_turn = now_s, num_turns, is_in_turn
            return watchdog.look()

        stacks = (tmp_path / "stacks").read_text
        yield SimpleNamespace(look=look, watchdog=watchdog, stacks=stacks)


def test_an_engine_without_work_is_not_stuck(stand):
    assert not any(stand.look(float(now_s), 5, False) for now_s in range(0, 1000, 50))


def test_an_engine_that_turns_is_not_stuck(stand):
    assert not any(stand.look(9.0 * turn, turn, True) for turn in range(20))


def test_one_long_turn_is_stuck_until_the_next(stand):
    assert not stand.look(0.0, 1, True)
    assert not stand.look(10.0, 1, True)
    assert stand.stacks() == ""
    assert stand.look(10.5, 1, True)
    assert stand.look(99.0, 1, True)
    assert stand.stacks().count("most recent call first") >= 1
    assert not stand.look(99.5, 2, True)
    assert not stand.look(109.0, 2, True)
    assert stand.look(110.0, 2, True)


def test_a_turn_of_twice_as_long_hangs_until_the_next(stand):
    assert not any(stand.look(now_s, 1, True) for now_s in (0.0, 9.0))
    assert not stand.watchdog.hangs
    assert stand.look(19.0, 1, True)
    assert not stand.watchdog.hangs
    assert stand.look(20.5, 1, True)
    assert stand.watchdog.hangs
    assert not stand.look(21.0, 2, True)
    assert not stand.watchdog.hangs


def test_a_pause_of_the_whole_process_is_not_held_against_the_engine(stand):
    """Nobody turned while it lasted, and nobody looked either."""
    stand.watchdog._longest_gap_s = 2.0
    assert not stand.look(1.0, 1, True)
    assert not stand.look(3600.0, 1, True)
    assert not any(stand.look(3600.0 + now_s, 1, True) for now_s in range(1, 8))
    assert stand.look(3609.0, 1, True)


def test_work_after_long_idleness_is_not_stuck(stand):
    assert not stand.look(0.0, 5, False)
    assert not stand.look(500.0, 6, True)
    assert not stand.look(505.0, 6, True)


def test_a_real_engine_whose_device_hangs_is_stuck(tiny_model, tmp_path, monkeypatch):
    """The engine's own thread, blocked inside a step."""

    async def main() -> None:
        engine = AsyncEngine(
            model=str(tiny_model), max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128,
            num_kv_pages=40, warm_up="coarse",  # the programs of cli/test_commands.py
        )  # fmt: skip
        hang, entered = threading.Event(), threading.Event()
        result = engine.engine.executor.result

        def hanging_result(handle):
            entered.set()
            hang.wait()
            return result(handle)

        monkeypatch.setattr(engine.engine.executor, "result", hanging_result)
        now_s = 0.0
        with (tmp_path / "stacks").open("w") as file:
            watchdog = Watchdog(engine, 10.0, clock=lambda: now_s, file=file)
            answer = asyncio.create_task(collect(engine))
            try:
                await asyncio.to_thread(entered.wait)
                assert not watchdog.look()
                now_s = 11.0
                assert watchdog.look()
            finally:
                hang.set()
            assert (await answer).finished
            while engine.is_in_turn:
                await asyncio.sleep(0.01)
            now_s = 50.0
            assert not watchdog.look()
        assert "hanging_result" in (tmp_path / "stacks").read_text()
        await engine.shutdown()

    asyncio.run(main())


def test_a_real_engine_that_never_comes_back_ends_its_streams_typed(tiny_model, monkeypatch):
    async def main() -> None:
        engine = AsyncEngine(
            model=str(tiny_model), max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128,
            num_kv_pages=40, warm_up="coarse",  # the programs of cli/test_commands.py
        )  # fmt: skip
        hang, entered = threading.Event(), threading.Event()
        result = engine.engine.executor.result

        def hanging_result(handle):
            entered.set()
            hang.wait()
            return result(handle)

        monkeypatch.setattr(engine.engine.executor, "result", hanging_result)
        answers = [asyncio.create_task(collect(engine)) for _ in range(3)]
        try:
            await asyncio.to_thread(entered.wait)
            flushed = asyncio.create_task(engine.flush_prefix_cache())
            await asyncio.sleep(0)
            engine.give_up(EngineDeadError("it hangs"))
            for answer in answers:
                with pytest.raises(EngineDeadError, match="it hangs"):
                    await answer
            assert not engine.is_healthy
            for call in (flushed, collect(engine)):
                with pytest.raises(EngineDeadError):
                    await call
        finally:
            hang.set()
        await engine.shutdown()  # its thread comes back after all: it ends, and takes nothing up
        assert engine.is_stopped
        engine.engine.check_integrity()

    asyncio.run(main())


def test_an_event_loop_that_hangs_has_its_stacks_written(tmp_path):
    """The loop cannot say it itself."""

    async def hanging_front(alarm: LoopAlarm) -> None:
        alarm.turned()
        # Threads are written one by one, this one last: until then it has to hang.
        deadline_s = time.monotonic() + 30
        while "hanging_front" not in path.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.01)

    path = tmp_path / "stacks"
    with path.open("w") as file:
        alarm = LoopAlarm(0.05, file)
        asyncio.run(hanging_front(alarm))
        alarm.close()
    assert "hanging_front" in path.read_text()


def test_a_closed_alarm_is_silent(tmp_path):
    with (tmp_path / "stacks").open("w") as file:
        alarm = LoopAlarm(0.02, file)
        alarm.turned()
        alarm.close()
        time.sleep(0.1)
    assert (tmp_path / "stacks").read_text() == ""


async def collect(engine: AsyncEngine):
    async for output in engine.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True)):
        last = output
    return last
