"""A process apart compiles the programs behind; where it cannot, the engine's own process does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.execution import executor as executor_module
from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.execution.programs.compile_manager import CompileManager, Left
from octavo.engine.execution.programs.program_maker import ProgramMaker
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.sampling_params import SamplingParams
from tests.engine.conftest import LAYERS

COARSE, FINE, FINER = StepShape(64, 64, 4), StepShape(8, 8, 4), StepShape(1, 1, 4)
PROMPTS = [[20, 30, 40], [50]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own, in which JAX keeps nothing."""
    folder = tmp_path_factory.mktemp("cache")
    least = "jax_persistent_cache_min_entry_size_bytes"
    mine = {"jax_compilation_cache_dir": str(folder), least: 1 << 40}
    before = {name: getattr(jax.config, name) for name in mine}
    for settings in (mine, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if settings is mine:
            yield folder


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[str]:
    """Shapes that this process traced; processes apart compile small models' programs too."""
    names: list[str] = []
    lower = DeviceExecutor._lower

    def noting(self: DeviceExecutor, shape: Any) -> Any:
        names.append(str(shape))
        return lower(self, shape)

    monkeypatch.setattr(DeviceExecutor, "_lower", noting)
    monkeypatch.setattr(executor_module, "LAYERS_APART", LAYERS)
    return names


def open_engine(model: Path, warm_up: Any = "early") -> Engine:
    return Engine(
        EngineConfig(
            model=str(model),
            max_num_seqs=4,
            max_num_batched_tokens=40,
            max_model_len=64,
            num_kv_pages=21,
            warm_up=warm_up,
        )
    )


def tokens(engine: Engine) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        now_s = engine.clock.now_s()
        engine.submit(engine.inputs.process(str(number), prompt, PARAMS, now_s=now_s))
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    return [found[str(number)] for number in range(len(PROMPTS))]


def compile_behind(engine: Engine) -> list[str]:
    """Has the fine shapes compiled, whatever was left of them."""
    names = [str(shape) for shape in engine.executor.lattice.fine]
    assert engine.executor.store is not None
    for name in names:
        engine.executor.store.drop(name)
    engine.executor.programs.warm_up((), behind=engine.executor.lattice.fine)
    return names


def maker_of(engine: Engine) -> ProgramMaker:
    maker = engine.executor.programs._maker
    assert isinstance(maker, ProgramMaker)
    return maker


def process_of(engine: Engine) -> int:
    """The process apart, as soon as there is one."""
    until_s = time.monotonic() + 120
    while not (process := maker_of(engine).process_id):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return process


def test_what_is_compiled_behind_is_neither_traced_nor_compiled_here(
    tiny_model: Path, traced: list[str]
) -> None:
    engine = open_engine(tiny_model)
    coarse = [str(shape) for shape in engine.executor.lattice.coarse]
    fine = [str(shape) for shape in engine.executor.lattice.fine]
    assert fine
    engine.wait_until_compiled()
    stats = engine.executor.programs.stats
    assert sorted(stats.seconds) == sorted(coarse + fine)
    assert stats.from_cache == set()
    assert traced == coarse
    assert maker_of(engine).process_id is None  # nothing of it is left
    with_fine = tokens(engine)
    assert stats.num_after_ready == 0
    engine.close()
    # A later start finds them all, and the coarse ones alone say the same.
    traced.clear()
    engine = open_engine(tiny_model, "full")
    assert traced == []
    engine.close()
    engine = open_engine(tiny_model, "coarse")
    assert tokens(engine) == with_fine
    engine.close()


def test_a_process_that_is_killed_leaves_the_rest_to_this_one(
    tiny_model: Path, traced: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(tiny_model, "coarse")
    traced.clear()
    fine = compile_behind(engine)
    os.kill(process_of(engine), signal.SIGKILL)
    engine.wait_until_compiled()
    assert set(engine.executor.programs.stats.seconds) >= set(fine)
    assert sorted(traced) == sorted(fine)
    assert "compiled in the server's own process" in caplog.text
    engine.close()


def test_no_process_is_left_nor_half_a_file_when_the_engine_goes(
    tiny_model: Path, traced: list[str], cache: Path
) -> None:
    engine = open_engine(tiny_model, "coarse")
    traced.clear()
    compile_behind(engine)
    process = process_of(engine)
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert traced == []
    assert [*cache.rglob("*.partial")] == []


def test_a_process_that_would_compile_other_programs_compiles_none(
    tiny_model: Path, traced: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(tiny_model, "coarse")
    maker = maker_of(engine)
    maker._identity = "another"
    assert maker.make(engine.executor.lattice.fine[0]) is None
    assert "would compile other ones" in caplog.text
    assert maker.process_id is None
    engine.close()


class Names:
    """A store of names alone: what it has is loaded as its name."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def claim(self, name: str) -> Any:
        return _Claim()

    def has(self, name: str) -> bool:
        return name in self.names

    def load(self, name: str) -> Any:
        return name if name in self.names else None

    def load_lowered(self, name: str, lowered: Any) -> Any:
        return None

    def save(self, name: str, lowered: Any, program: Any) -> Any:
        self.names.add(name)

    def drop(self, name: str) -> None:
        self.names.discard(name)


class _Claim:
    def release(self) -> None:
        pass


class Maker:
    """Makes what it may, into the store; a shape in `held` only until it is closed."""

    def __init__(self, store: Names, may: Sequence[StepShape], held: Sequence[StepShape]) -> None:
        self.store, self.may, self.held = store, may, held
        self.begun, self.closed = threading.Event(), threading.Event()

    def make(self, shape: StepShape) -> Left | None:
        self.begun.set()
        if shape in self.held:
            assert self.closed.wait(30)
            return None
        if shape not in self.may:
            return None
        self.store.names.add(str(shape))
        return Left(2.0, was_cached=False)

    def close(self) -> None:
        self.closed.set()


class Lowered:
    def compile(self, compiler_options: Any = None) -> Any:
        return "compiled here"


def test_what_is_not_made_apart_is_compiled_here_and_distrust_reaches_both() -> None:
    store = Names()
    maker = Maker(store, [FINE], [])
    programs = CompileManager(lambda shape: Lowered(), store=store, maker=maker)
    programs.warm_up((COARSE,), behind=(FINE, FINER))
    programs.wait()
    assert programs.get(COARSE) == programs.get(FINER) == "compiled here"
    assert programs.get(FINE) == str(FINE)
    assert programs.stats.seconds[str(FINE)] >= 2.0
    assert programs.stats.from_cache == set()
    assert maker.closed.is_set()
    programs.distrust()
    assert str(FINE) not in store.names


def test_closing_ends_what_is_made_apart_and_compiles_it_nowhere_else() -> None:
    store, traced = Names(), []
    maker = Maker(store, [], [FINE])

    def lower(shape: StepShape) -> Lowered:
        traced.append(shape)
        return Lowered()

    programs = CompileManager(lower, store=store, maker=maker)
    programs.warm_up((COARSE,), behind=(FINE, FINER))
    assert maker.begun.wait(30)
    programs.close()
    assert traced == [COARSE]
    assert programs.is_complete
