"""Every variant of a linear layer's weight has one interface, and stands for the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models import layers
from octavo.pallas_kernels.cpu.block_quantized_linear import lay_out_blocks, make_panels
from octavo.pallas_kernels.cpu.eigen_linear import EigenWeight
from octavo.pallas_kernels.cpu.int8_split_linear import split_weight
from octavo.pallas_kernels.cpu.native_int8_linear import NativeInt8Weight
from octavo.pallas_kernels.linear_weight import (
    DenseTable,
    embedding_table,
    linear_weight,
)
from octavo.pallas_kernels.quantized_linear import quantize_weight
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType

INPUTS, OUTPUTS = (2, 32), (3, 16)
TOLERANCE = {
    # Sums of 64 products of unit normals in another order.
    "dense": 1e-4, "eigen": 1e-4, "int8-split": 1e-4,
    # Codes of four bits: the variant is compared with what it stands for, so with another order.
    "block-quantized": 1e-4, "panels": 1e-4,
    # Rows and weights are rounded to a 127th of their largest number, up to 4: 64 such errors
    # of either sign.
    "int8": 0.6, "native int8": 0.6, "fp8": 2.0,
}  # fmt: skip


def variants() -> dict[str, tuple[Any, np.ndarray]]:
    """By name: the weight as it stands in a tree, and the matrix [*INPUTS, *OUTPUTS] it is."""
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((*INPUTS, *OUTPUTS)).astype(np.float32)
    array = jnp.asarray(dense)
    kind = BlockType(codes=32, nibbles=False, scale_dtype=np.dtype("float32"), minimum_dtype=None)
    codes = rng.integers(-8, 8, (48, 2, 32)).astype(np.int8)
    blocks = Blocks(type=kind, codes=codes, scale=rng.random((48, 2), np.float32) / 4, minimum=None)
    laid = jax.tree.map(jnp.asarray, lay_out_blocks(blocks, OUTPUTS))
    from_blocks = blocks.dequantized().T.reshape(*INPUTS, *OUTPUTS)
    int8 = quantize_weight(array, "int8", 2)
    return {
        "dense": (array, dense),
        "eigen": (EigenWeight(weight=array), dense),
        "int8-split": (split_weight(array, 2), dense),
        "block-quantized": (laid, from_blocks),
        "panels": (make_panels(laid), from_blocks),
        "int8": (int8, dense),
        "native int8": (NativeInt8Weight(weight=int8), dense),
        "fp8": (quantize_weight(array, "fp8", 2), dense),
    }


@pytest.mark.parametrize("name", TOLERANCE)
def test_a_variant_multiplies_by_the_weight_it_stands_for(name: str) -> None:
    weight, matrix = variants()[name]
    x = np.random.default_rng(1).standard_normal((5, *INPUTS)).astype(np.float32)
    got = jax.jit(layers.linear, static_argnames="num_inputs")(x, weight, num_inputs=2)
    assert got.dtype == jnp.float32
    want = np.einsum("tab,abcd->tcd", x, matrix)
    np.testing.assert_allclose(got, want, atol=TOLERANCE[name], rtol=1e-5)
    narrow = linear_weight(weight).apply(jnp.asarray(x), 2, jnp.dtype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", TOLERANCE)
def test_a_variant_is_a_pytree_that_counts_its_bytes(name: str) -> None:
    weight = linear_weight(variants()[name][0])
    leaves = jax.tree.leaves(weight)
    assert weight.nbytes == sum(leaf.nbytes for leaf in leaves) > 0
    abstract = jax.eval_shape(lambda weight: weight, weight)
    assert isinstance(abstract, type(weight))
    assert abstract.nbytes == weight.nbytes


@pytest.mark.parametrize("name", ["dense", "int8", "native int8", "fp8"])
def test_a_table_looks_rows_up_and_is_an_output_layer(name: str) -> None:
    rng = np.random.default_rng(2)
    dense = rng.standard_normal((48, 64)).astype(np.float32)
    stands: Any = jnp.asarray(dense)
    if name != "dense":
        kind = "fp8" if name == "fp8" else "int8"
        stands = quantize_weight(stands, kind, 1, inputs_first=False)  # type: ignore[arg-type]
    if name == "native int8":
        stands = NativeInt8Weight(weight=stands)
    table = embedding_table(stands)
    ids = jnp.asarray([3, 47, 0, 400], jnp.int32)
    # Half a step of a row's largest number, at most 4.
    rounding = {"dense": 0.0, "fp8": 4 * 2.0**-4}.get(name, 4 * 0.5 / 127)
    np.testing.assert_allclose(table.rows(ids), dense[[3, 47, 0, 47]], atol=rounding)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    got = table.apply(jnp.asarray(x), out_dtype=jnp.dtype(jnp.float32))
    np.testing.assert_allclose(got, x @ dense.T, atol=TOLERANCE[name], rtol=1e-5)


def test_bfloat16_products_are_summed_in_the_dtype_that_is_asked_for() -> None:
    x = jnp.full((1, 512), 1 + 2.0**-7, jnp.bfloat16)
    table = DenseTable(jnp.ones((1, 512), jnp.bfloat16))
    assert float(table.apply(x, out_dtype=jnp.dtype(jnp.float32))[0, 0]) == 512 * (1 + 2.0**-7)
    assert table.apply(x).dtype == jnp.bfloat16
