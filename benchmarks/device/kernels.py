"""Attention alone, timed in a loop on the device, against what was just measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.roofs import in_loop
from octavo.pallas_kernels.quantized_linear.rounding import LARGEST
from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import (
    KV_DTYPES,
    bytes_per_head,
    stored_dtype,
    to_stored,
)
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout

HEADS, HEAD_DIM, PAGE = (32, 8), 128, 64


LOOPS = 10


def measure(
    results: dict[str, Any], deadline_s: float, *, backend: Any, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Decode at equal and at drawn lengths, prefill chunks, a mixed batch."""
    for name, rows, kv_dtype in cases(tiny):
        if time.monotonic() > deadline_s:
            return
        yield {"what": name, **_one(rows, results, backend, dtype, kv_dtype, tiny)}


def cases(tiny: bool = False) -> list[tuple[str, list[tuple[int, int]], str | None]]:
    """Names, rows (new tokens, KV length) and KV's dtype if another, the most wanted first."""
    rng = np.random.default_rng(0)
    if tiny:
        drawn = rng.integers(8, 64, 4)
        return [
            ("decode 4 x 32", [(1, 32)] * 4, None),
            ("decode 4 x 8-64, int8 KV", [(1, int(n)) for n in drawn], "int8"),
            ("prefill 16 x 48", [(16, 48)], None),
        ]
    drawn = rng.integers(1024, 8193, 64)
    return [
        ("decode 64 x 4096", [(1, 4096)] * 64, None),
        ("decode 64 x 1k-8k", [(1, int(n)) for n in drawn], None),
        ("prefill 2048 x 8192", [(2048, 8192)], None),
        ("decode 1 x 32768", [(1, 32768)], None),
        ("decode 128 x 1024", [(1, 1024)] * 128, None),
        ("prefill 2048 x 2048", [(2048, 2048)], None),
        ("mixed 128 x 1024 + 512 x 1024", [(1, 1024)] * 128 + [(512, 1024)], None),
        ("decode 64 x 4096, int8 KV", [(1, 4096)] * 64, "int8"),
        ("decode 64 x 4096, fp8 KV", [(1, 4096)] * 64, "fp8"),
        ("prefill 2048 x 8192, int8 KV", [(2048, 8192)], "int8"),
    ]


def attention(rows: list[tuple[int, int]], backend: Any) -> Callable[..., jax.Array]:
    """What is timed: (queries, pool, batch) -> outputs, which are the next run's queries."""
    params = AttentionParams(scale=HEAD_DIM**-0.5)
    decode_only = all(new == 1 for new, _ in rows)
    return partial(_attend(backend), params=params, decode_only=decode_only)


def _one(
    rows: list[tuple[int, int]],
    results: dict[str, Any],
    backend: Any,
    dtype: str,
    kv_dtype: str | None,
    tiny: bool,
) -> dict[str, Any]:
    q, kv, batch = make_batch(rows, backend, dtype, kv_dtype)
    took_s = in_loop(attention(rows, backend), q, kv, batch, count=2 if tiny else LOOPS)
    per_head = bytes_per_head(KV_DTYPES[kv_dtype or dtype], HEAD_DIM)
    num_bytes = sum(kv_len for _, kv_len in rows) * 2 * HEADS[1] * per_head
    pairs = sum(new * kv_len - new * (new - 1) // 2 for new, kv_len in rows)
    flops = 4 * pairs * HEADS[0] * HEAD_DIM
    rate, matmul = results["copy_bytes_per_s"], results["matmul_flops_per_s"]
    return {
        "µs": 1e6 * took_s,
        "KV GB/s": 1e-9 * num_bytes / took_s,
        "of copy": num_bytes / took_s / rate,
        "TFLOP/s": 1e-12 * flops / took_s,
        "of matmul": flops / took_s / matmul,
    }


def make_batch(
    rows: list[tuple[int, int]], backend: Any, dtype: str, kv_dtype: str | None = None
) -> Any:
    """Queries, pool and batch of rows (new tokens, KV length), on the device; pages shuffled."""
    rng = np.random.default_rng(1)
    pages = [-(-kv_len // PAGE) for _, kv_len in rows]
    order = rng.permutation(sum(pages)) + 1
    table = np.zeros((len(rows), -(-max(pages) // 8) * 8), np.int32)
    first = 0
    for row, count in enumerate(pages):
        table[row, :count] = order[first : first + count]
        first += count
    new = np.array([n for n, _ in rows], np.int32)
    token_row = np.repeat(np.arange(len(rows), dtype=np.int32), new)
    zeros = jnp.zeros((int(new.sum()),), jnp.int32)
    batch = RaggedBatch(
        block_table=jnp.asarray(table),
        kv_lens=jnp.asarray([kv_len for _, kv_len in rows], jnp.int32),
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
        token_row=jnp.asarray(token_row),
        token_page=zeros,  # the kernels alone write no KV
        token_offset=zeros,
        num_decode_rows=jnp.int32(sum(1 for n, _ in rows if n == 1)),
        num_rows=jnp.int32(len(rows)),
    )
    layout = pool_layout(backend, HEAD_DIM, PAGE)
    shape = layout.shape(1 + sum(pages), HEADS[1])

    def make_pool(key: jax.Array) -> PagedKV:
        numbers = jax.random.normal(key, shape, jnp.dtype(dtype))
        if kv_dtype is None:
            return PagedKV(pages=numbers)
        stored = KV_DTYPES[kv_dtype]
        kv = PagedKV.zeros(shape, stored, layout.scale_width)
        assert kv.scales is not None
        largest = LARGEST["int8" if kv_dtype == "int8" else "fp8"]
        numbers = jnp.clip(numbers * (largest / 5), -largest, largest)
        return PagedKV(
            pages=to_stored(
                numbers, stored_dtype(stored) if backend in ("xla", "reference") else stored
            ),
            scales=kv.scales + 5 / largest,
        )

    pool = jax.jit(make_pool)(jax.random.key(0))
    q = jax.random.normal(
        jax.random.key(1), (int(new.sum()), HEADS[0], layout.head_dim), jnp.dtype(dtype)
    )
    return q, pool, batch


def _attend(backend: Any) -> Any:
    if backend == "mosaic_gpu":
        from octavo.pallas_kernels.ragged_paged_attention.kernel_gpu import attend_mosaic_gpu

        return attend_mosaic_gpu
    if backend == "mosaic_tpu":
        from octavo.pallas_kernels.ragged_paged_attention.kernel_tpu import attend_mosaic_tpu

        return attend_mosaic_tpu
    from octavo.pallas_kernels.ragged_paged_attention.xla import attend_xla

    return attend_xla
