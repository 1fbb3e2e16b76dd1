"""Block-quantized linear layers: every layout and shape multiplies as the plain reference does."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.cpu.block_quantized_linear import (
    COMPILER_OPTIONS,
    BlockQuantizedWeight,
    PanelWeight,
    abstract_block_quantized,
    block_quantized_linear,
    block_quantized_linear_reference,
    dequantized,
    lay_out_blocks,
    make_panels,
)
from octavo.pallas_kernels.cpu.block_quantized_linear import weight as weight_module
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType, common_type

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
TYPES = {
    "nibbles": BlockType(codes=32, nibbles=True, scale_dtype=F16, minimum_dtype=F16),
    "nibbles, wide scales": BlockType(codes=32, nibbles=True, scale_dtype=F32, minimum_dtype=F32),
    "bytes": BlockType(codes=32, nibbles=False, scale_dtype=F16, minimum_dtype=None),
    "bytes with a minimum": BlockType(codes=32, nibbles=False, scale_dtype=F16, minimum_dtype=F32),
    "short nibbles": BlockType(codes=16, nibbles=True, scale_dtype=F16, minimum_dtype=F16),
    "short blocks": BlockType(codes=16, nibbles=False, scale_dtype=F32, minimum_dtype=None),
}
SHAPES = {
    "flat": ((96,), (64,)),
    "fused": ((64,), (2, 48)),
    "heads in": ((3, 2, 16), (40,)),
    "outputs that fill no vector": ((32,), (5, 7)),
}
SUM_ULPS = 2.0
"""A sum of K products in float32 may be off by about sqrt(K) roundings of 2^-24 of the sum of their
magnitudes, whatever its order; so two orders differ by twice that at most. Seen: a tenth of it."""


def make_blocks(kind: BlockType, num_outputs: int, num_inputs: int, seed: int = 0) -> Blocks:
    rng = np.random.default_rng(seed)
    num_blocks = num_inputs // kind.codes
    if kind.nibbles:
        codes = rng.integers(0, 256, (num_outputs, num_blocks, kind.code_bytes), dtype=np.uint8)
    else:
        codes = rng.integers(-128, 128, (num_outputs, num_blocks, kind.codes)).astype(np.int8)

    def numbers(dtype: np.dtype) -> np.ndarray:
        return (rng.standard_normal((num_outputs, num_blocks)) * 0.01).astype(dtype)

    minimum = None if kind.minimum_dtype is None else numbers(kind.minimum_dtype)
    return Blocks(type=kind, codes=codes, scale=numbers(kind.scale_dtype), minimum=minimum)


def on_device(weight: BlockQuantizedWeight) -> BlockQuantizedWeight:
    arrays: BlockQuantizedWeight = jax.tree.map(jnp.asarray, weight)
    return arrays


def laid_out(weight: BlockQuantizedWeight, layout: str) -> BlockQuantizedWeight | PanelWeight:
    return make_panels(weight) if layout == "panels" else weight


def bound(x: jax.Array, weight: BlockQuantizedWeight) -> np.ndarray:
    """What two orders of each sum may differ by: [T, *outputs]."""
    num_inputs = dequantized(weight).shape[-1]
    magnitude = jnp.abs(x).reshape(len(x), -1) @ jnp.abs(dequantized(weight)).reshape(
        -1, num_inputs
    ).T.astype(jnp.float32)
    return np.asarray(magnitude).reshape(len(x), *weight.outputs) * (
        2 * SUM_ULPS * 2.0**-24 * num_inputs**0.5
    )


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "layout"), [(1, "tiles"), (3, "tiles"), (5, "panels")])
def test_the_product_is_the_references(kind: str, shape: str, rows: int, layout: str) -> None:
    inputs, outputs = SHAPES[shape]
    blocks = make_blocks(TYPES[kind], int(np.prod(outputs)), int(np.prod(inputs)), seed=rows)
    weight = on_device(lay_out_blocks(blocks, outputs))
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, *inputs)), jnp.float32)
    given = laid_out(weight, layout)
    program = jax.jit(block_quantized_linear).lower(x, given).compile(COMPILER_OPTIONS)
    got, want = (
        np.asarray(program(x, given)),
        np.asarray(block_quantized_linear_reference(x, weight)),
    )
    assert got.shape == (rows, *outputs)
    assert got.dtype == np.float32
    assert (np.abs(got - want) <= bound(x, weight)).all()


@pytest.mark.parametrize("kind", TYPES)
def test_what_is_laid_out_is_what_the_blocks_say(kind: str) -> None:
    blocks = make_blocks(TYPES[kind], 40, 96)
    laid = lay_out_blocks(blocks, (5, 8))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), laid) == jax.tree.map(
        lambda x: (x.shape, x.dtype),
        abstract_block_quantized(TYPES[kind], (5, 8), blocks.scale.shape[1]),
    )
    np.testing.assert_array_equal(
        np.asarray(dequantized(on_device(laid))).reshape(40, 96), blocks.dequantized()
    )


@pytest.mark.parametrize("layout", ["tiles", "panels"])
def test_weights_in_the_product_are_exactly_code_times_scale_plus_minimum(layout: str) -> None:
    """One input alone is not zero, so nothing is added to its product that could round."""
    kind = TYPES["nibbles"]
    blocks = make_blocks(kind, 32, 64)
    weight = on_device(lay_out_blocks(blocks, (32,)))
    program = jax.jit(block_quantized_linear)
    for i in (0, 15, 16, 31, 32, 63):
        x = jnp.zeros((2, 64), jnp.float32).at[:, i].set(1.0)
        for found in program(x, laid_out(weight, layout)):
            np.testing.assert_array_equal(found, blocks.dequantized()[:, i])


@pytest.mark.parametrize("layout", ["tiles", "panels"])
def test_many_outputs_are_computed_tile_by_tile(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(weight_module, "TILE_OUTPUTS", 32)
    blocks = make_blocks(TYPES["bytes"], 88, 64)
    weight = on_device(lay_out_blocks(blocks, (88,)))
    assert weight.codes.shape == (3, 2, 2, 32, 16)
    given = laid_out(weight, layout)
    assert given.codes.shape == ((2, 2, 32, 64) if layout == "panels" else weight.codes.shape)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64)), jnp.float32)
    got, want = (
        jax.jit(block_quantized_linear)(x, given),
        block_quantized_linear_reference(x, weight),
    )
    assert (np.abs(np.asarray(got - want)) <= bound(x, weight)).all()


@pytest.mark.parametrize(
    "names",
    [("nibbles", "bytes"), ("nibbles, wide scales", "short blocks"), ("bytes", "short blocks")],
)
def test_tensors_of_several_types_are_held_in_one_that_says_the_same(names: tuple[str]) -> None:
    kind = common_type([TYPES[name] for name in names])
    for name in names:
        blocks = make_blocks(TYPES[name], 8, 64)
        held = blocks.held_as(kind)
        assert held.type == kind
        assert (held.minimum is None) == (kind.minimum_dtype is None)
        np.testing.assert_array_equal(held.dequantized(), blocks.dequantized())


@pytest.mark.parametrize(
    "change", [lambda x: x[:, :32], lambda x: x.astype(jnp.bfloat16)], ids=["inputs", "dtype"]
)
def test_activations_that_do_not_fit_are_refused(
    change: Callable[[jax.Array], jax.Array],
) -> None:
    weight = on_device(lay_out_blocks(make_blocks(TYPES["nibbles"], 16, 64), (16,)))
    with pytest.raises(ValueError, match=r"want float32 \[T, 64\]"):
        block_quantized_linear(change(jnp.ones((1, 64), jnp.float32)), weight)
