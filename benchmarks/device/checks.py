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
    ragged_paged_attention,
)
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Outputs are averages of unit normals; bfloat16 rounds weights and outputs to 8 bits."""
SPARE_PAGES, PADDING = 3, 11
REPEATS = 8
"""Runs whose outputs must be the same bit for bit: a race seldom shows in one."""
DECODE_ONLY = ("decode", "idle")

ROWS = {
    "decode": [(1, 1), (1, 64), (1, 150), (1, 333), (1, 700)],
    "prefill": [(130, 130), (64, 200), (37, 300)],
    "mixed": [(1, 90), (1, 257), (1, 5), (97, 160), (5, 5), (40, 512)],
    "idle": [(1, 40), (1, 0), (1, 71)],
    "ends": [(63, 63), (31, 700), (94, 150), (62, 350), (30, 30), (95, 500)],
}
WINDOW = {"sliding_window": 70}
CAP = {"logit_softcap": 5.0}
Check = tuple[str, tuple[int, int], int, int, dict[str, Any], str | None]
"""Kind of rows, heads, head size, page size, attention's parameters, dtype of KV."""
GRID: tuple[Check, ...] = (
    ("decode", (32, 8), 128, 64, {}, None),
    ("prefill", (32, 8), 128, 64, {}, None),
    ("mixed", (32, 8), 128, 64, {}, None),
    # Rows that end within a tile: what they leave goes row by row, and takes a warp's time.
    ("ends", (32, 8), 128, 64, {}, None),
    ("mixed", (32, 8), 64, 16, {}, None),
    ("mixed", (8, 1), 128, 128, {}, None),
    ("mixed", (16, 16), 128, 256, WINDOW, None),
    ("mixed", (16, 8), 96, 32, {}, None),
    ("mixed", (8, 2), 256, 64, CAP, None),
    ("decode", (9, 3), 64, 64, WINDOW | CAP, None),
    ("idle", (32, 8), 128, 64, {}, None),
    ("decode", (32, 8), 128, 64, {}, "int8"),
    ("mixed", (32, 8), 128, 64, {}, "int8"),
    ("ends", (32, 8), 128, 64, {}, "int8"),
    ("mixed", (32, 8), 128, 128, WINDOW | CAP, "fp8"),
    ("mixed", (8, 2), 64, 32, {}, "fp8"),
    ("mixed", (16, 8), 96, 64, CAP, "int8"),
)
TINY: tuple[Check, ...] = (
    ("mixed", (4, 2), 64, 16, {}, None),
    ("decode", (4, 2), 64, 16, WINDOW | CAP, "int8"),
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
    for case in TINY if tiny else GRID:
        if time.monotonic() > deadline_s:
            return
        yield _one(rng, backend, dtype, *case)


def _one(
    rng: np.random.Generator,
    backend: Any,
    dtype: str,
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    extra: dict[str, Any],
    kv_dtype: str | None = None,
) -> dict[str, Any]:
    rows = ROWS[kind]
    used = 1 + sum(-(-kv_len // page_size) for _, kv_len in rows)
    q, k, v, kv, batch = make_inputs(
        rng, backend, dtype, kind, heads, head_dim, page_size, kv_dtype
    )
    num_tokens = q.shape[0]

    def run(name: Any, repeats: int = 1) -> tuple[np.ndarray, list[np.ndarray], bool]:
        attend = attention(name, kind, head_dim, extra)
        program = jax.jit(attend).lower(q, k, v, kv, batch).compile()
        poison(q.size * q.dtype.itemsize)
        out, pool = program(q, k, v, kv, batch)
        again = [program(q, k, v, kv, batch)[0] for _ in range(1, repeats)]
        same = all(jnp.array_equal(out, other, equal_nan=True) for other in again)
        stored = [np.asarray(pool.pages[1:used], np.float32)]
        if pool.scales is not None:
            stored.append(np.asarray(pool.scales[1:used, ..., :page_size]))
        return np.asarray(out, np.float32), stored, same

    out, pool, same = run(backend, REPEATS)
    expected, expected_pool, _ = run("reference")
    live = np.concatenate(
        [np.full(new, kv_len > 0) for new, kv_len in rows]
        + [np.zeros(num_tokens - sum(new for new, _ in rows), bool)]
    )
    worst = float(np.abs(out[live] - expected[live]).max())
    same_pool = all(map(np.array_equal, pool, expected_pool))
    padding_finite = bool(np.isfinite(out[~live]).all())
    name = f"{kind} {heads[0]}/{heads[1]} D{head_dim} P{page_size}"
    return {
        "what": " ".join(
            [name, *(f"{key}={value}" for key, value in extra.items()), *filter(None, [kv_dtype])]
        ),
        "worst": worst,
        "pool": "same" if same_pool else "DIFFERS",
        "repeats": "same" if same else "DIFFER",
        "ok": worst <= TOLERANCE[dtype] and same_pool and same and padding_finite,
    }


def make_inputs(
    rng: np.random.Generator,
    backend: Any,
    dtype: str,
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    kv_dtype: str | None = None,
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
        kv_dtype=kv_dtype,
        layout=pool_layout(backend, head_dim, page_size),
        as_bits=backend in ("xla", "reference"),
    )
    assert kv.pages.shape[0] == 1 + sum(-(-kv_len // page_size) for _, kv_len in rows)

    def with_nobodys(pool: jax.Array) -> jax.Array:
        poison = jnp.nan if jnp.issubdtype(pool.dtype, jnp.floating) else 127
        nobodys = jnp.full((SPARE_PAGES, *pool.shape[1:]), poison, pool.dtype)
        return jnp.concatenate([pool, nobodys])

    return q, k, v, jax.tree.map(with_nobodys, kv), batch


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
