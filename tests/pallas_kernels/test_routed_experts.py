"""Routed experts: every way gives what a plain loop over tokens gives, whatever is chosen."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.pallas_kernels.compat import has_mosaic_gpu_kernels
from octavo.pallas_kernels.cpu.native_expert_row import row_by_expert
from octavo.pallas_kernels.cpu.native_int8_linear import NativeInt8Weight
from octavo.pallas_kernels.quantized_linear import QUANTIZATIONS, quantize_weight
from octavo.pallas_kernels.routed_experts import (
    ExpertWeights,
    backend_for,
    routed_experts,
    self_check,
    tiles,
)
from octavo.pallas_kernels.routed_experts.tiles import MAX_TILE, tile_rows, tiled_experts

HIDDEN, WIDTH, EXPERTS = 16, 32, 8
SIZES = ((1, 2), (7, 3), (40, 2))
"""Tokens and choices of each: tiles of one row, of four, and of several where they are many."""
TOLERANCE = 2e-5
"""Of float32 sums of some dozen products of order 1."""


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


@cache
def weights(has_bias: bool = True) -> ExpertWeights:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    biases = {
        "gate_bias": normal(EXPERTS, WIDTH),
        "up_bias": normal(EXPERTS, WIDTH),
        "down_bias": normal(EXPERTS, HIDDEN),
    }
    return ExpertWeights(
        gate=normal(EXPERTS, HIDDEN, WIDTH),
        up=normal(EXPERTS, HIDDEN, WIDTH),
        down=normal(EXPERTS, WIDTH, HIDDEN),
        **(biases if has_bias else {}),
    )


def token_by_token(x: np.ndarray, chosen: np.ndarray, share: np.ndarray) -> np.ndarray:
    """In float64."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights())
    out = np.zeros(x.shape, np.float64)
    for token, experts in enumerate(chosen):
        for expert, weight in zip(experts, share[token], strict=True):
            if not 0 <= expert < EXPERTS:
                continue
            gate = x[token] @ w.gate[expert] + w.gate_bias[expert]
            up = x[token] @ w.up[expert] + w.up_bias[expert]
            hidden = gate / (1 + np.exp(-gate)) * up
            out[token] += weight * (hidden @ w.down[expert] + w.down_bias[expert])
    return out


@cache
def compiled(way: str):  # type: ignore[no-untyped-def]
    if way.startswith("tiles of "):
        return jax.jit(partial(tiled_experts, gated=gated, rows=int(way.split()[-1])))
    return jax.jit(partial(routed_experts, gated=gated, backend=way))


WAYS = ("reference", "ragged", "tiles", "tiles of 1", "tiles of 2", "tiles of 8")


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choices of few or many experts, evenly or all alike, some of which count nothing."""
    num_tokens, num_chosen = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    in_use = draw(st.integers(num_chosen, EXPERTS))
    odds = rng.dirichlet(np.full(in_use, draw(st.sampled_from([0.05, 1.0, 100.0]))))
    ranks = np.log(odds + 1e-12) + rng.gumbel(size=(num_tokens, in_use))
    chosen = np.argsort(-ranks, axis=1)[:, :num_chosen].astype(np.int32)
    nothing = draw(st.sampled_from([0.0, 0.3, 1.0]))
    dead = rng.random(chosen.shape) < nothing
    chosen = np.where(dead, rng.choice([-1, EXPERTS, EXPERTS + 5], chosen.shape), chosen)
    x = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    return x, chosen.astype(np.int32), rng.random(chosen.shape).astype(np.float32)


@pytest.mark.parametrize("way", WAYS)
@given(case=cases())
def test_every_way_is_a_loop_over_tokens(
    way: str, case: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    got = compiled(way)(*case, weights())
    np.testing.assert_allclose(got, token_by_token(*case), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("experts", [[3], [0], [7], [1, 6]], ids=str)
def test_all_tokens_may_choose_the_same_experts(way: str, experts: list[int]) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40, HIDDEN)).astype(np.float32)
    chosen = np.tile(np.array([*experts, -1][:2], np.int32), (40, 1))
    share = rng.random(chosen.shape).astype(np.float32)
    got = compiled(way)(x, chosen, share, weights())
    np.testing.assert_allclose(got, token_by_token(x, chosen, share), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_counts_nothing_may_hold_anything(way: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((7, HIDDEN)).astype(np.float32)
    chosen = np.array([[0, 1, 2]] * 7, np.int32)
    share = np.ones((7, 3), np.float32)
    want = np.array(compiled(way)(x, chosen, share, weights()))
    chosen[[2, 6]], x[2], x[6], share[2] = -1, np.nan, np.inf, np.nan
    want[[2, 6]] = 0.0
    np.testing.assert_array_equal(compiled(way)(x, chosen, share, weights()), want)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_is_no_number_spoils_no_other(way: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, HIDDEN)).astype(np.float32)
    chosen = np.array([[1, 5]] * 40, np.int32)
    share = rng.random(chosen.shape).astype(np.float32)
    want = np.array(compiled(way)(x, chosen, share, weights()))
    x[11], want[11] = np.nan, np.nan
    np.testing.assert_array_equal(compiled(way)(x, chosen, share, weights()), want)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("way", ["ragged", "tiles", "tiles of 1"])
def test_eight_bits_are_rounded_as_those_of_any_linear_layer(way: str, quantization: str) -> None:
    plain = weights(has_bias=False)
    rounded = jax.vmap(partial(quantize_weight, quantization=quantization, num_inputs=1))
    small = ExpertWeights(gate=rounded(plain.gate), up=rounded(plain.up), down=rounded(plain.down))
    rng = np.random.default_rng(4)
    x = rng.standard_normal((7, HIDDEN)).astype(np.float32)
    chosen = np.array(
        [[0, 1, 2], [2, 3, 7], [4, 2, 0], [-1, -1, -1], [2, 6, 1], [0, 8, 1], [5, 4, 3]]
    )
    case = x, chosen.astype(np.int32), rng.random(chosen.shape).astype(np.float32)
    want = compiled("reference")(*case, small)
    np.testing.assert_allclose(compiled(way)(*case, small), want, rtol=0, atol=TOLERANCE)
    # An expert's hidden row is rounded once more; where, and to what, the reference says.
    assert np.abs(want - compiled("reference")(*case, plain)).max() > 0


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_native_int8_products_are_those_of_any_other(num_tokens: int) -> None:
    rng = np.random.default_rng(8)
    rounded = jax.vmap(partial(quantize_weight, quantization="int8", num_inputs=1))
    # Of 32 inputs, which native products take side by side.
    stacks = {
        name: rounded(jnp.asarray(rng.standard_normal((EXPERTS, 32, 32)), jnp.float32))
        for name in ("gate", "up", "down")
    }
    native = {name: NativeInt8Weight(weight=stack) for name, stack in stacks.items()}
    x = rng.standard_normal((num_tokens, 32)).astype(np.float32)
    chosen = np.argsort(rng.random((num_tokens, EXPERTS)), axis=1)[:, :2].astype(np.int32)
    case = x, chosen, np.full(chosen.shape, 0.5, np.float32)
    want = compiled("tiles")(*case, ExpertWeights(**stacks))
    got = compiled("tiles of 1")(*case, ExpertWeights(**native))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", ["ragged", "tiles"])
def test_bfloat16_comes_out_as_it_went_in(way: str) -> None:
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights())
    rng = np.random.default_rng(5)
    x = rng.standard_normal((7, HIDDEN)).astype(np.float32)
    chosen, share = np.array([[0, 3, 6]] * 7, np.int32), np.full((7, 3), 0.5, np.float32)
    got = compiled(way)(jnp.asarray(x, jnp.bfloat16), chosen, share, small)
    assert got.dtype == jnp.bfloat16
    want = token_by_token(x, chosen, share)
    # Eight bits of every product's operands and result.
    assert np.abs(np.asarray(got, np.float32) - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("num_inputs", [256, 250, 257])
def test_large_weights_are_copied_part_by_part(
    num_inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

    large = ExpertWeights(
        gate=normal(3, num_inputs, 512),
        up=normal(3, num_inputs, 512),
        down=normal(3, 512, num_inputs),
    )
    x, share = normal(5, num_inputs), np.full((5, 1), 0.5, np.float32)
    case = x, np.array([[0], [2], [2], [-1], [0]], np.int32), share, large
    monkeypatch.setattr(tiles, "PART_BYTES", 64 * 512 * 4)
    program = jax.jit(partial(tiled_experts, gated=gated, rows=2)).lower(*case).compile()
    want = routed_experts(*case, gated, "reference")
    np.testing.assert_allclose(program(*case), want, rtol=0, atol=TOLERANCE)
    is_copied_whole = program.memory_analysis().temp_size_in_bytes > 2 * large.gate[0].nbytes
    assert is_copied_whole == (num_inputs == 257)  # a prime, of which there are no parts


def test_one_row_reads_its_expert_where_it_lies() -> None:
    rng = np.random.default_rng(6)
    stack = jnp.asarray(rng.standard_normal((3, 256, 512)), jnp.float32)
    x = jnp.asarray(rng.standard_normal(256), jnp.float32)
    program = jax.jit(row_by_expert).lower(x, stack, jnp.int32(0)).compile()
    for expert in range(3):
        want = np.asarray(x, np.float64) @ np.asarray(stack[expert], np.float64)
        np.testing.assert_allclose(program(x, stack, jnp.int32(expert)), want, atol=1e-3)
    assert program.memory_analysis().temp_size_in_bytes < stack[0].nbytes / 10


def test_a_tile_holds_an_average_experts_rows_and_is_not_large() -> None:
    for num_choices, num_experts in [(8, 64), (64, 64), (1024, 64), (16384, 64), (4, 4), (9, 1)]:
        average = num_choices / num_experts
        for is_copied in (False, True):
            rows = tile_rows(num_choices, num_experts, is_copied)
            assert rows <= MAX_TILE
            assert rows >= min(average / 1.5, MAX_TILE)
            assert rows < 4 * max(average, 8)
        assert tile_rows(num_choices, num_experts) <= rows


def test_a_cpu_has_tiles_and_other_devices_ragged_products() -> None:
    kinds = (("cpu", "cpu"), ("tpu", "TPU v6 lite"), ("gpu", "NVIDIA A100-SXM4-40GB"))
    assert [backend_for(*kind) for kind in kinds] == ["tiles", "ragged", "ragged"]
    hopper = backend_for("gpu", "NVIDIA H200")
    assert hopper == ("mosaic_gpu" if has_mosaic_gpu_kernels() else "ragged")


@pytest.mark.parametrize(
    ("x", "chosen", "share"),
    [
        ((3, HIDDEN), (3,), (3,)),
        ((3, HIDDEN), (4, 2), (4, 2)),
        ((3, HIDDEN), (3, 2), (3, 1)),
        ((3, 1, HIDDEN), (3, 2), (3, 2)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x: object, chosen: object, share: object) -> None:
    arrays = (jnp.zeros(x), jnp.zeros(chosen, jnp.int32), jnp.zeros(share))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"want \[T, E\] and twice \[T, K\]"):
        routed_experts(*arrays, weights(), gated, "tiles")


@pytest.mark.parametrize(
    ("hidden", "width", "has_biases"), [(64, 48, False), (200, 136, True)], ids=["plain", "biases"]
)
def test_the_check_finds_a_kernel_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, hidden: int, width: int, has_biases: bool
) -> None:
    right = self_check.routed_experts
    biases = {"has_biases": has_biases}
    assert self_check.check_experts("tiles", hidden, width, gated, **biases) is None

    def wrong(*args: object, backend: str, factor: float, **rest: object) -> jax.Array:
        out = right(*args, backend=backend, **rest)  # type: ignore[arg-type]
        # One token's, and of a step of many tokens alone.
        return out.at[-1].multiply(factor) if backend == "tiles" and len(out) > 64 else out

    for factor in (1.1, float("nan")):
        monkeypatch.setattr(self_check, "routed_experts", partial(wrong, factor=factor))
        assert self_check.check_experts("tiles", hidden, width, gated, **biases) is not None
