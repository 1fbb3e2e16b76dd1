"""What the TPU attention kernel does with one KV block in VMEM: masks, scales, the online softmax.

A block of an int8 or fp8 pool stays as it was copied. Its numbers are widened as operands of the
two products, which is exact in bfloat16; keys' scales multiply scores and values' scales multiply
the weights of the softmax: one number a key, where the numbers themselves would take D.

Where a token's key and value share a row, [key | value], both products take the whole row: queries
hold zeros where values lie, so that scores are of keys alone, and of the product with the weights
only the lanes of values are kept outside. A matrix unit is 128 lanes wide at least: neither product
takes longer than one of 64 lanes would.

Of a latent the values are the first lanes: the second product takes those of the same rows. Narrow
latents have a scale of these lanes, which is their keys' and values' alike, and one of the others:
scores are the sum of two products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo.pallas_kernels.ragged_paged_attention.batch import AttentionParams
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import LANES, whole_lanes

MASKED = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """What is static in one kernel.

    Attributes:
        group: G, query heads a KV head.
        tile: query tokens of an item; 1 for decode.
        packed: queries lie as [Hkv, A · G, D] (prefill) and not as [T, Hkv, G, D] (decode).
        head_dim: numbers of a row of the pool, whole tiles of lanes.
        value_dim: the first numbers of a row of values that are looked at, whole tiles of lanes.
        halves: 2 where keys and values are rows of their own; 1 where they share one, or where
            values are the beginnings of keys.
        pages: pages in a KV block.
        unrolled: decode's heads are unrolled.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    halves: int
    page_size: int
    pages: int
    tile: int
    packed: bool
    params: AttentionParams
    unrolled: bool

    @property
    def queries(self) -> int:
        return self.tile * self.group

    @property
    def block(self) -> int:
        return self.pages * self.page_size

    @property
    def has_more_keys(self) -> bool:
        """Whether keys have lanes behind those of values: latents'."""
        return self.value_dim < self.head_dim

    @property
    def scale_lanes(self) -> int:
        """Lanes of a block's scales: a place each, in whole tiles of lanes."""
        return whole_lanes(self.block)


def zero_tail(shape: KernelShape, kv_buf: Any, num_left: Any) -> None:
    """Zeroes values beyond the row's end: what was never written may be NaN, and 0 · NaN is NaN.

    Args:
        kv_buf: [pages, halves, Hkv, P, D].
        num_left: places of the block before the row's end.
    """
    if jnp.issubdtype(kv_buf.dtype, jnp.integer):
        return

    @pl.when(num_left < shape.block)
    def _tail() -> None:
        dims = (shape.num_kv_heads, shape.page_size, shape.head_dim)

        def one_page(i: Any, _: None) -> None:
            place = i * shape.page_size + lax.broadcasted_iota(jnp.int32, dims, 1)
            old = kv_buf[i, shape.halves - 1]
            kept = jnp.where(place < num_left, old.astype(jnp.float32), 0.0)
            kv_buf[i, shape.halves - 1] = kept.astype(old.dtype)

        lax.fori_loop(lax.div(num_left, shape.page_size), shape.pages, one_page, None)


def lay_scales(shape: KernelShape, scale_buf: Any, rows_ref: Any, num_left: Any) -> None:
    """Lays the scales of a block's pages side by side along lanes, as scores lie; zeros after them.

    Keys' are multiplied by the scale of all scores on the way; of latents all are keys'.

    Args:
        scale_buf: [pages, 2, Hkv, P'], page after page.
        rows_ref: [2, Hkv, scale_lanes], written.
        num_left: places of the block before the row's end.
    """
    width = max(shape.page_size, LANES)
    per_tile = width // shape.page_size
    dims = (2, shape.num_kv_heads, width)
    lane = lax.broadcasted_iota(jnp.int32, dims, 2)
    half = lax.broadcasted_iota(jnp.int32, dims, 0)
    is_keys = (half == 0) | shape.has_more_keys
    factor = jnp.where(is_keys, jnp.float32(shape.params.scale), jnp.float32(1.0))
    for first in range(0, shape.pages, per_tile):
        row = scale_buf[first]
        for i in range(1, min(per_tile, shape.pages - first)):
            begin = i * shape.page_size
            row = jnp.where(lane < begin, row, pltpu.roll(scale_buf[first + i], begin, 2))
        here = first * shape.page_size
        rows_ref[:, :, here : here + width] = jnp.where(lane + here < num_left, row * factor, 0.0)


def add_block(
    shape: KernelShape,
    q_ref: Any,  # [Hkv, Q, D]
    kv_ref: Any,  # [pages, halves, Hkv, P, D]
    scale_rows: Any,  # [2, Hkv, scale_lanes], or None
    peak_ref: Any,
    total_ref: Any,
    acc_ref: Any,
    first_key: Any,
    position: Any,
    kv_len: Any,
    *,
    masked: bool,
) -> None:
    """Takes one KV block into every head's online softmax."""
    params, block, queries = shape.params, shape.block, shape.queries
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    visible = None
    if masked:
        key = first_key + lax.broadcasted_iota(jnp.int32, (queries, block), 1)
        query = lax.broadcasted_iota(jnp.int32, (queries, block), 0)
        query = position + lax.div(query, jnp.full_like(query, shape.group))
        visible = key <= jnp.minimum(query, kv_len - 1)
        if not params.sees_all:
            visible &= key >= params.first_visible_of_tile(query, position + (shape.tile - 1))

    def scale_row(half: int, head: Any) -> Any:  # [1, block]
        return scale_rows[half, pl.ds(head, 1), :block]

    def scores_of(q: Any, keys: Any) -> Any:  # [queries, block]
        return lax.dot_general(
            q,
            keys,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def one_head(head: Any) -> None:
        rows = [
            kv_ref[:, half, head].astype(q_ref.dtype).reshape(block, shape.head_dim)
            for half in range(shape.halves)
        ]
        keys, values = rows[0], rows[-1][:, : shape.value_dim]
        q = q_ref[head]
        if scale_rows is None:
            scores = scores_of(q, keys) * params.scale
        elif shape.has_more_keys:
            v = shape.value_dim
            scores = scores_of(q[:, :v], values) * scale_row(0, head)
            scores += scores_of(q[:, v:], keys[:, v:]) * scale_row(1, head)
        else:
            scores = scores_of(q, keys) * scale_row(0, head)
        if params.logit_softcap is not None:
            scores = params.logit_softcap * jnp.tanh(scores * (1 / params.logit_softcap))
        if visible is not None:
            scores = jnp.where(visible, scores, MASKED)
        old_peak = peak_ref[head][:, :1]
        peak = jnp.maximum(old_peak, scores.max(axis=1, keepdims=True))
        weight = jnp.exp(scores - peak)
        if visible is not None:
            # A query of a windowed tile may see nothing of this block and nothing before it.
            weight = jnp.where(visible, weight, 0.0)
        shrink = jnp.exp(old_peak - peak)
        total = total_ref[head][:, :1] * shrink + weight.sum(axis=1, keepdims=True)
        peak_ref[head] = jnp.broadcast_to(peak, (queries, LANES))
        total_ref[head] = jnp.broadcast_to(total, (queries, LANES))
        if scale_rows is not None and shape.has_more_keys:
            weight = weight * (scale_row(0, head) * (1 / params.scale))
        elif scale_rows is not None:
            weight = weight * scale_row(1, head)
        acc_ref[head] = acc_ref[head] * shrink + lax.dot_general(
            weight.astype(q_ref.dtype),
            values,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    each_head(shape, one_head)


def each_head(shape: KernelShape, do: Callable[[Any], None]) -> None:
    """Decode's small products are unrolled, so that heads overlap; prefill's fill the unit."""
    if shape.tile == 1 and shape.unrolled:
        for head in range(shape.num_kv_heads):
            do(head)
    else:
        lax.fori_loop(0, shape.num_kv_heads, lambda head, _: do(head), None)
