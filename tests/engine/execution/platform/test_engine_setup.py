"""What an engine is on a kind of device is decided in one place, and serves every plan."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo.engine
from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform import engine_setup, kv_memory
from octavo.engine.execution.platform.engine_setup import EngineSetup, decide_setup
from octavo.engine.execution.platform.traits import CPU, TPU
from octavo.engine.execution.programs.program_maker import dump, load
from octavo.engine.execution.state import recurrent_bytes
from octavo.engine.execution.weights.weight_variants import WeightVariants
from octavo.engine.kv import state_snapshots
from octavo.models.config import ModelConfig
from octavo.models.flat_config import flat_config
from octavo.models.rope import Rope, RopeScaling
from octavo.sharding.mesh import make_mesh
from tests.engine import test_recurrent_layers

MODEL = flat_config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,  # native attention takes it
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
ASKERS = {
    "execution/platform/traits.py",
    "execution/programs/fingerprint.py",  # a CPU's instruction sets and cores
    "execution/programs/program_store.py",  # what a CPU's program is written down as
    "replicas/worker.py",  # before there is a mesh
}
"""Modules of the engine that compare a platform's name."""


def setup_of(platform: str = "cpu", model: ModelConfig = MODEL, **arguments: Any) -> EngineSetup:
    """The setup of an engine with these arguments on one CPU, which stands in for another platform
    whose traits are taken."""
    given = {"max_model_len": 512, "num_kv_pages": 64, **arguments}
    with pytest.MonkeyPatch.context() as patch:
        traits = CPU if platform == "cpu" else TPU
        patch.setattr(engine_setup, "traits_of", lambda mesh: traits)
        return decide_setup(
            EngineConfig(**given), model, jnp.dtype("float32"), make_mesh(1), WeightVariants()
        )


def test_the_model_is_that_of_the_context_that_is_served() -> None:
    stretched = RopeScaling(
        kind="longrope",
        original_max_position=512,
        factors=(1.0,) * 16,
        long_factors=(4.0,) * 16,
    )
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, rope=Rope(scaling=stretched)))
        for layer in MODEL.layers
    )
    for max_model_len, factor in ((512, 1.0), (513, 4.0)):
        model = setup_of(model=replace(MODEL, layers=layers), max_model_len=max_model_len).model
        [scaling] = {layer.mixer.rope.scaling for layer in model.layers}
        assert scaling == RopeScaling(kind="factors", factors=(factor,) * 16)
    assert setup_of().model == MODEL


@pytest.mark.parametrize(("affordable", "expected"), [(100, 16), (7, 7), (3, 4), (0, 4)])
def test_snapshots_are_as_many_as_rows_where_they_are_cheap(
    monkeypatch: pytest.MonkeyPatch, affordable: int, expected: int
) -> None:
    model = test_recurrent_layers.config_of("gated_delta")
    one = recurrent_bytes(model, 1)
    monkeypatch.setattr(state_snapshots, "DEFAULT_BYTES", affordable * one + one - 1)
    found = setup_of(model=model, max_num_seqs=16, enable_prefix_caching=True).limits
    assert found.num_snapshots == expected
    asked = setup_of(
        model=model, max_num_seqs=16, enable_prefix_caching=True, num_state_snapshots=2
    ).limits
    assert asked.num_snapshots == 2


def test_states_that_leave_no_room_for_pages_are_named() -> None:
    model = test_recurrent_layers.config_of("gated_delta")
    memory = {"num_kv_pages": None, "kv_cache_memory_bytes": recurrent_bytes(model, 9)}
    with pytest.raises(InvalidConfigError, match=r"kv_cache_memory_bytes.*num_state_snapshots"):
        setup_of(model=model, max_num_seqs=8, num_state_snapshots=8, **memory)
    assert setup_of(model=model, max_num_seqs=8, num_kv_pages=64, num_state_snapshots=8)


def test_a_platforms_name_is_compared_where_its_traits_are_given() -> None:
    folder, askers = Path(octavo.engine.__file__ or "").parent, set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {"cpu", "gpu", "tpu", "cuda"}
            if isinstance(node, ast.Compare) and any(
                isinstance(each, ast.Constant) and each.value in names
                for each in (node.left, *node.comparators)
            ):
                askers.add(str(path.relative_to(folder)))
    askers -= {each for each in askers if each in ("early_checks.py",)}  # before JAX is imported
    assert askers == ASKERS


def test_an_accelerator_has_greedy_programs_and_none_that_are_for_cpus() -> None:
    on_cpu, on_other = setup_of("cpu"), setup_of("tpu")
    assert on_cpu.lattice.variants == ("general",)
    assert on_other.lattice.variants == ("greedy", "general")
    assert any(shape.quick for shape in on_cpu.lattice.shapes)
    assert not any(shape.quick for shape in on_other.lattice.shapes)
    for setup, is_there in ((on_cpu, True), (on_other, False)):
        assert (12 in {shape.num_rows for shape in setup.lattice.decode}) == is_there
        assert (64 in {shape.num_tokens for shape in setup.lattice.mixed}) == is_there
    assert on_cpu.limits.has_dear_rows
    assert not on_other.limits.has_dear_rows
    assert on_cpu.limits.run_pages == 64 // on_cpu.limits.page_size
    assert on_other.limits.run_pages == 1


@given(
    platform=st.sampled_from(["cpu", "tpu"]),
    num_rows=st.integers(1, 300),
    num_tokens=st.none() | st.integers(1, 700),
    model_len=st.integers(17, 4096),
    block_size=st.sampled_from([None, 8, 16, 64]),
    warm_up=st.sampled_from(["full", "early", "few", "coarse"]),
    chunked=st.booleans(),
)
def test_programs_take_every_plan_within_the_limits(
    platform: str,
    num_rows: int,
    num_tokens: int | None,
    model_len: int,
    block_size: int | None,
    warm_up: Any,
    chunked: bool,
) -> None:
    if num_tokens is not None:
        num_tokens = max(num_tokens, num_rows)
    setup = setup_of(
        platform,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_tokens,
        max_model_len=model_len,
        block_size=block_size,
        warm_up=warm_up,
        enable_chunked_prefill=chunked,
    )
    limits, lattice = setup.limits, setup.lattice
    assert lattice.decode[-1].num_rows >= limits.max_num_seqs
    assert lattice.mixed[-1].num_tokens >= limits.max_num_batched_tokens
    assert lattice.mixed[-1].num_new_rows >= limits.max_prefill_rows
    assert setup.num_slots == num_rows >= limits.max_num_seqs
    assert limits.max_pages_per_seq * limits.page_size >= limits.max_model_len == model_len
    assert limits.token_edges[-1] >= limits.max_num_batched_tokens
    if not chunked:
        assert limits.max_num_batched_tokens >= model_len


def test_a_process_that_compiles_is_told_all_of_it() -> None:
    setup = setup_of()
    assert load(dump(setup)) == setup


@pytest.mark.parametrize("unread", [0, 1 << 30, 6 << 30, 20 << 30])
def test_weights_that_are_not_read_yet_leave_less_for_pages(
    monkeypatch: pytest.MonkeyPatch, unread: int
) -> None:
    free = 8 << 30
    monkeypatch.setattr(kv_memory, "available_memory_bytes", lambda: free)
    budget = kv_memory.kv_budget_bytes(EngineConfig(), make_mesh(1), unread, None)
    share = int(kv_memory.CPU_MEMORY_SHARE * max(0, free - unread))
    assert share / 2 <= budget <= min(share, kv_memory.CPU_KV_BYTES)
    asked = EngineConfig(kv_cache_memory_bytes=12_345)
    assert kv_memory.kv_budget_bytes(asked, make_mesh(1), unread, None) == 12_345
