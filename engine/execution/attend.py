"""Attention as the decoder calls it: one layer's paged attention, over the mesh's heads."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from octavo.engine.execution.state import head_axis, query_axis
from octavo.models.blocks.attention import LayerAttention
from octavo.pallas_kernels.compat import shard_map
from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    Backend,
    PagedKV,
    RaggedBatch,
    ragged_paged_attention,
)

Attend = Callable[
    [
        RaggedBatch,
        jax.Array,
        jax.Array | None,
        jax.Array | None,
        PagedKV,
        LayerAttention,
        jax.Array | None,
    ],
    tuple[jax.Array, PagedKV],
]


def attend_over_heads(
    mesh: Mesh,
    *,
    backend: Backend,
    decode_only: bool,
    quick: bool = False,
) -> Attend:
    """Attention over heads split along a mesh axis; each device sees only its own heads and pages.

    A layer whose KV heads do not divide over the axis runs every head everywhere, but for one KV
    head that all read: it is everywhere, and query heads are split.

    Args:
        mesh: the device mesh.
        backend: which implementation.
        decode_only: every row has one token.
        quick: rather compiled soon than fast.

    Returns:
        `attend(batch, q [T, Hq, D], k, v [T, Hkv, D], pool, attention, sinks [Hq])
        -> (out, pool)`. If k and v are None, the pool holds the step's tokens already; if v alone
        is, the pool holds keys alone.
    """

    def attend(
        batch: RaggedBatch,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        kv: PagedKV,
        attention: LayerAttention,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, PagedKV]:
        params = AttentionParams(
            scale=attention.scale,
            sliding_window=attention.sliding_window,
            logit_softcap=attention.logit_softcap,
            attention_chunk=attention.attention_chunk,
        )

        def local(
            batch: RaggedBatch,
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            kv: PagedKV,
            sinks: jax.Array | None,
        ) -> tuple[jax.Array, PagedKV]:
            return ragged_paged_attention(
                q, k, v, kv, batch, params,
                sinks=sinks, backend=backend, decode_only=decode_only, quick=quick,
            )  # fmt: skip

        if mesh.size == 1:
            return local(batch, q, k, v, kv, sinks)
        axis = head_axis(kv.num_kv_heads, mesh)
        of_queries = query_axis(q.shape[1], kv.num_kv_heads, mesh)
        queries, heads, pool = P(None, of_queries), P(None, axis), P(None, None, axis)
        return shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), queries, heads, heads, pool, P(of_queries)),
            out_specs=(queries, pool),
        )(batch, q, k, v, kv, sinks)

    return attend
