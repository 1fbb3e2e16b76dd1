"""The TPU kernels agree with the plain reference, run in Pallas' interpreter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.ragged_paged_attention import AttentionParams, ragged_paged_attention
from octavo.pallas_kernels.ragged_paged_attention.kernel_tpu import attend_mosaic_tpu
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import TpuTiles
from tests.pallas_kernels.reference import attend_reference

# float32: sums of up to a few hundred products of unit normals, added in another order.
# bfloat16: weights, the pool and the output are rounded to 8 bits of mantissa.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
# Blocks smaller than the contexts and tiles smaller than the chunks, so that loops have turns.
TILES = TpuTiles(decode_pages=4, prefill_pages=2, prefill_tile=16, vmem_bytes=1 << 24)
MIXES = {
    "decode rows of many lengths": [(1, n) for n in (128, 77, 64, 63, 33, 32, 31, 9, 8, 1)],
    "idle decode rows": [(1, 0), (1, 30), (1, 0), (1, 12), (1, 0)],
    "one whole prompt": [(50, 50)],
    "a chunk in the middle": [(33, 100)],
    "chunks of several rows": [(5, 5), (31, 64), (2, 90), (17, 17)],
    "decode and prefill": [(1, 50), (1, 3), (1, 128), (20, 41), (7, 7)],
    "nothing": [],
}
VARIANTS = {
    "full": (AttentionParams(scale=0.25), False),
    "window and sinks": (AttentionParams(scale=0.25, sliding_window=13), True),
    "chunks": (AttentionParams(scale=0.25, attention_chunk=21), False),
    "soft cap": (AttentionParams(scale=0.4, logit_softcap=5.0), False),
}
SHAPE = {"num_tokens": 64, "num_rows": 12, "num_pages": 64}
SHAPE_64 = {**SHAPE, "head_dim": 64, "layout": pool_layout("mosaic_tpu", 64, 8)}
LATENTS = {
    **SHAPE,
    "heads": (6, 1),
    "head_dim": 160,  # more than the lanes of values, and fewer than two tiles of lanes
    "value_size": 96,
    "layout": pool_layout("mosaic_tpu", 160, 8, 96),
}


@functools.cache
def attend(params: AttentionParams):  # type: ignore[no-untyped-def]
    """One compiled program a variant: the lengths of a mix are data."""
    return jax.jit(functools.partial(attend_mosaic_tpu, params=params, tiles=TILES, interpret=True))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_the_reference(variant: str, mix: str) -> None:
    params, has_sinks = VARIANTS[variant]
    rng = np.random.default_rng(len(mix))
    q, _, _, kv, batch = make_case(rng, MIXES[mix], **SHAPE)  # type: ignore[arg-type]
    sinks = jnp.asarray(rng.standard_normal(6), jnp.float32) if has_sinks else None
    got = attend(params)(q, kv, batch, sinks=sinks)
    want = attend_reference(q, kv, batch, params, sinks=sinks)
    np.testing.assert_allclose(got, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "one whole prompt"])
@pytest.mark.parametrize("variant", ["full", "window and sinks"])
def test_heads_of_64_have_their_keys_and_values_in_one_row(variant: str, mix: str) -> None:
    params, has_sinks = VARIANTS[variant]
    rng = np.random.default_rng(len(mix))
    q, _, _, kv, batch = make_case(rng, MIXES[mix], **SHAPE_64)  # type: ignore[arg-type]
    assert kv.pages.shape[1:] == (1, 2, 8, 128)
    sinks = jnp.asarray(rng.standard_normal(6), jnp.float32) if has_sinks else None
    got = attend(params)(q, kv, batch, sinks=sinks)
    want = attend_reference(q, kv.apart(), batch, params, sinks=sinks)
    np.testing.assert_allclose(got, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_of_latents_the_values_are_the_first_lanes(variant: str, mix: str) -> None:
    params, has_sinks = VARIANTS[variant]
    rng = np.random.default_rng(len(mix))
    q, _, _, kv, batch = make_case(rng, MIXES[mix], **LATENTS)  # type: ignore[arg-type]
    assert kv.pages.shape[1:] == (1, 1, 8, 256)
    sinks = jnp.asarray(rng.standard_normal(6), jnp.float32) if has_sinks else None
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, 96)))
    got = attend(params)(padded, kv, batch, sinks=sinks)
    assert got.shape == (64, 6, 128)
    want = attend_reference(padded, kv, batch, params, sinks=sinks)
    got, want = got[..., :96], want[..., :96]
    np.testing.assert_allclose(got, want, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


@pytest.mark.parametrize(
    "shape", [SHAPE, SHAPE_64, LATENTS], ids=["apart", "in one row", "latents"]
)
def test_numbers_that_are_not_finite_beyond_a_rows_end_do_no_harm(shape: dict[str, Any]) -> None:
    params = VARIANTS["full"][0]
    rows = [(1, 50), (1, 3), (20, 41)]
    q, _, _, kv, batch = make_case(np.random.default_rng(0), rows, **shape)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, kv.head_dim - q.shape[2])))
    apart = kv if kv.holds_keys_alone else kv.apart()
    want = attend_reference(q, apart, batch, params)[..., : kv.value_size]
    pages = np.asarray(kv.pages).copy()
    pages[0] = np.nan
    for row, (_, kv_len) in enumerate(rows):
        pages[int(batch.block_table[row, kv_len // 8]), :, :, kv_len % 8 :] = np.nan
    poisoned = dataclasses.replace(kv, pages=jnp.asarray(pages))
    got = attend(params)(q, poisoned, batch)[..., : kv.value_size]
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("head_dim", "value_size"), [(16, None), (64, None), (80, None), (512, None), (576, 512)]
)
@pytest.mark.parametrize(("mix", "decode_only"), [("decode and prefill", False), ("idle", True)])
def test_writes_and_attends_in_bfloat16(
    mix: str, decode_only: bool, head_dim: int, value_size: int | None
) -> None:
    rows = MIXES["decode and prefill"] if not decode_only else MIXES["idle decode rows"]
    params = AttentionParams(scale=head_dim**-0.5)
    case = make_case(
        np.random.default_rng(3),
        rows,
        num_tokens=12 if decode_only else 40,
        num_rows=12,
        heads=(4, 1),
        head_dim=head_dim,
        page_size=32,
        table=4,
        dtype="bfloat16",
        layout=pool_layout("mosaic_tpu", head_dim, 32, value_size) if head_dim >= 64 else None,
        value_size=value_size,
    )
    got, got_kv = ragged_paged_attention(
        *case, params, backend="mosaic_tpu", decode_only=decode_only, interpret=True
    )
    want, want_kv = ragged_paged_attention(*case, params, backend="reference")
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=TOLERANCE["bfloat16"]
    )
    np.testing.assert_array_equal(
        np.asarray(got_kv.pages[1:], np.float32), np.asarray(want_kv.pages[1:], np.float32)
    )
