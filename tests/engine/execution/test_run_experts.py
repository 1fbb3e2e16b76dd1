"""Experts over several devices: the same sums, and no weight travels."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from octavo.engine.execution.run_experts import experts_over_mesh
from octavo.pallas_kernels.quantized_linear import quantize_weight
from octavo.pallas_kernels.routed_experts import ExpertWeights, routed_experts
from octavo.sharding.mesh import make_mesh
from octavo.sharding.rules import DEFAULT_RULES

CHOSEN, HIDDEN = 2, 16
SIZES = {
    "whole experts": (9, 8, 24),
    "one row": (1, 32, 16),
    "parts of each": (9, 6, 24),
    "nothing divides": (9, 3, 10),
}
"""Tokens, experts and their width, over four devices."""


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def case(num_tokens: int, num_experts: int, width: int, has_bias: bool = True) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    biases = {
        "gate_bias": normal(num_experts, width),
        "up_bias": normal(num_experts, width),
        "down_bias": normal(num_experts, HIDDEN),
    }
    weights = ExpertWeights(
        gate=normal(num_experts, HIDDEN, width),
        up=normal(num_experts, HIDDEN, width),
        down=normal(num_experts, width, HIDDEN),
        **(biases if has_bias else {}),
    )
    chosen = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :CHOSEN]
    chosen, live = chosen.astype(np.int32), np.arange(num_tokens) % 4 != 1
    share = rng.random(chosen.shape).astype(np.float32)
    return live, normal(num_tokens, HIDDEN), jnp.asarray(chosen), jnp.asarray(share), weights


def over(num_devices: int, weights: ExpertWeights) -> tuple[Any, ExpertWeights]:
    """The function for a mesh, and the weights on it."""
    mesh = make_mesh(num_devices)
    placed = weights.map_axes(
        lambda leaf, axes: jax.device_put(leaf, DEFAULT_RULES.sharding(mesh, axes, leaf.shape))
    )
    return jax.jit(partial(experts_over_mesh(mesh, "tiles"), gate=gated)), placed


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_any_number_of_devices_gives_the_same_sums(sizes: str, num_devices: int) -> None:
    live, x, chosen, share, weights = case(*SIZES[sizes])
    want = np.array(routed_experts(x, chosen, share, weights, gated, "reference"))
    want[~live] = 0.0
    run, placed = over(num_devices, weights)
    got = run(live, x, chosen, share, placed)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    is_split = not jax.tree.leaves(placed)[0].sharding.is_fully_replicated
    assert is_split == (num_devices > 1 and (sizes, num_devices) != ("nothing divides", 4))


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_whole_experts_of_eight_bits_are_those_of_one_device(quantization: str) -> None:
    live, x, chosen, share, plain = case(*SIZES["whole experts"], has_bias=False)
    rounded = jax.vmap(partial(quantize_weight, quantization=quantization, num_inputs=1))
    weights = ExpertWeights(
        gate=rounded(plain.gate), up=rounded(plain.up), down=rounded(plain.down)
    )
    got = []
    for num_devices in (1, 4):
        run, placed = over(num_devices, weights)
        got.append(run(live, x, chosen, share, placed))
    np.testing.assert_allclose(got[0], got[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("sizes", ["whole experts", "parts of each"])
def test_only_sums_travel(sizes: str) -> None:
    live, x, chosen, share, weights = case(*SIZES[sizes])
    run, placed = over(4, weights)
    mesh = make_mesh(4)
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), (live, x, chosen, share)
    )
    text = run.lower(*args, placed).compile().as_text()
    assert "all-reduce" in text
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert moved not in text
