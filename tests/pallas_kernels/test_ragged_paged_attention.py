"""Every implementation of ragged paged attention agrees with the plain reference."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from octavo.pallas_kernels.compat import shard_map
from octavo.pallas_kernels.cpu import native_attention
from octavo.pallas_kernels.ragged_paged_attention import (
    AttentionParams,
    PagedKV,
    ragged_paged_attention,
)
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from octavo.pallas_kernels.ragged_paged_attention.tiles_xla import XlaTiles
from octavo.pallas_kernels.ragged_paged_attention.xla import attend_xla
from tests.pallas_kernels.reference import attend_reference

# float32: sums of up to a few hundred products of unit normals, added in another order.
# bfloat16: the pool and the output are rounded to 8 bits of mantissa.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


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
    "chunks": AttentionParams(scale=0.25, attention_chunk=21),
    "soft cap": AttentionParams(scale=0.4, logit_softcap=5.0),
}


# As one program: operation by operation, each would be compiled by itself for every shape.
reference = jax.jit(
    functools.partial(ragged_paged_attention, backend="reference"), static_argnames="params"
)


def check(rows: list[tuple[int, int]], params: AttentionParams, **shape: object) -> None:
    rng = np.random.default_rng(len(rows) + 1)
    num_tokens = sum(q for q, _ in rows)
    case = make_case(rng, rows, num_tokens=num_tokens + 5, num_rows=len(rows) + 3, **shape)  # type: ignore[arg-type]
    decode_only = all(q == 1 for q, _ in rows)
    got, got_kv = ragged_paged_attention(*case, params, backend="xla", decode_only=decode_only)
    want, want_kv = reference(*case, params)
    live = np.concatenate([np.full(q, kv > 0) for q, kv in rows] or [np.zeros(0, bool)])
    tolerance = TOLERANCE[str(shape.get("dtype", "float32"))]
    np.testing.assert_allclose(
        np.asarray(got[:num_tokens], np.float32)[live],
        np.asarray(want[:num_tokens], np.float32)[live],
        atol=tolerance,
        rtol=tolerance,
    )
    assert np.isfinite(np.asarray(got, np.float32)).all()
    for got_pool, want_pool in zip(jax.tree.leaves(got_kv), jax.tree.leaves(want_kv), strict=True):
        np.testing.assert_array_equal(np.asarray(got_pool[1:]), np.asarray(want_pool[1:]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", MIXES)
def test_matches_the_reference(mix: str, variant: str) -> None:
    check(MIXES[mix], VARIANTS[variant])


LATENTS = {"heads": (6, 1), "head_dim": 24, "value_size": 16}
"""Keys alone, whose beginnings are the values."""


@pytest.mark.parametrize("kv_dtype", [None, "bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("mix", MIXES)
def test_matches_the_reference_where_values_are_the_beginnings_of_keys(
    mix: str, kv_dtype: str | None
) -> None:
    check(MIXES[mix], VARIANTS["full"], **LATENTS, kv_dtype=kv_dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("page_size", "table"), [(16, 8), (64, 2)])
def test_matches_the_reference_for_latents_of_a_real_size(
    page_size: int, table: int, variant: str
) -> None:
    check(
        MIXES["decode and prefill"],
        VARIANTS[variant],
        heads=(16, 1),
        head_dim=576,
        value_size=512,
        page_size=page_size,
        table=table,
    )


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_latents_are_read_as_keys_whose_beginnings_lie_again_as_values(
    kv_dtype: str | None,
) -> None:
    rows = MIXES["decode and prefill"]
    q, k, _, kv, batch = make_case(
        np.random.default_rng(4), rows, num_tokens=51, num_rows=6, **LATENTS, kv_dtype=kv_dtype
    )
    assert kv.pages.shape[1] == 1
    got, got_kv = ragged_paged_attention(q, k, None, kv, batch, VARIANTS["full"])
    numbers = got_kv.pages.astype(jnp.float32)
    if got_kv.scales is not None:
        of_values, of_rest = (got_kv.scales[:, each, None, :, :, None] for each in (0, 1))
        scale = [jnp.broadcast_to(of_values, (*numbers.shape[:-1], 16)),
                 jnp.broadcast_to(of_rest, (*numbers.shape[:-1], 8))]  # fmt: skip
        numbers = numbers * jnp.concatenate(scale, axis=-1).reshape(numbers.shape)
    twice = PagedKV(pages=jnp.concatenate([numbers, numbers], axis=1))
    want = attend_reference(q, twice, batch, VARIANTS["full"])
    # What padding is told is nobody's business.
    live = sum(num_tokens for num_tokens, _ in rows)
    np.testing.assert_allclose(
        got[:live], want[:live, :, :16], atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"]
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (9, 3), (20, 4)])
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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", MIXES)
def test_matches_the_reference_where_one_function_computes_decode_rows(
    mix: str, variant: str
) -> None:
    check(MIXES[mix], VARIANTS[variant], heads=(9, 3), head_dim=64)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("page_size", "table"), [(8, 16), (16, 8), (64, 2)])
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_one_function_reads_narrow_pools(
    kv_dtype: str, variant: str, page_size: int, table: int
) -> None:
    check(
        MIXES["decode rows of many lengths"],
        VARIANTS[variant],
        heads=(9, 3),
        head_dim=64,
        page_size=page_size,
        table=table,
        kv_dtype=kv_dtype,
    )


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 4), 128), ((4, 1), 256), ((9, 3), 96), ((20, 4), 32)]
)
@pytest.mark.parametrize(("page_size", "table"), [(8, 16), (32, 4), (256, 1)])
def test_one_function_takes_heads_and_pages(
    heads: tuple[int, int], head_dim: int, page_size: int, table: int
) -> None:
    check(
        MIXES["decode rows of many lengths"],
        VARIANTS["window"],
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        table=table,
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mix", ["decode rows of many lengths", "decode and prefill"])
def test_the_one_function_computes_what_products_do(mix: str, variant: str) -> None:
    rows, params = MIXES[mix], VARIANTS[variant]
    num_tokens = sum(q for q, _ in rows)
    shape: dict[str, Any] = {"num_tokens": num_tokens, "num_rows": len(rows)}
    q, _, _, kv, batch = make_case(np.random.default_rng(1), rows, **shape, head_dim=64)
    sinks = jnp.linspace(-1.0, 3.0, q.shape[1])
    attend = functools.partial(attend_xla, sinks=sinks, decode_only=num_tokens == len(rows))
    got, products = (
        attend(q, kv, batch, params, tiles=XlaTiles(native_decode=native)) for native in (1, 0)
    )
    want = attend_reference(q, kv, batch, params, sinks=sinks)
    np.testing.assert_allclose(got, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])
    np.testing.assert_allclose(products, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("rise", [-500.0, -30.0, 30.0, 59.0, 61.0, 500.0, np.inf])
def test_the_one_function_takes_scores_that_leave_their_reference(
    rise: float, page_size: int, window: int | None
) -> None:
    """One key, far from those that a row's weights are taken relative to, and others between."""
    rng = np.random.default_rng(2)
    lengths = [1, 9, 130, 256]
    q, _, _, kv, batch = make_case(
        rng,
        [(1, length) for length in lengths],
        num_tokens=4,
        num_rows=4,
        heads=(4, 2),
        head_dim=64,
        page_size=page_size,
        table=256 // page_size,
    )
    # Only the first dimension of a key counts: what is there is its score.
    q = jnp.zeros_like(q).at[..., 0].set(1.0)
    pages = kv.pages.at[:, 0, :, :, 0].set(jnp.asarray(rng.normal(size=kv.pages.shape[2:4])))
    for row, length in enumerate(lengths):
        for key, by in ((length // 2, rise / 2), (length - 1, rise)):
            page = batch.block_table[row, key // page_size]
            pages = pages.at[page, 0, row % 2, key % page_size, 0].set(by)
    params = AttentionParams(scale=1.0, sliding_window=window)
    arguments = (q, replace(kv, pages=pages), batch, params)
    assert native_attention.takes(64, kv)
    got = attend_xla(*arguments, sinks=None, decode_only=True)
    if np.isinf(rise):  # what is not a number stays in its row and head
        numbers = np.isfinite(np.asarray(got)).all(axis=-1)
        for row in range(4):
            np.testing.assert_array_equal(numbers[row], [head // 2 != row % 2 for head in range(4)])
        return
    want = attend_reference(*arguments, sinks=None)
    np.testing.assert_allclose(got, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [
        ({"head_dim": 64}, True),
        ({"head_dim": 96, "page_size": 32}, True),
        ({"head_dim": 16}, False),
        ({"head_dim": 64, "page_size": 4}, False),
        ({"head_dim": 64, "kv_dtype": "int8"}, True),
        ({"head_dim": 64, "kv_dtype": "fp8"}, False),
        ({"head_dim": 64, "kv_dtype": "bfloat16"}, True),
    ],
)
def test_what_the_one_function_takes(shape: dict[str, Any], is_taken: bool) -> None:
    case = make_case(np.random.default_rng(0), [(1, 9)], num_tokens=1, num_rows=1, **shape)
    q, kv, batch = case[0], case[3], case[4]
    assert native_attention.takes(q.shape[2], kv) == is_taken
    attend = functools.partial(attend_xla, params=AttentionParams(scale=1.0))
    for quick, decode_only in itertools.product((False, True), repeat=2):
        step = functools.partial(attend, quick=quick, decode_only=decode_only)
        lowered = jax.jit(step).lower(q, kv, batch)
        assert ("xla_cpu_small_call" in lowered.as_text()) == (is_taken and not quick)


def test_one_function_computes_each_devices_heads() -> None:
    rows, params = MIXES["decode rows of many lengths"], VARIANTS["full"]
    size = {"num_tokens": len(rows), "num_rows": len(rows)}
    case = make_case(np.random.default_rng(0), rows, **size, heads=(6, 2), head_dim=64)
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    heads, pool = PartitionSpec(None, "heads"), PartitionSpec(None, None, "heads")
    attend = shard_map(
        functools.partial(ragged_paged_attention, params=params, decode_only=True),
        mesh=mesh,
        in_specs=(heads, heads, heads, pool, PartitionSpec()),
        out_specs=(heads, pool),
    )
    got, _ = jax.jit(attend)(*case)
    want, _ = ragged_paged_attention(*case, params, backend="reference")
    np.testing.assert_allclose(got, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


def test_a_row_of_numbers_that_are_not_finite_spoils_no_other() -> None:
    rows = MIXES["decode rows of many lengths"]
    q, k, v, kv, batch = make_case(
        np.random.default_rng(0), rows, num_tokens=len(rows), num_rows=len(rows), head_dim=64
    )
    spoilt = batch.block_table[2, : -(-rows[2][1] // 8)]
    kv = PagedKV(pages=kv.pages.at[spoilt].set(jnp.nan))
    got, _ = ragged_paged_attention(q, k, v, kv, batch, VARIANTS["full"], decode_only=True)
    is_finite = np.isfinite(np.asarray(got)).all(axis=(1, 2))
    np.testing.assert_array_equal(is_finite, np.arange(len(rows)) != 2)


def test_matches_the_reference_in_bfloat16() -> None:
    check(MIXES["decode and prefill"], VARIANTS["full"], dtype="bfloat16")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_matches_the_reference_over_narrow_pools(kv_dtype: str, variant: str) -> None:
    # Both read the same rounded numbers, and compute in float32: the tolerance is float32's.
    check(MIXES["decode and prefill"], VARIANTS[variant], kv_dtype=kv_dtype)
    check(MIXES["decode rows of many lengths"], VARIANTS[variant], kv_dtype=kv_dtype, heads=(9, 3))


STEP = {"bfloat16": 2.0**-9, "int8": 0.5 / 127, "fp8": 2.0**-4}
"""Half the distance between neighbours, of a head's largest number."""


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("kv_dtype", STEP)
def test_narrow_pools_change_outputs_within_their_rounding(kv_dtype: str, backend: Any) -> None:
    rows, params = MIXES["decode and prefill"], VARIANTS["full"]
    num_tokens, dim = sum(q for q, _ in rows), 16
    shape: dict[str, Any] = {"num_tokens": num_tokens, "num_rows": len(rows), "head_dim": dim}
    wide, narrow = (
        make_case(np.random.default_rng(3), rows, **shape, kv_dtype=name)
        for name in ("float32", kv_dtype)
    )
    want, _ = ragged_paged_attention(*wide, params, backend="reference")
    got, _ = ragged_paged_attention(*narrow, params, backend=backend)
    # Every number of a key or value is off by `STEP` of its head's largest at most. A score then
    # moves by ds = scale * |q|_1 * dk at most, and weights by a factor within exp(+-2 ds).
    largest = max(float(jnp.abs(x).max()) for x in (wide[3].pages, *wide[1:3]))
    off = STEP[kv_dtype] * largest
    score = params.scale * np.abs(np.asarray(wide[0], np.float64)).sum(-1).max() * off
    bound = np.expm1(2 * score) * largest + off
    error = np.abs(np.asarray(got) - np.asarray(want))
    assert 0 < error.max() < bound
    # Roundings are as often up as down: the usual error is far below the bound.
    assert error.mean() < 2 * STEP[kv_dtype]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_narrow_pools_are_updated_in_place_under_donation(kv_dtype: str) -> None:
    case = make_case(
        np.random.default_rng(0), [(1, 9)], num_tokens=1, num_rows=1, kv_dtype=kv_dtype
    )
    step = jax.jit(
        lambda q, k, v, kv, b: ragged_paged_attention(q, k, v, kv, b, VARIANTS["full"])[1],
        donate_argnums=3,
    )
    big = jax.tree.map(lambda x: jnp.zeros((4096, *x.shape[1:]), x.dtype), case[3])
    compiled = step.lower(*case[:3], big, case[4]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < big.pages.nbytes // 8


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


@pytest.mark.parametrize("head_dim", [16, 64])
def test_the_pool_is_updated_in_place_under_donation(head_dim: int) -> None:
    case = make_case(
        np.random.default_rng(0), [(1, 9)], num_tokens=1, num_rows=1, head_dim=head_dim
    )
    step = jax.jit(
        lambda *given: ragged_paged_attention(*given, VARIANTS["full"], decode_only=True)[1],
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
    with pytest.raises(ValueError, match="x 2 or none"):
        ragged_paged_attention(q, k, None, kv, batch, VARIANTS["full"])
    with pytest.raises(ValueError, match="does not hold heads"):
        ragged_paged_attention(
            jnp.pad(q, ((0, 0), (0, 0), (0, 8))), None, None, kv, batch, VARIANTS["full"]
        )
    with pytest.raises(ValueError, match="want one of xla, reference"):
        ragged_paged_attention(q, k, v, kv, batch, VARIANTS["full"], backend="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("decode_only", [False, True])
def test_a_pool_that_holds_the_tokens_already_is_read_and_not_written(
    backend: Any, decode_only: bool
) -> None:
    rows = [(1, 9), (1, 21)] if decode_only else [(1, 9), (5, 13), (12, 12)]
    num_tokens = sum(new for new, _ in rows)
    q, k, v, kv, batch = make_case(
        np.random.default_rng(0), rows, num_tokens=num_tokens, num_rows=len(rows), head_dim=32
    )
    attend = functools.partial(
        ragged_paged_attention,
        params=VARIANTS["full"],
        backend=backend,
        decode_only=decode_only,
    )
    written, filled = attend(q, k, v, kv, batch)
    read, same = attend(q, None, None, filled, batch)
    np.testing.assert_array_equal(np.asarray(read), np.asarray(written))
    assert same is filled
