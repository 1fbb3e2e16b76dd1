"""One process that is two hosts: followers do what devices are told, and skews are found."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from octavo.engine.errors import HostLostError, HostsDivergedError
from octavo.engine.hosts.host_executor import digest_rows
from octavo.engine.hosts.leader import LOST_STATUS
from octavo.engine.hosts.messages import Message
from tests.engine.families import FAMILIES, write_family
from tests.engine.hosts.pair import Pair
from tests.engine.hosts.work import serve_all, swap_always
from tests.waiting import until

TIGHT = {"num_kv_pages": 30, "host_kv_memory_bytes": 4 << 20, "scheduling_policy": "priority"}
"""A pool that eight sequences outgrow."""


def rows_of(executor: Any) -> list[np.ndarray]:
    return [np.asarray(array) for array in executor._rows()]


def test_followers_do_what_devices_are_told(
    tiny_model: Path, make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_always(monkeypatch)
    undisturbed = serve_all(make_llm(num_kv_pages=200).engine)
    pair = Pair(tiny_model, **TIGHT)
    assert serve_all(pair.engine, fail_at=9) == undisturbed
    load = pair.engine.scheduler.load()
    assert load.num_swaps > 0
    assert load.prefix_hit_tokens > 0
    assert pair.engine.core.recovery.num_recoveries == 1
    for level in (1, 2):
        pair.engine.sleep(level)
        pair.engine.wake_up()
        assert serve_all(pair.engine) == undisturbed
    leading = pair.engine.executor
    pair.close()  # the follower has done all by then
    for ours, theirs in zip(rows_of(leading), rows_of(pair.follower), strict=True):
        np.testing.assert_array_equal(theirs, ours)
    pages = zip(jax.tree.leaves(leading._state), jax.tree.leaves(pair.follower._state), strict=True)
    for ours, theirs in pages:
        np.testing.assert_array_equal(np.asarray(theirs), np.asarray(ours))
    assert pair.ended in ([], [("follower", 0)])


@pytest.mark.parametrize("family", FAMILIES)
def test_followers_of_every_kind_of_cache_do_the_same(
    family: str, tmp_path: Path, tiny_model: Path, make_llm: Callable[..., Any]
) -> None:
    model = write_family(family, tmp_path, tiny_model)
    undisturbed = serve_all(make_llm(model=str(model), num_kv_pages=200).engine)
    pair = Pair(model)
    assert serve_all(pair.engine) == undisturbed
    assert serve_all(pair.engine, fail_at=9) == undisturbed  # from pages and snapshots
    assert pair.engine.scheduler.load().prefix_hit_tokens > 0
    assert pair.engine.core.recovery.num_recoveries == 1
    leading = pair.engine.executor
    pair.close()
    states = jax.tree.leaves(leading._state), jax.tree.leaves(pair.follower._state)
    for ours, theirs in zip(*states, strict=True):
        np.testing.assert_array_equal(np.asarray(theirs), np.asarray(ours))


def test_a_program_is_used_when_all_hosts_have_it(tiny_model: Path) -> None:
    pair = Pair(tiny_model, warm_up="early", max_num_seqs=4, max_num_batched_tokens=32)
    leading = pair.engine.executor
    pair.engine.wait_until_compiled()
    fine = leading.awaited("early")[1]
    until_s = time.monotonic() + 60
    while not all(map(leading.programs.has, fine)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert all(map(leading.programs.has, fine))
    assert all(map(pair.follower.programs.has, fine))
    pair.leader._has_program[leading.shape_numbers[fine[0]]].clear()
    assert not leading.programs.has(fine[0])
    pair.submit("a", list(range(30, 50)))
    serve(pair.engine)
    pair.close()


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Pair]:
    pair = Pair(tiny_model)
    yield pair
    pair.begin_anew()
    pair.close()


def serve(engine: Any) -> None:
    """Until nothing is left to do."""
    while engine.has_unfinished:
        engine.step()


def later_rows(executor: Any, rng: random.Random) -> None:
    """The rows' state as if this host had computed more."""
    state = executor._state
    field = rng.choice(["num_computed_tokens", "last_token"])
    object.__setattr__(state, field, getattr(state, field).at[:-1].add(1))


def skip_step(executor: Any, rng: random.Random) -> None:
    """A step is computed twice: this host is a turn ahead."""
    whole = executor.run_step

    def run_step(shape: Any, vector: Any) -> Any:
        del executor.run_step
        executor.run_step(shape, vector)
        return whole(shape, vector)

    executor.run_step = run_step


def other_vector(executor: Any, rng: random.Random) -> None:
    """A number of a step's input is another."""
    whole = executor.run_step

    def run_step(shape: Any, vector: Any) -> Any:
        del executor.run_step
        vector = vector.copy()
        vector[rng.randrange(3, 3 + shape.num_rows)] ^= 1
        return whole(shape, vector)

    executor.run_step = run_step


def other_pages(executor: Any, rng: random.Random) -> None:
    """A row reads another row's pages."""
    state = executor._state
    object.__setattr__(state, "block_table", state.block_table.at[:, :-1, 0].add(1))


SKEWS = (later_rows, skip_step, other_vector, other_pages)


@pytest.mark.parametrize("skew", SKEWS, ids=lambda skew: skew.__name__)
def test_a_skew_is_an_error_within_eight_steps(pair: Pair, skew: Any) -> None:
    for seed in range(25 if os.environ.get("OCTAVO_MULTIHOST") else 6):
        rng = random.Random(seed)
        pair.begin_anew()
        steps = skewed_steps(pair, skew, rng)
        assert steps <= 8, f"{skew.__name__}, seed {seed}: after {steps} steps"


def skewed_steps(pair: Pair, skew: Any, rng: random.Random) -> int:
    """Skews the follower after some steps; how many more the leader takes in before it knows."""
    for index in range(4):
        name = f"{rng.random()}"
        pair.submit(name, [rng.randrange(16, 272) for _ in range(9 + index)], max_tokens=100)
    for _ in range(rng.randrange(4, 12)):
        pair.engine.step()
    # The follower's next command is done askew, between two others.
    done = threading.Event()
    whole = pair.loop._do

    def do(message: Message) -> None:
        if message.kind.name == "STEP" and not done.is_set():
            skew(pair.follower, rng)
            done.set()
        whole(message)

    pair.loop._do = do  # type: ignore[method-assign]
    first = pair.engine.executor.launched.num_steps + 1
    taken: list[int] = []
    check = pair.leader.check

    def checked(trail: Any) -> None:
        taken.append(trail.num_steps)
        check(trail)

    pair.leader.check = checked  # type: ignore[method-assign]
    with pytest.raises(HostsDivergedError, match="host 1 computed another step"):
        serve(pair.engine)
    assert done.is_set()
    assert isinstance(pair.leader.error, HostsDivergedError)
    return taken[-1] - first + 1


def test_a_follower_that_fails_alone_ends_the_group(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_timeout_s", 1.0)
    pair.begin_anew()

    def broken(shape: Any, vector: Any) -> Any:
        raise OSError("no device")

    pair.follower.run_step = broken  # type: ignore[method-assign]
    pair.submit("alone", list(range(20, 60)), max_tokens=100)
    with pytest.raises(HostLostError, match="failed and the leader did not: OSError: no device"):
        serve(pair.engine)
    del pair.follower.run_step
    until(lambda: ("leader", LOST_STATUS) in pair.ended)


def test_a_lost_connection_ends_both_sides_and_listeners_are_told(pair: Pair) -> None:
    pair.begin_anew()
    told: list[Exception] = []
    pair.leader.listeners.append(told.append)
    for link in pair.links:
        link.close()
    until(lambda: len(pair.ended) == 2)
    assert sorted(pair.ended) == [("follower", LOST_STATUS), ("leader", LOST_STATUS)]
    assert isinstance(told[0], HostLostError)
    with pytest.raises(HostLostError, match="host 1 is lost"):
        pair.leader.write(Message(1))  # type: ignore[arg-type]


def test_hosts_that_wait_for_each_other_for_ever_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_timeout_s", 1.0)
    pair.begin_anew()
    pair.leader._step_s = 0.3
    with pair.leader.waiting():
        until(lambda: ("leader", LOST_STATUS) in pair.ended)
    assert "have been in one step" in str(pair.leader.error)


def test_the_digest_of_rows_counts_places_and_leaves_out_the_trash_row() -> None:
    table, row = np.arange(24, dtype=np.int32).reshape(2, 4, 3), np.arange(4, dtype=np.int32)
    arrays = [table, row, row > 1, row.astype(np.float32)]
    digest = jax.jit(digest_rows)
    found = int(digest(tuple(arrays)))
    for index in range(len(arrays)):
        changed = [array.copy() for array in arrays]
        changed[index][(0, 1, 2)[: changed[index].ndim]] = arrays[index].reshape(-1)[-1]
        assert int(digest(tuple(changed))) != found, index
    assert int(digest((table[:, [1, 0, 2, 3]], *arrays[1:]))) != found
    trash = [array.copy() for array in arrays]
    trash[0][:, -1] = 7
    for array in trash[1:]:
        array[-1] = 0
    assert int(digest(tuple(trash))) == found
