"""Pools hold what their layout says, in as many bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    PagedKV,
    ragged_paged_attention,
)
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case

PARAMS = AttentionParams(scale=0.125)


@pytest.mark.parametrize(
    ("backend", "head_dim", "row"),
    [
        ("mosaic_tpu", 64, (1, 128)),
        ("mosaic_tpu", 96, (2, 128)),
        ("mosaic_tpu", 128, (2, 128)),
        ("mosaic_tpu", 256, (2, 256)),
        ("mosaic_gpu", 64, (2, 64)),
        ("mosaic_gpu", 96, (2, 128)),
        ("xla", 80, (2, 80)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("page_size", [64, 256])
def test_a_layout_counts_every_byte_of_its_arrays(
    backend: str, head_dim: int, row: tuple[int, int], dtype: Any, page_size: int
) -> None:
    layout = pool_layout(backend, head_dim, page_size)
    assert (layout.halves, layout.width) == row
    shape = layout.shape(7, 3)
    kv = jax.eval_shape(lambda: PagedKV.zeros(shape, dtype, layout.scale_width))
    assert (kv.num_kv_heads, kv.page_size, kv.head_dim) == (3, page_size, layout.head_dim)
    held = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(kv))
    assert held == 7 * page_size * 2 * 3 * layout.bytes_per_head(dtype)
    own = head_dim * jnp.dtype(dtype).itemsize
    if head_dim % 64 == 0 and dtype == jnp.bfloat16:
        assert layout.bytes_per_head(dtype) == own


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [(jnp.float32, 4 * 576), (jnp.uint16, 2 * 576), (jnp.int8, 576 + 2 * 4)]
)
def test_a_latent_lies_once_and_unpadded(dtype: Any, num_bytes: int) -> None:
    layout = pool_layout("xla", 576, 16, 512)
    kv = jax.eval_shape(lambda: layout.zeros(7, 1, dtype))
    assert kv.pages.shape == (7, 1, 1, 16, 576)
    assert (kv.num_kv_heads, kv.page_size, kv.head_dim) == (1, 16, 576)
    assert not kv.in_one_row
    held = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(kv))
    assert held == 7 * 16 * num_bytes
    assert layout.bytes_per_token(dtype) == num_bytes


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [(jnp.bfloat16, 2 * 640), (jnp.int8, 640 + 2 * 2 * 4)]
)
def test_a_tpu_pads_latents_and_their_scales_to_whole_lanes(dtype: Any, num_bytes: int) -> None:
    layout = pool_layout("mosaic_tpu", 576, 64, 512)
    kv = jax.eval_shape(lambda: layout.zeros(7, 1, dtype))
    assert kv.pages.shape == (7, 1, 1, 64, 640)
    assert kv.value_size == 512
    held = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(kv))
    assert held == 7 * 64 * num_bytes
    assert layout.bytes_per_token(dtype) == num_bytes


def test_a_backend_without_latents_refuses_them() -> None:
    backend: Any = "mosaic_gpu"
    case = make_case(
        np.random.default_rng(0), [(1, 9)], num_tokens=1, num_rows=1, heads=(4, 1), value_size=8
    )
    with pytest.raises(ValueError, match=f"{backend} wants values of their own"):
        ragged_paged_attention(*case, PARAMS, backend=backend)
    q, k, _, kv, batch = case
    with pytest.raises(ValueError, match="no v for a pool of keys alone"):
        ragged_paged_attention(q, k, k, kv, batch, PARAMS)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_the_reference_takes_a_pool_in_one_row_as_one_apart(kv_dtype: str | None) -> None:
    q, k, v, kv, batch = make_case(
        np.random.default_rng(0),
        [(1, 30), (9, 20)],
        num_tokens=12,
        num_rows=3,
        heads=(4, 2),
        head_dim=64,
        kv_dtype=kv_dtype,
        layout=pool_layout("mosaic_tpu", 64, 8),
    )
    assert kv.in_one_row
    got, got_kv = ragged_paged_attention(q, k, v, kv, batch, PARAMS, backend="reference")
    want, want_kv = ragged_paged_attention(q, k, v, kv.apart(), batch, PARAMS, backend="reference")
    np.testing.assert_array_equal(got, want)
    for in_one_row, apart in ((kv, kv.apart()), (got_kv, want_kv)):
        assert in_one_row.pages.shape[1:] == (1, 2, 8, 128)
        np.testing.assert_array_equal(in_one_row.pages[:, 0, ..., :64], apart.pages[:, 0])
        np.testing.assert_array_equal(in_one_row.pages[:, 0, ..., 64:], apart.pages[:, 1])
        np.testing.assert_array_equal(in_one_row.k, apart.k)
        np.testing.assert_array_equal(in_one_row.v, apart.v)


@pytest.mark.parametrize("backend", ["xla", "mosaic_gpu"])
def test_a_backend_that_wants_keys_and_values_apart_refuses_them_in_one_row(backend: Any) -> None:
    case = make_case(
        np.random.default_rng(0),
        [(1, 9)],
        num_tokens=1,
        num_rows=1,
        head_dim=64,
        layout=pool_layout("mosaic_tpu", 64, 8),
    )
    with pytest.raises(ValueError, match=f"{backend} wants keys and values apart"):
        ragged_paged_attention(*case, PARAMS, backend=backend)
