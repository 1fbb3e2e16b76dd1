"""Kernels against the reference, on fresh random inputs, with memory poisoned before each run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    PagedKV,
    ragged_paged_attention,
)
from octavo.pallas_kernels.ragged_paged_attention.backends import pool_head_dim
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Outputs are averages of unit normals; bfloat16 rounds weights and outputs to 8 bits."""
SPARE_PAGES, PADDING = 3, 11
DECODE_ONLY = ("decode", "idle")

ROWS = {
    "decode": [(1, 1), (1, 64), (1, 150), (1, 333), (1, 700)],
    "prefill": [(130, 130), (64, 200), (37, 300)],
    "mixed": [(1, 90), (1, 257), (1, 5), (97, 160), (5, 5), (40, 512)],
    "idle": [(1, 40), (1, 0), (1, 71)],
}
WINDOW = {"sliding_window": 70}
CAP = {"logit_softcap": 5.0}
GRID: tuple[tuple[str, tuple[int, int], int, int, dict[str, Any]], ...] = (
    ("decode", (32, 8), 128, 64, {}),
    ("prefill", (32, 8), 128, 64, {}),
    ("mixed", (32, 8), 128, 64, {}),
    ("mixed", (32, 8), 64, 16, {}),
    ("mixed", (8, 1), 128, 128, {}),
    ("mixed", (16, 16), 128, 256, WINDOW),
    ("mixed", (16, 8), 96, 32, {}),
    ("mixed", (8, 2), 256, 64, CAP),
    ("decode", (9, 3), 64, 64, WINDOW | CAP),
    ("idle", (32, 8), 128, 64, {}),
)
TINY: tuple[tuple[str, tuple[int, int], int, int, dict[str, Any]], ...] = (
    ("mixed", (4, 2), 64, 16, {}),
    ("decode", (4, 2), 64, 16, WINDOW | CAP),
)


def check(
    results: dict[str, Any], deadline_s: float, *, backend: Any, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """One row a case: the largest difference, and whether every live number is right.

    Outputs and scratch are poisoned by filling freed memory with NaN; pages that are nobody's hold
    NaN too. The pool after the call is compared as well.
    """
    seed = time.time_ns() % 2**31
    results["seed"] = seed
    rng = np.random.default_rng(seed)
    for kind, heads, head_dim, page_size, extra in TINY if tiny else GRID:
        if time.monotonic() > deadline_s:
            return
        yield _one(rng, backend, dtype, kind, heads, head_dim, page_size, extra)


def _one(
    rng: np.random.Generator,
    backend: Any,
    dtype: str,
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    extra: dict[str, Any],
) -> dict[str, Any]:
    rows = ROWS[kind]
    used = 1 + sum(-(-kv_len // page_size) for _, kv_len in rows)
    q, k, v, kv, batch = make_inputs(rng, backend, dtype, kind, heads, head_dim, page_size)
    num_tokens = q.shape[0]

    def run(name: Any) -> tuple[np.ndarray, np.ndarray]:
        attend = attention(name, kind, head_dim, extra)
        program = jax.jit(attend).lower(q, k, v, kv, batch).compile()
        poison(q.size * q.dtype.itemsize)
        out, pool = program(q, k, v, kv, batch)
        return np.asarray(out, np.float32), np.asarray(pool.pages[1:used], np.float32)

    out, pool = run(backend)
    expected, expected_pool = run("reference")
    live = np.concatenate(
        [np.full(new, kv_len > 0) for new, kv_len in rows]
        + [np.zeros(num_tokens - sum(new for new, _ in rows), bool)]
    )
    worst = float(np.abs(out[live] - expected[live]).max())
    same_pool = bool(np.array_equal(pool, expected_pool))
    padding_finite = bool(np.isfinite(out[~live]).all())
    name = f"{kind} {heads[0]}/{heads[1]} D{head_dim} P{page_size}"
    return {
        "what": " ".join([name, *(f"{key}={value}" for key, value in extra.items())]),
        "worst": worst,
        "pool": "same" if same_pool else "DIFFERS",
        "ok": worst <= TOLERANCE[dtype] and same_pool and padding_finite,
    }


def make_inputs(
    rng: np.random.Generator,
    backend: Any,
    dtype: str,
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
) -> Any:
    """Queries, new keys and values, pool and batch, with padding, and pages that are nobody's."""
    rows = ROWS[kind]
    decode_only = kind in DECODE_ONLY
    q, k, v, kv, batch = make_case(
        rng,
        rows,
        num_tokens=sum(new for new, _ in rows) + (0 if decode_only else PADDING),
        num_rows=len(rows) + (0 if decode_only else 2),
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        table=-(-704 // page_size),
        dtype=dtype,
        pool_head_dim=pool_head_dim(backend, head_dim),
    )
    assert kv.pages.shape[0] == 1 + sum(-(-kv_len // page_size) for _, kv_len in rows)
    nobodys = jnp.full((SPARE_PAGES, *kv.pages.shape[1:]), jnp.nan, kv.pages.dtype)
    return q, k, v, PagedKV(pages=jnp.concatenate([kv.pages, nobodys])), batch


def attention(backend: Any, kind: str, head_dim: int, extra: dict[str, Any]) -> Any:
    """What is checked: (queries, new keys, new values, pool, batch) -> outputs and pool."""
    return partial(
        ragged_paged_attention,
        params=AttentionParams(scale=head_dim**-0.5, **extra),
        backend=backend,
        decode_only=kind in DECODE_ONLY,
    )


def poison(num_bytes: int) -> None:
    """Fills memory with NaN and frees it, so that what is allocated next holds NaN."""
    blocks = [
        jnp.full((max(1, num_bytes // 4) * scale,), jnp.nan, jnp.float32) for scale in (1, 1, 4, 16)
    ]
    jax.block_until_ready(blocks)
    for block in blocks:
        block.delete()
