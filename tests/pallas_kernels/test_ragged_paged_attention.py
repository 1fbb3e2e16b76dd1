"""Every implementation of ragged paged attention agrees with the plain reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
    ragged_paged_attention,
)

# float32: sums of up to a few hundred products of unit normals, added in another order.
# bfloat16: the pool and the output are rounded to 8 bits of mantissa.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def make_case(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    *,
    num_tokens: int,
    num_rows: int,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    page_size: int = 8,
    table: int = 16,
    dtype: str = "float32",
) -> tuple[jax.Array, jax.Array, jax.Array, PagedKV, RaggedBatch]:
    """A batch of (new tokens, KV length with them) rows over a shuffled, poisoned pool."""
    num_heads, num_kv_heads = heads
    num_pages = 1 + sum(-(-kv_len // page_size) for _, kv_len in rows)
    pool = rng.standard_normal((num_pages, 2, num_kv_heads, page_size, head_dim))
    free = list(rng.permutation(num_pages - 1) + 1)
    block_table = np.zeros((num_rows, table), np.int32)
    kv_lens = np.zeros(num_rows, np.int32)
    cu = np.zeros(num_rows + 1, np.int32)
    token_row = np.zeros(num_tokens, np.int32)
    token_page = np.zeros(num_tokens, np.int32)
    token_offset = np.zeros(num_tokens, np.int32)
    for i, (q_len, kv_len) in enumerate(rows):
        for j in range(-(-kv_len // page_size)):
            block_table[i, j] = free.pop()
        kv_lens[i] = kv_len
        cu[i + 1] = cu[i] + q_len
        span = slice(cu[i], cu[i + 1])
        position = np.arange(kv_len - q_len, kv_len) if kv_len else np.zeros(q_len, np.int64)
        token_row[span] = i
        token_page[span] = block_table[i, position // page_size] if kv_len else 0
        token_offset[span] = position % page_size
    cu[len(rows) + 1 :] = cu[len(rows)]
    batch = RaggedBatch(
        block_table=jnp.asarray(block_table),
        kv_lens=jnp.asarray(kv_lens),
        cu_q_lens=jnp.asarray(cu),
        token_row=jnp.asarray(token_row),
        token_page=jnp.asarray(token_page),
        token_offset=jnp.asarray(token_offset),
        num_decode_rows=jnp.int32(sum(1 for _ in _leading_ones(rows))),
        num_rows=jnp.int32(len(rows)),
    )
    q = jnp.asarray(rng.standard_normal((num_tokens, num_heads, head_dim)), dtype)
    k, v = jnp.asarray(rng.standard_normal((2, num_tokens, num_kv_heads, head_dim)), dtype)
    return q, k, v, PagedKV(pages=jnp.asarray(pool, dtype)), batch


def _leading_ones(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    lead = []
    for row in rows:
        if row[0] != 1:
            break
        lead.append(row)
    return lead


MIXES = {
    "one decode row": [(1, 1)],
    "decode rows of many lengths": [(1, n) for n in (128, 77, 64, 63, 9, 8, 1)],
    "more rows than a group": [(1, 1 + 5 * i) for i in range(21)],
    "an idle decode row": [(1, 30), (1, 0), (1, 12)],
    "one whole prompt": [(40, 40)],
    "a chunk in the middle": [(33, 100)],
    "chunks of several rows": [(5, 5), (31, 64), (2, 90), (17, 17)],
    "decode and prefill": [(1, 50), (1, 3), (1, 128), (20, 41), (7, 7)],
    "nothing": [],
}
VARIANTS = {
    "full": AttentionParams(scale=0.25),
    "window": AttentionParams(scale=0.25, sliding_window=13),
    "soft cap": AttentionParams(scale=0.4, logit_softcap=5.0),
}


def check(rows: list[tuple[int, int]], params: AttentionParams, **shape: object) -> None:
    rng = np.random.default_rng(len(rows) + 1)
    num_tokens = sum(q for q, _ in rows)
    case = make_case(rng, rows, num_tokens=num_tokens + 5, num_rows=len(rows) + 3, **shape)  # type: ignore[arg-type]
    got, got_kv = ragged_paged_attention(*case, params, backend="xla")
    want, want_kv = ragged_paged_attention(*case, params, backend="reference")
    live = np.concatenate([np.full(q, kv > 0) for q, kv in rows] or [np.zeros(0, bool)])
    tolerance = TOLERANCE[str(shape.get("dtype", "float32"))]
    np.testing.assert_allclose(
        np.asarray(got[:num_tokens], np.float32)[live],
        np.asarray(want[:num_tokens], np.float32)[live],
        atol=tolerance,
        rtol=tolerance,
    )
    assert np.isfinite(np.asarray(got, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(got_kv.pages[1:]), np.asarray(want_kv.pages[1:]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", MIXES)
def test_matches_the_reference(mix: str, variant: str) -> None:
    check(MIXES[mix], VARIANTS[variant])


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (9, 3)])
@pytest.mark.parametrize(("page_size", "table"), [(16, 8), (64, 2), (128, 1)])
def test_matches_the_reference_for_heads_and_pages(
    heads: tuple[int, int], page_size: int, table: int
) -> None:
    check(
        MIXES["decode and prefill"],
        VARIANTS["full"],
        heads=heads,
        page_size=page_size,
        table=table,
        head_dim=64,
    )


def test_matches_the_reference_in_bfloat16() -> None:
    check(MIXES["decode and prefill"], VARIANTS["full"], dtype="bfloat16")


def test_decode_only_leaves_nothing_out() -> None:
    rows = MIXES["decode rows of many lengths"]
    case = make_case(np.random.default_rng(0), rows, num_tokens=8, num_rows=8)
    got, _ = ragged_paged_attention(*case, VARIANTS["full"], decode_only=True)
    want, _ = ragged_paged_attention(*case, VARIANTS["full"], backend="reference")
    np.testing.assert_allclose(got[:7], want[:7], atol=TOLERANCE["float32"])


def test_the_steps_own_kv_is_written_before_it_is_read() -> None:
    q, k, v, kv, batch = make_case(
        np.random.default_rng(0), [(3, 3)], num_tokens=3, num_rows=1, heads=(1, 1)
    )
    out, kv = ragged_paged_attention(q, k, v, kv, batch, VARIANTS["full"])
    np.testing.assert_allclose(out[0], v[0], atol=1e-6)  # the first token sees only itself
    page = int(batch.block_table[0, 0])
    np.testing.assert_array_equal(np.asarray(kv.k[page, 0, :3]), np.asarray(k[:, 0]))


def test_the_pool_is_updated_in_place_under_donation() -> None:
    case = make_case(np.random.default_rng(0), [(1, 9)], num_tokens=1, num_rows=1)
    step = jax.jit(
        lambda q, k, v, kv, b: ragged_paged_attention(q, k, v, kv, b, VARIANTS["full"])[1],
        donate_argnums=3,
    )
    big = jax.tree.map(lambda x: jnp.zeros((4096, *x.shape[1:])), case[3])
    compiled = step.lower(*case[:3], big, case[4]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < big.pages.nbytes // 8


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, kv, batch = make_case(np.random.default_rng(0), [(1, 9)], num_tokens=1, num_rows=1)
    with pytest.raises(ValueError, match=r"want \[T, Hq, D\]"):
        ragged_paged_attention(q[:, :5], k, v, kv, batch, VARIANTS["full"])
    with pytest.raises(ValueError, match="does not hold heads"):
        ragged_paged_attention(q, k[:, :1], v[:, :1], kv, batch, VARIANTS["full"])
    with pytest.raises(ValueError, match="want 'xla' or 'reference'"):
        ragged_paged_attention(q, k, v, kv, batch, VARIANTS["full"], backend="cuda")  # type: ignore[arg-type]
