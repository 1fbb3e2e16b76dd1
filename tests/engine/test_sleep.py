"""An engine that sleeps gives its memory back, and says the same when it is woken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo import LLM, AsleepError, InvalidRequestError, SamplingParams
from octavo.engine.execution.weights.put_away import PutAway, put_away, put_back

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Any) -> Iterator[LLM]:
    llm = LLM(
        str(tiny_model), progress=False, max_num_seqs=8, max_num_batched_tokens=64,
        fail_on_compile=True, warm_up="coarse", host_kv_memory_bytes=1 << 20,
    )  # fmt: skip
    yield llm
    llm.engine.check_integrity()
    llm.close()


def texts(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(["x" * 60, "hello"], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def held_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("level", [1, 2])
def test_texts_are_the_same_before_and_after(llm: LLM, level: int) -> None:
    before, before_bytes = texts(llm), held_bytes()
    assert not llm.is_sleeping()
    llm.sleep(level)
    assert llm.is_sleeping()
    state = llm.engine.executor._layout.abstract()
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    weights = llm.engine.executor.weights.abstract["plain"]
    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    given_back = pool_bytes + (level == 2) * weight_bytes
    assert before_bytes - held_bytes() >= given_back
    llm.sleep(level)  # it does already
    with pytest.raises(AsleepError, match="wake_up"):
        texts(llm)
    assert llm.engine.load().num_running == 0
    llm.wake_up()
    llm.wake_up()
    assert not llm.is_sleeping()
    assert texts(llm) == before
    llm.engine.check_integrity()


def test_no_prefix_outlives_the_pages_that_held_it(llm: LLM) -> None:
    texts(llm)
    llm.sleep()
    llm.wake_up()
    [output] = llm.generate("x" * 60, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_weights_that_lay_on_a_device_come_back_to_it(llm: LLM) -> None:
    before = texts(llm)
    weights = llm.engine.executor.weights
    weights.release(keep=True)
    assert not weights._trees
    weights.restore()
    assert texts(llm) == before


def test_an_array_in_several_places_is_kept_once() -> None:
    shared = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    kept = put_away({"a": shared, "b": [shared, jnp.ones(2)], "none": None})
    assert isinstance(kept["a"], PutAway)
    assert kept["a"] is kept["b"][0]
    back = put_back(kept)
    assert back["a"] is back["b"][0]
    assert back["none"] is None
    assert back["a"].sharding == shared.sharding
    np.testing.assert_array_equal(back["a"], shared)


def test_what_cannot_sleep_is_refused_by_name(llm: LLM) -> None:
    for level in (0, 3, True):
        with pytest.raises(InvalidRequestError, match="level"):
            llm.sleep(level)
    with pytest.raises(InvalidRequestError, match="tags"):
        llm.wake_up(tags=["weights"])
    engine = llm.engine
    engine.submit(engine.inputs.process("busy", "x", GREEDY, now_s=engine.clock.now_s()))
    with pytest.raises(InvalidRequestError, match="no request is under way"):
        llm.sleep()
    while engine.has_unfinished:
        engine.step()
    assert not llm.is_sleeping()
