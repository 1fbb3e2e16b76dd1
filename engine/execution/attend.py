"""Attention as the decoder calls it: one layer's paged attention, over the mesh's heads."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from octavo.models.config import LayerAttention
from octavo.pallas_kernels.compat import shard_map
from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    Backend,
    PagedKV,
    RaggedBatch,
    ragged_paged_attention,
)

Attend = Callable[
    [RaggedBatch, jax.Array, jax.Array, jax.Array, PagedKV, LayerAttention],
    tuple[jax.Array, PagedKV],
]


def attend_over_heads(
    mesh: Mesh,
    head_axis: str | None,
    *,
    backend: Backend,
    decode_only: bool,
    quick: bool = False,
) -> Attend:
    """Attention over heads split along a mesh axis; each device sees only its own heads and pages.

    Args:
        mesh: the device mesh.
        head_axis: the mesh axis that splits query and KV heads; None runs every head everywhere.
        backend: which implementation.
        decode_only: every row has one token.
        quick: rather compiled soon than fast.

    Returns:
        `attend(batch, q [T, Hq, D], k, v [T, Hkv, D], pool, params) -> (out, pool)`.
    """

    def attend(
        batch: RaggedBatch,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv: PagedKV,
        attention: LayerAttention,
    ) -> tuple[jax.Array, PagedKV]:
        params = AttentionParams(
            scale=attention.scale,
            sliding_window=attention.sliding_window,
            logit_softcap=attention.logit_softcap,
        )

        def local(
            batch: RaggedBatch, q: jax.Array, k: jax.Array, v: jax.Array, kv: PagedKV
        ) -> tuple[jax.Array, PagedKV]:
            return ragged_paged_attention(
                q, k, v, kv, batch, params, backend=backend, decode_only=decode_only, quick=quick
            )

        if mesh.size == 1:
            return local(batch, q, k, v, kv)
        heads, pool = P(None, head_axis), P(None, None, head_axis)
        return shard_map(
            local, mesh=mesh, in_specs=(P(), heads, heads, heads, pool), out_specs=(heads, pool)
        )(batch, q, k, v, kv)

    return attend
