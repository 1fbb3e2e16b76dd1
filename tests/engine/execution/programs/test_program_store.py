"""Programs left on disk: found again by what they are made from, and by nothing else."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.programs import compile_manager, program_store
from octavo.engine.execution.programs.compile_cache import cache_counts
from octavo.engine.execution.programs.compile_manager import CompileManager
from octavo.engine.execution.programs.program_store import (
    KEPT_VERSIONS,
    MAGIC,
    POINTER,
    PROGRAM,
    ProgramStore,
)
from octavo.engine.execution.step_spec import StepShape

SHAPE, OTHER = StepShape(4, 4, 1), StepShape(8, 8, 1)
Tree = dict[str, jax.Array]


class Step:
    """A function that no cache has seen: it adds a number of its own."""

    def __init__(self) -> None:
        self.number = random.SystemRandom().randrange(1 << 20)
        self.num_lowered = 0

    def lower(self, shape: StepShape) -> Any:
        self.num_lowered += 1
        number = self.number

        def step(state: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
            return {"sum": state["sum"] + x}, x + number

        vector = jax.ShapeDtypeStruct((shape.num_tokens,), jnp.float32)
        return jax.jit(step, donate_argnums=0).lower({"sum": vector}, vector)

    def left_in(self, store: ProgramStore, name: str = "it") -> None:
        lowered = self.lower(SHAPE)
        store.save(name, lowered, lowered.compile())

    def started(self, store: ProgramStore, *shapes: StepShape) -> CompileManager:
        manager = CompileManager(self.lower, store=store)
        manager.warm_up(shapes or (SHAPE,))
        manager.wait()
        return manager

    def is_done_by(self, program: Any, shape: StepShape = SHAPE) -> bool:
        x = jnp.arange(float(shape.num_tokens))
        state, added = program({"sum": x + 1}, x)
        return bool((state["sum"] == 2 * x + 1).all() and (added == x + self.number).all())


@pytest.fixture
def step() -> Step:
    return Step()


@pytest.fixture(autouse=True)
def no_entries_in_jaxs_own_cache() -> Iterator[None]:
    before = jax.config.jax_persistent_cache_min_entry_size_bytes
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 1 << 40)
    yield
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", before)


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[..., ProgramStore]:
    defaults = {
        "source": "its digest", "environment": "this version", "purpose": "a model",
        "devices": jax.devices()[:1],
    }  # fmt: skip
    return lambda **changes: ProgramStore(tmp_path / "programs", **defaults | changes)


def entries(tmp_path: Path, suffix: str = "") -> list[Path]:
    return sorted((tmp_path / "programs").glob(f"*{suffix}"))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING):
        yield lambda: [
            record.getMessage()
            for record in caplog.records
            if record.name == program_store.__name__
        ]


def test_what_one_start_leaves_the_next_one_neither_traces_nor_compiles(
    step: Step, open_store: Callable[..., ProgramStore]
) -> None:
    first = step.started(open_store(), SHAPE, OTHER)
    assert (step.num_lowered, first.stats.from_cache) == (2, set())
    counts = cache_counts()
    found, compiled = counts.num_hits, counts.num_compiled
    second = CompileManager(step.lower, store=open_store(), fail_after_ready=True)
    second.begin((SHAPE,))
    told: list[StepShape] = []
    second.warm_up((SHAPE,), told.append, behind=(OTHER,))
    second.wait()
    assert (told, step.num_lowered) == ([SHAPE], 2)
    assert second.stats.from_cache == {str(SHAPE), str(OTHER)}
    assert (counts.num_hits - found, counts.num_compiled - compiled) == (2, 0)
    assert step.is_done_by(second.get(SHAPE))
    assert step.is_done_by(second.get(OTHER), OTHER)


def test_once_ready_nothing_is_left_to_write_down(
    monkeypatch: pytest.MonkeyPatch, step: Step, open_store: Callable[..., ProgramStore]
) -> None:
    store, save = open_store(), ProgramStore.save

    def save_slowly(store: ProgramStore, *args: Any) -> Any:
        time.sleep(0.3)
        return save(store, *args)

    monkeypatch.setattr(ProgramStore, "save", save_slowly)
    CompileManager(step.lower, store=store).warm_up((SHAPE, OTHER))
    assert store.load(str(SHAPE)) is not None
    assert store.load(str(OTHER)) is not None


def test_another_source_of_the_same_text_compiles_nothing(
    step: Step, open_store: Callable[..., ProgramStore]
) -> None:
    step.started(open_store())
    newer = open_store(source="another digest")
    assert newer.load(str(SHAPE)) is None
    manager = step.started(newer)
    assert (manager.stats.from_cache, step.num_lowered) == ({str(SHAPE)}, 2)
    assert step.is_done_by(manager.get(SHAPE))
    for store in (open_store(), newer):  # both know it by their source now
        step.started(store)
    assert step.num_lowered == 2


def test_a_stale_source_is_not_used(
    step: Step, open_store: Callable[..., ProgramStore], tmp_path: Path
) -> None:
    step.started(open_store())
    changed = Step()
    manager = changed.started(open_store(source="of the changed step"))
    assert manager.stats.from_cache == set()
    assert changed.is_done_by(manager.get(SHAPE))
    assert len(entries(tmp_path, PROGRAM)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"environment": "the next version"},
        {"purpose": "another model"},
        {"environment": "this versiona model", "purpose": ""},
    ],
    ids=["version", "model", "both as one text"],
)
def test_what_another_version_or_model_left_is_not_used(
    step: Step,
    open_store: Callable[..., ProgramStore],
    warnings: Callable[[], list[str]],
    change: dict[str, str],
) -> None:
    step.left_in(open_store())
    assert open_store().load("it") is not None
    assert open_store(**change).load("it") is None
    assert open_store(**change).load_lowered("it", step.lower(SHAPE)) is None
    assert open_store().load("another") is None
    assert warnings() == []


def test_what_jaxs_own_cache_had_is_not_written_down(
    step: Step, open_store: Callable[..., ProgramStore], tmp_path: Path
) -> None:
    # XLA's CPU client writes what it loaded without its functions.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    step.lower(SHAPE).compile()
    jax.clear_caches()
    for _ in range(2):
        manager = step.started(open_store())
        assert manager.stats.from_cache == {str(SHAPE)}
        assert step.is_done_by(manager.get(SHAPE))
        assert entries(tmp_path) == []


def test_a_loaded_program_takes_over_what_is_donated_to_it(
    step: Step, open_store: Callable[..., ProgramStore]
) -> None:
    step.left_in(open_store())
    program = open_store().load("it")
    state = {"sum": jnp.ones(SHAPE.num_tokens)}
    assert program is not None
    program(state, jnp.ones(SHAPE.num_tokens))
    assert state["sum"].is_deleted()


def cut(data: bytes) -> bytes:
    return data[:-7]


def flip(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def empty(data: bytes) -> bytes:
    return b""


def older_format(data: bytes) -> bytes:
    return MAGIC.replace(b"1", b"0") + data[len(MAGIC) :]


def another_key(data: bytes) -> bytes:
    return data[: len(MAGIC)] + bytes(32) + data[len(MAGIC) + 32 :]


@pytest.mark.parametrize("suffix", [PROGRAM, POINTER])
@pytest.mark.parametrize("damage", [cut, flip, empty, older_format, another_key])
def test_a_damaged_entry_is_told_of_and_replaced(
    step: Step,
    open_store: Callable[..., ProgramStore],
    warnings: Callable[[], list[str]],
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    suffix: str,
) -> None:
    step.started(open_store())
    [entry] = entries(tmp_path, suffix)
    entry.write_bytes(damage(entry.read_bytes()))
    manager = step.started(open_store())
    [warning] = warnings()
    assert str(entry) in warning
    assert warning.endswith("compiling anew")
    assert step.is_done_by(manager.get(SHAPE))
    assert step.num_lowered == 2
    # The program itself is lost with its entry; by its text it is found without the pointer.
    assert manager.stats.from_cache == ({str(SHAPE)} if suffix == POINTER else set())
    step.started(open_store())
    assert step.num_lowered == 2
    assert len(warnings()) == 1


def test_an_entry_that_this_jax_cannot_load_is_compiled_anew(
    step: Step,
    open_store: Callable[..., ProgramStore],
    warnings: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = (b"not what JAX pickled", None, None)
    with monkeypatch.context() as patch:
        patch.setattr(program_store, "serialize_program", lambda program: broken)
        open_store().save(str(SHAPE), step.lower(SHAPE), object())
    manager = step.started(open_store())
    assert step.is_done_by(manager.get(SHAPE))
    assert len(warnings()) == 1
    assert step.is_done_by(open_store().load(str(SHAPE)))


def test_a_distrusted_program_is_compiled_anew_at_the_next_start(
    step: Step, open_store: Callable[..., ProgramStore], tmp_path: Path
) -> None:
    for _ in range(2):
        manager = step.started(open_store())
    manager.distrust()
    assert entries(tmp_path) == []
    assert open_store().load(str(SHAPE)) is None


def test_what_cannot_be_written_down_is_left_to_jaxs_own_cache(
    step: Step,
    open_store: Callable[..., ProgramStore],
    warnings: Callable[[], list[str]],
    tmp_path: Path,
) -> None:
    open_store().save("no program", step.lower(SHAPE), lambda: None)
    assert not (tmp_path / "programs").exists()
    assert warnings() == []
    (tmp_path / "programs").write_text("a file where the folder should be")
    step.left_in(open_store())
    assert open_store().load("it") is None
    assert len(warnings()) == 2


def test_only_the_newest_versions_of_a_program_are_kept(
    step: Step, open_store: Callable[..., ProgramStore], tmp_path: Path
) -> None:
    step.left_in(open_store(), "other")
    stores = [open_store(environment=f"version {n}") for n in range(KEPT_VERSIONS + 2)]
    old: set[Path] = set(entries(tmp_path))
    for age, store in enumerate(stores[:-1]):
        step.left_in(store)
        for entry in set(entries(tmp_path)) - old:
            os.utime(entry, (1000.0 + age, 1000.0 + age))
            old.add(entry)
    assert stores[1].load("it") is not None  # is the newest now
    step.left_in(stores[-1])
    there = [store.load("it") is not None for store in stores]
    assert there == [False, True, False, True, True, True]
    assert open_store().load("other") is not None
    assert len(entries(tmp_path)) == 2 * (KEPT_VERSIONS + 1)


def test_programs_over_several_devices_come_back_to_theirs(step: Step, tmp_path: Path) -> None:
    devices = jax.devices()[1:3]
    if len(devices) < 2:
        pytest.skip("one device")
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    make = partial(ProgramStore, tmp_path, source="", environment="", purpose="", devices=devices)
    argument = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)
    lowered = jax.jit(lambda x: x + step.number, out_shardings=split).lower(argument)
    make().save("it", lowered, lowered.compile())
    program = make().load("it")
    assert program is not None
    found = program(jax.device_put(jnp.arange(8.0), split))
    assert found.sharding == split
    np.testing.assert_array_equal(found, np.arange(8.0) + step.number)


def test_one_process_at_a_time_may_make_a_program(open_store: Callable[..., ProgramStore]) -> None:
    store, other = open_store(), open_store()
    claim = store.claim("it")
    assert claim is not None
    assert other.claim("it") is None
    another = other.claim("another")
    assert another is not None
    claim.release()
    again = other.claim("it")
    assert again is not None
    for each in (again, another):
        each.release()


def test_engines_that_start_together_share_what_there_is_to_compile(
    open_store: Callable[..., ProgramStore],
) -> None:
    step, shapes = Step(), tuple(StepShape(rows, rows, 1) for rows in (1, 2, 4, 8, 16))
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(step.started, open_store(), *shapes) for _ in range(2)]
        managers = [start.result() for start in starts]
    assert step.num_lowered == len(shapes)
    assert all(manager.has(shape) for manager in managers for shape in shapes)
    found = [set(manager.stats.from_cache) for manager in managers]
    assert not found[0] & found[1]
    assert found[0] | found[1] == {str(shape) for shape in shapes}


def test_what_others_made_between_the_look_and_the_claim_is_not_made_again(
    open_store: Callable[..., ProgramStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, late, claim = Step(), open_store(), ProgramStore.claim

    def claim_late(name: str) -> Any:
        if step.num_lowered == 0:
            assert step.started(open_store()).has(SHAPE)
        return claim(late, name)

    monkeypatch.setattr(late, "claim", claim_late)
    manager = step.started(late)
    assert step.num_lowered == 1
    assert step.is_done_by(manager.get(SHAPE))
    assert manager.stats.from_cache == {str(SHAPE)}
    freed = open_store().claim(str(SHAPE))
    assert freed is not None
    freed.release()


def test_who_fails_leaves_the_others_to_it(open_store: Callable[..., ProgramStore]) -> None:
    step = Step()

    def lower(shape: StepShape) -> Any:
        if shape == OTHER:
            raise ValueError("it cannot be lowered")
        return step.lower(shape)

    with pytest.raises(ValueError, match="cannot be lowered"):
        CompileManager(lower, store=open_store()).warm_up((SHAPE, OTHER))
    for shape in (SHAPE, OTHER):
        claim = open_store().claim(str(shape))
        assert claim is not None
        claim.release()
    assert step.started(open_store(), SHAPE, OTHER).has(OTHER)


def test_shapes_behind_are_shared_too(open_store: Callable[..., ProgramStore]) -> None:
    step, shapes = Step(), tuple(StepShape(rows, rows, 1) for rows in (1, 2, 4, 8, 16))
    managers = [CompileManager(step.lower, store=open_store()) for _ in range(2)]
    for manager in managers:
        manager.warm_up((), behind=shapes)
    for manager in managers:
        manager.wait()
    assert step.num_lowered == len(shapes)
    assert all(manager.has(shape) for manager in managers for shape in shapes)


def test_who_is_never_done_is_waited_for_no_longer_than_that(
    open_store: Callable[..., ProgramStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_manager, "CLAIM_WAIT_S", 0.2)
    claim = open_store().claim(str(SHAPE))
    assert claim is not None
    assert Step().started(open_store()).has(SHAPE)
    claim.release()
