"""Ragged paged attention: one signature, several implementations.

Packed queries of any mix of decode rows and prefill chunks attend over a paged KV pool; the step's
own keys and values are written first. Choose a backend by name with `ragged_paged_attention`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.ragged_paged_attention.backends import BACKENDS, Backend
from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.kernel_gpu import attend_mosaic_gpu
from octavo.pallas_kernels.ragged_paged_attention.kernel_tpu import attend_mosaic_tpu
from octavo.pallas_kernels.ragged_paged_attention.kv_write import write_kv
from octavo.pallas_kernels.ragged_paged_attention.kv_write_tpu import write_kv_mosaic_tpu
from octavo.pallas_kernels.ragged_paged_attention.reference import attend_reference
from octavo.pallas_kernels.ragged_paged_attention.xla import attend_xla

__all__ = [
    "AttentionParams",
    "Backend",
    "PagedKV",
    "RaggedBatch",
    "ragged_paged_attention",
]


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
    backend: Backend = "xla",
    decode_only: bool = False,
    quick: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, PagedKV]:
    """Writes the step's KV and attends over it.

    Args:
        q: [T, Hq, D] packed queries, rotated.
        k, v: [T, Hkv, D] new keys (rotated) and values; Hq is a multiple of Hkv and query head h
            reads KV head h // (Hq / Hkv). None for both: the pool holds the step's already (it is
            another layer's), and nothing is written. v alone is None where the pool holds keys
            alone, whose first `kv.value_size` numbers are the value.
        kv: pool [N, 2, Hkv, P, D'], or [N, 1, Hkv, P, D] of keys alone, with scales if it is int8
            or fp8, updated in place under donation; laid out as `pool_layout` says for the backend.
            D' is at least D; what exceeds D holds zeros.
        batch: which token is whose; see `RaggedBatch`.
        params: scale, window, soft cap.
        sinks: float32[Hq] a logit each head adds to the softmax's denominator; None is none.
        backend: see `octavo.pallas_kernels.ragged_paged_attention.backends`, which also says what
            each takes: the engine asks it when it is built.
        decode_only: the caller promises that every row has one token.
        quick: take what compiles soonest, where the backend has a faster way that compiles longer.
        interpret: run a Pallas kernel in its interpreter (tests).

    Returns:
        ([T, Hq, D] in q's dtype, the updated pool), D as wide as values are. Padding tokens hold
        garbage.

    Raises:
        ValueError: shapes that do not fit together, or an unknown backend.
    """
    _check_shapes(q, k, v, kv)
    head_dim = q.shape[2]
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks {sinks.shape}: want one a query head, ({q.shape[1]},)")
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r}: want one of {', '.join(BACKENDS)}")
    if kv.in_one_row and backend == "reference":
        again = functools.partial(ragged_paged_attention, params=params, backend=backend)
        out, apart = again(q, k, v, kv.apart(), batch, sinks=sinks)
        return out, apart.side_by_side()
    if kv.in_one_row and backend != "mosaic_tpu":
        raise ValueError(f"pool {kv.pages.shape}: {backend} wants keys and values apart")
    if kv.holds_keys_alone and backend == "mosaic_gpu":
        raise ValueError(f"pool {kv.pages.shape}: {backend} wants values of their own")
    wider = ((0, 0), (0, 0), (0, kv.head_dim - head_dim))
    is_padded = kv.head_dim > head_dim
    if k is not None:
        # Whatever padding computed, page 0 stays finite: everybody reads it, and 0 times NaN is
        # NaN.
        is_real = (batch.token_page > 0)[:, None, None]
        k = jnp.where(is_real, k, 0)
        v = None if v is None else jnp.where(is_real, v, 0)
        if is_padded:
            k = jnp.pad(k, wider)
            v = None if v is None else jnp.pad(v, wider)
        with jax.named_scope("kv_write"):
            if backend == "mosaic_tpu":
                kv = write_kv_mosaic_tpu(
                    kv, k, v, batch, decode_only=decode_only, interpret=interpret
                )
            else:
                kv = write_kv(kv, k, v, batch)
    if is_padded:
        q = jnp.pad(q, wider)
    with jax.named_scope("paged_attention"):
        if backend == "mosaic_tpu":
            out = attend_mosaic_tpu(
                q, kv, batch, params, sinks=sinks, decode_only=decode_only, interpret=interpret
            )
        elif backend == "mosaic_gpu":
            out = attend_mosaic_gpu(
                q, kv, batch, params, sinks=sinks, decode_only=decode_only, interpret=interpret
            )
        elif backend == "xla":
            out = attend_xla(
                q, kv, batch, params, sinks=sinks, decode_only=decode_only, quick=quick
            )
        else:
            out = attend_reference(q, kv, batch, params, sinks=sinks)
    return out[:, :, : head_dim if kv.value_size is None else kv.value_size], kv


def _check_shapes(q: jax.Array, k: jax.Array | None, v: jax.Array | None, kv: PagedKV) -> None:
    num_kv_heads = kv.num_kv_heads if k is None or k.ndim != 3 else k.shape[1]
    new = None if k is None else (q.shape[0], num_kv_heads, *q.shape[2:])
    given = [None if x is None else x.shape for x in (k, v)]
    wanted = [new, None if kv.holds_keys_alone else new]
    if q.ndim != 3 or given != wanted or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q {q.shape}, k {given[0]}, v {given[1]}: want [T, Hq, D], [T, Hkv, D] x 2 or none, "
            "and no v for a pool of keys alone"
        )
    if kv.num_kv_heads != num_kv_heads or kv.head_dim < q.shape[2]:
        raise ValueError(f"pool {kv.pages.shape} does not hold heads like k {given[0]}")
