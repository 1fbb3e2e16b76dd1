"""Ragged paged attention for NVIDIA Hopper (Pallas Mosaic GPU): the XLA side of two kernels.

Decode rows and prefill chunks are two kernels that write disjoint tokens, each over a worklist
computed from the lengths: see `decode_gpu` and `prefill_gpu`.

Speed on hardware: docs/kernels/README.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)

if TYPE_CHECKING:
    from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import DecodeTiles, PrefillTiles


def attend_mosaic_gpu(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
    decode_only: bool = False,
    decode_tiles: DecodeTiles | None = None,
    prefill_tiles: PrefillTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of packed queries over their rows' pages.

    Args:
        q: [T, Hq, D] packed queries, bfloat16.
        kv: pool [N, 2, Hkv, P, D] bfloat16, int8 or fp8, the step's own KV already written.
        batch: see `RaggedBatch`.
        params: see `AttentionParams`.
        sinks: float32[Hq] a logit each head adds to the softmax's denominator; None is none.
        decode_only: row s has token s and no other (T = S): leaves the prefill half out.
        decode_tiles, prefill_tiles: block sizes; None takes the measured or computed ones.
        interpret: run in Pallas' interpreter (JAX 0.11 on).

    Returns:
        [T, Hq, D] in q's dtype; zeros for padding tokens and idle rows.
    """
    # Imported here: JAX before 0.11 has no such kernels.
    from octavo.pallas_kernels.ragged_paged_attention.decode_gpu import decode_gpu
    from octavo.pallas_kernels.ragged_paged_attention.prefill_gpu import prefill_gpu

    rows = decode_gpu(  # [S, Hq, D]
        q,
        kv,
        batch,
        params,
        sinks=sinks,
        decode_only=decode_only,
        tiles=decode_tiles,
        interpret=interpret,
    )
    if decode_only:
        return rows
    chunk = prefill_gpu(q, kv, batch, params, sinks=sinks, tiles=prefill_tiles, interpret=interpret)
    is_decode = batch.token_row < batch.num_decode_rows
    out = jnp.where(is_decode[:, None, None], rows[batch.token_row], chunk)
    live = batch.kv_lens[batch.token_row] > 0
    live &= jnp.arange(q.shape[0], dtype=jnp.int32) < batch.cu_q_lens[batch.num_rows]
    return jnp.where(live[:, None, None], out, 0)
