"""Hopper's combination of partial results agrees with plain XLA, run in Pallas' interpreter."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from octavo.pallas_kernels.compat import has_mosaic_gpu_kernels
from octavo.pallas_kernels.ragged_paged_attention import AttentionParams, ragged_paged_attention
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from octavo.pallas_kernels.ragged_paged_attention.shares import Shares, share_tiles
from tests.pallas_kernels.reference import attend_reference

pytestmark = pytest.mark.skipif(
    not has_mosaic_gpu_kernels(), reason="Mosaic GPU's interpreter comes with JAX 0.11"
)

# Sums in float32, in another order.
TOLERANCE = 1e-5
# Weights of the softmax, the pool and outputs are rounded to bfloat16's 8 bits of mantissa.
ROUNDED = 2e-2
NUM_KV_HEADS = 2


def interpreter() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


@jax.jit
def combine_plain(
    part: jax.Array, lse: jax.Array, shares: Shares, sinks: jax.Array | None
) -> jax.Array:
    """The same by one matrix product a head.

    Args:
        part: float32[Hkv, N, G, D].
        lse: float32[Hkv, N, G].

    Returns:
        float32[I, Hkv, G, D]; zeros for items that are not live.
    """
    place = jnp.arange(part.shape[1], dtype=jnp.int32)
    item = jnp.arange(shares.first.shape[1], dtype=jnp.int32)
    base = (item - shares.head_first[:, None])[..., None]
    belongs = (place >= base + shares.first[..., None]) & (place <= base + shares.last[..., None])
    part = jnp.where(belongs.any(1)[..., None, None], part, 0.0)
    belongs = belongs[..., None]  # [Hkv, I, N, 1]
    each = jnp.where(belongs, lse[:, None], -1e30)  # [Hkv, I, N, G]
    peak = each.max(axis=2)
    if sinks is not None:
        sink = sinks.reshape(peak.shape[0], 1, -1) * math.log2(math.e)
        peak = jnp.maximum(peak, sink)
    weight = jnp.where(belongs, jnp.exp2(each - peak[:, :, None]), 0.0)
    total = weight.sum(axis=2)
    if sinks is not None:
        total = total + jnp.exp2(sink - peak)
    weight = weight / jnp.maximum(total, 1e-30)[:, :, None]
    return jnp.einsum("hing,hngd->ihgd", weight, part, precision=lax.Precision.HIGHEST)


def check(
    group: int,
    head_dim: int,
    *,
    count: list[int],
    row: list[int],
    num_programs: int,
    has_sinks: bool,
    dtype: str = "float32",
    broken: int | None = None,
) -> None:
    """Combines random parts of `share_tiles`' own places; every other place holds NaN.

    Args:
        count: KV tiles of each item.
        row: of each item; the other rows are idle.
        num_programs: of the grid that would have written the parts.
        broken: a row whose parts are NaN too, and whose result nobody looks at.
    """
    from octavo.pallas_kernels.ragged_paged_attention.combine_gpu import combine_gpu
    from octavo.pallas_kernels.ragged_paged_attention.decode_gpu import part_places

    num_rows = len(count)
    share = partial(share_tiles, num_heads=NUM_KV_HEADS, num_programs=num_programs, least=1)
    shares = jax.jit(share)(jnp.asarray(count, jnp.int32))
    num_parts = num_rows + -(-num_programs // NUM_KV_HEADS)
    item = np.full(num_rows, -1, np.int32)
    item[row] = np.arange(len(row))
    begin, end = (np.asarray(x) for x in part_places(shares, jnp.asarray(item)))
    written = np.zeros((NUM_KV_HEADS, num_parts), bool)
    for head in range(NUM_KV_HEADS):
        for first, last in zip(begin[head], end[head], strict=True):
            assert not written[head, first:last].any()
            written[head, first:last] = True

    rng = np.random.default_rng(group * head_dim)
    shape = (NUM_KV_HEADS, num_parts, -(-group // 8) * 8, head_dim)
    part = rng.standard_normal(shape)
    lse = 4 * rng.standard_normal((NUM_KV_HEADS, num_parts, max(64, shape[2])))
    part[~written], lse[~written] = np.nan, np.nan
    part, lse = (jnp.asarray(x, jnp.float32) for x in (part, lse))
    sinks = None
    if has_sinks:
        sinks = jnp.asarray(3 * rng.standard_normal(NUM_KV_HEADS * group), jnp.float32)
    by_item = combine_plain(part[:, :, :group], lse[:, :, :group], shares, sinks)
    if broken is not None:
        for head in range(NUM_KV_HEADS):
            places = slice(begin[head, broken], end[head, broken])
            part, lse = part.at[head, places].set(jnp.nan), lse.at[head, places].set(jnp.nan)
    got = combine_gpu(
        part,
        lse,
        jnp.asarray(begin),
        jnp.asarray(end),
        group=group,
        dtype=jnp.dtype(dtype),
        sinks=sinks,
        interpret=interpreter(),
    )
    assert got.dtype == dtype
    want = np.zeros((num_rows, NUM_KV_HEADS * group, head_dim), np.float32)
    want[row] = np.asarray(by_item)[: len(row)].reshape(len(row), *want.shape[1:])
    tolerance = TOLERANCE if dtype == "float32" else ROUNDED
    looked_at = np.arange(num_rows) != broken
    np.testing.assert_allclose(
        np.asarray(got, np.float32)[looked_at], want[looked_at], atol=tolerance
    )
    idle = np.setdiff1d(np.arange(num_rows), row)
    assert not np.asarray(got, np.float32)[idle].any()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("group", "has_sinks"), [(1, True), (3, False), (4, True), (4, False), (12, True)]
)
def test_parts_are_weighed(group: int, head_dim: int, has_sinks: bool) -> None:
    # The first item is cut in four; the second row is idle.
    check(
        group,
        head_dim,
        count=[7, 1, 0],
        row=[0, 2],
        num_programs=8,
        has_sinks=has_sinks,
        dtype="bfloat16" if has_sinks else "float32",
    )


@pytest.mark.parametrize("group", [2, 16])
def test_a_row_of_many_parts(group: int) -> None:
    # 25 parts: two, eight times two, and seven of a last eight.
    check(group, 64, count=[50, 1, 0], row=[2, 0], num_programs=51, has_sinks=group == 2)


def test_a_row_that_is_no_number_leaves_the_others_alone() -> None:
    check(4, 64, count=[1, 7, 2], row=[0, 1, 2], num_programs=8, has_sinks=False, broken=1)


def test_no_row_is_live() -> None:
    check(1, 64, count=[0, 0], row=[], num_programs=4, has_sinks=True)


@pytest.mark.parametrize(("head_dim", "has_sinks"), [(64, True), (96, False)])
def test_decode_alone_leaves_nothing_to_do(head_dim: int, has_sinks: bool) -> None:
    """The kernel's rows are the result: zeros where rows are idle or padding."""
    rng = np.random.default_rng(0)
    layout = pool_layout("mosaic_gpu", head_dim, 32)
    q, k, v, kv, batch = make_case(
        rng,
        [(1, 0), (1, 90), (1, 1), (1, 0)],
        num_tokens=5,
        num_rows=5,
        heads=(6, 2),
        head_dim=head_dim,
        page_size=32,
        table=4,
        dtype="bfloat16",
        layout=layout,
    )
    params = AttentionParams(scale=head_dim**-0.5)
    sinks = jnp.asarray(rng.standard_normal(6), jnp.float32) if has_sinks else None
    got, written = ragged_paged_attention(
        q,
        k,
        v,
        kv,
        batch,
        params,
        sinks=sinks,
        backend="mosaic_gpu",
        decode_only=True,
        interpret=interpreter(),
    )
    wide = jnp.pad(q, ((0, 0), (0, 0), (0, layout.head_dim - head_dim)))
    want = attend_reference(wide, written, batch, params, sinks=sinks)[..., :head_dim]
    assert got.dtype == q.dtype
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got[1:3], want[1:3], atol=ROUNDED)
    assert not got[[0, 3, 4]].any()
