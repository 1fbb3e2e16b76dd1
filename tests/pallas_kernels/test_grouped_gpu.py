"""Hopper's routed experts agree with the plain reference, run in Pallas' interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.blocks.experts import Gate
from octavo.pallas_kernels.compat import interprets_mosaic_gpu
from octavo.pallas_kernels.routed_experts import ExpertWeights, routed_experts
from octavo.pallas_kernels.routed_experts.reference import routed_experts_reference

pytestmark = pytest.mark.skipif(
    not interprets_mosaic_gpu(), reason="JAX 0.12 is the first to interpret all of these kernels"
)

# Gates times ups, and outputs, are rounded to bfloat16's 8 bits of mantissa.
TOLERANCE = 2e-2


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, so that each takes several items and its stages turn over."""
    from octavo.pallas_kernels.routed_experts import grouped_gpu

    monkeypatch.setattr(grouped_gpu, "num_multiprocessors", lambda device: 3)


def make(num: int, hidden: int, width: int, has_bias: bool) -> ExpertWeights:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.bfloat16)

    biases = {
        "gate_bias": normal(num, width),
        "up_bias": normal(num, width),
        "down_bias": normal(num, hidden),
    }
    stacks = {"gate": normal(num, hidden, width), "up": normal(num, hidden, width)}
    stacks |= {"down": normal(num, width, hidden)}
    return ExpertWeights(**stacks, **(biases if has_bias else {}))


@pytest.mark.parametrize(
    ("num", "hidden", "width", "tokens", "num_chosen", "odds", "gate", "has_bias"),
    [
        # Few rows an expert: the warpgroups share columns. Outputs end within a block of columns.
        (8, 200, 136, 5, 2, "even", Gate("silu"), True),
        (8, 256, 128, 1, 3, "even", Gate("gelu_tanh"), False),
        # Rows of several tiles, tiles that end within, experts without rows, choices of nobody.
        (3, 128, 64, 150, 2, "skewed", Gate("silu", 7.0), False),
        (4, 64, 192, 200, 2, "dead", Gate("silu"), False),
        (4, 64, 64, 140, 2, "two", Gate("silu", 7.0), True),
    ],
)
def test_it_is_the_reference(
    num: int,
    hidden: int,
    width: int,
    tokens: int,
    num_chosen: int,
    odds: str,
    gate: Gate,
    has_bias: bool,
) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from octavo.pallas_kernels.routed_experts.grouped_gpu import grouped_experts

    rng = np.random.default_rng(1)
    weights = make(num, hidden, width, has_bias)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    likely = {"skewed": 1 / np.arange(1, num + 1) ** 2, "two": np.where(np.arange(num) < 2, 1, 0)}
    ranks = np.log(likely.get(odds, np.ones(num)) + 1e-9) + rng.gumbel(size=(tokens, num))
    chosen = np.argsort(-ranks, axis=1)[:, :num_chosen].astype(np.int32)
    if odds == "dead":
        chosen[rng.random(chosen.shape) < 0.4] = -1
        chosen[0], chosen[1] = num, num + 5
    share = rng.random(chosen.shape).astype(np.float32)
    got = grouped_experts(x, chosen, share, weights, gate, interpret=plgpu.InterpretGPUParams())
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    want = routed_experts_reference(x.astype(jnp.float32), chosen, share, exact, gate)
    assert got.dtype == x.dtype
    most = max(1.0, float(jnp.abs(want).max()))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=TOLERANCE * most)


def test_what_the_kernel_does_not_take_goes_the_ragged_way() -> None:
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), make(4, 64, 64, True))
    x = jax.random.normal(jax.random.key(0), (6, 64))
    chosen, share = jnp.tile(jnp.array([[0, 3]]), (6, 1)), jnp.ones((6, 2))
    ways = [
        routed_experts(x, chosen, share, weights, Gate("silu"), way)
        for way in ("mosaic_gpu", "ragged")
    ]
    np.testing.assert_array_equal(*ways)
