"""Engines with eight-bit weights and eight-bit KV, end to end on the tiny model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform.engine_setup import decide_setup
from octavo.engine.execution.state import StateLayout, kv_bytes_per_token
from octavo.engine.execution.weights.weight_variants import WeightVariants
from octavo.engine.sampling_params import SamplingParams
from octavo.models.flat_config import flat_config
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import KV_DTYPES, stored_dtype
from octavo.sharding.mesh import make_mesh

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, prompt_logprobs=1)
SMALL_LOSS = {"int8": 0.5, "fp8": 2.0}
"""Nats by which the log-probability of a prompt's token may move in the mean. The tiny model's
logits have a spread of about 8 (its head is drawn that wide), and its attention is sharp: int8
moves them by 1/25 of that, fp8 by 1/6. A scale that is missing or another's moves them by all."""


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(16, 272) for _ in range(rng.randrange(2, 100))] for _ in range(8)]


def generate(llm: Any) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens, and log-probabilities of the prompts' tokens."""
    outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
    scores = [
        row[token].logprob
        for output in outputs
        for token, row in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if row is not None
    ]
    return [output.outputs[0].token_ids for output in outputs], scores


@pytest.fixture(scope="module", params=["tiny_model", "tiny_latents"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def whole(model: str) -> tuple[list[list[int]], list[float]]:
    from octavo import LLM

    llm = LLM(
        model,
        progress=False,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        warm_up="coarse",
    )
    found = generate(llm)
    llm.close()
    return found


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, "fp8"),
        ({"quantization": "int8", "kv_cache_dtype": "int8", "tensor_parallel_size": 2}, "int8"),
    ],
    ids=["fp8", "int8 on two devices"],
)
def test_a_quantized_engine_says_nearly_what_the_whole_one_says(
    make_llm: Callable[..., Any],
    model: str,
    whole: tuple[list[list[int]], list[float]],
    changes: dict[str, Any],
    kind: str,
) -> None:
    llm = make_llm(model=model, warm_up="coarse", **changes)
    tokens, scores = generate(llm)
    moved = [abs(a - b) for a, b in zip(scores, whole[1], strict=True)]
    assert 0 < math.fsum(moved) / len(moved) < SMALL_LOSS[kind]
    assert [len(row) for row in tokens] == [24] * 8
    assert generate(llm)[0] == tokens  # from the prefix cache's pages too
    pool = llm.engine.executor._state.kv[0].pages
    assert pool.dtype == stored_dtype(KV_DTYPES[changes["kv_cache_dtype"]])


def test_narrow_pages_swap_as_they_are(make_llm: Callable[..., Any]) -> None:
    llm = make_llm(
        kv_cache_dtype="int8",
        block_size=8,
        num_kv_pages=40,
        host_kv_memory_bytes=1 << 20,
        enable_prefix_caching=False,
        warm_up="coarse",
    )
    alone = [llm.generate([ids], PARAMS, use_tqdm=False)[0].outputs[0] for ids in prompts()]
    assert llm.engine.load().num_preemptions == 0
    assert generate(llm)[0] == [output.token_ids for output in alone]
    assert llm.engine.load().num_preemptions > 0


def test_the_pool_holds_as_many_pages_as_its_bytes_say() -> None:
    budget, mesh, sizes = 3_000_000, make_mesh(1), {}
    model = flat_config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    for name in ("float32", "bfloat16", "int8", "fp8"):
        config = EngineConfig(
            kv_cache_dtype=name, kv_cache_memory_bytes=budget, max_num_seqs=64, max_model_len=2048
        )
        size = decide_setup(config, model, jnp.dtype("float32"), mesh, WeightVariants())
        layout = StateLayout(
            config=model,
            mesh=mesh,
            num_slots=64,
            num_pages=size.limits.num_pages,
            page_size=size.limits.page_size,
            table_pages=8,
            dtype=size.kv_dtype,
        )
        pools = jax.tree.leaves(layout.abstract().kv)
        held = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools)
        page = size.limits.page_size * kv_bytes_per_token(model, KV_DTYPES[name])
        assert held == size.limits.num_pages * page
        assert budget - page < held <= budget
        sizes[name] = size.limits.num_pages
    assert sizes["int8"] == sizes["fp8"] > sizes["bfloat16"] > sizes["float32"]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("quantization", "int4", "none or int8 or fp8"),
        ("quantization", "INT8", "none or int8 or fp8"),
        ("kv_cache_dtype", "float16", "auto or float32 or bfloat16 or int8 or fp8 or fp8_e4m3"),
        ("kv_cache_dtype", "fp8_e5m2", "auto or float32 or bfloat16 or int8 or fp8 or fp8_e4m3"),
        ("kv_cache_dtype", "", "auto or float32 or bfloat16 or int8 or fp8 or fp8_e4m3"),
    ],
)
def test_unknown_values_are_refused(field: str, value: str, allowed: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"{field} = '{value}'.*{allowed}"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_another_engines_name_of_fp8_is_fp8() -> None:
    assert EngineConfig(kv_cache_dtype="fp8_e4m3") == EngineConfig(kv_cache_dtype="fp8")
