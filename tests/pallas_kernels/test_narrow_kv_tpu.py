"""The TPU kernels write and read pools of int8 and fp8 as the plain reference does."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from octavo.pallas_kernels.ragged_paged_attention import AttentionParams, PagedKV
from octavo.pallas_kernels.ragged_paged_attention.kernel_tpu import attend_mosaic_tpu
from octavo.pallas_kernels.ragged_paged_attention.kv_write import write_kv
from octavo.pallas_kernels.ragged_paged_attention.kv_write_tpu import write_kv_mosaic_tpu
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import TpuTiles
from tests.pallas_kernels.reference import attend_reference

# Both read the same rounded numbers and scales. float32: sums of up to a few hundred products of
# unit normals, in another order, with a scale before or after the sum. bfloat16: weights times
# scales and outputs are rounded to 8 bits of mantissa.
TOLERANCE = {"float32": 4e-5, "bfloat16": 2e-2}
# Blocks smaller than the contexts and tiles smaller than the chunks, so that loops have turns.
TILES = TpuTiles(decode_pages=3, prefill_pages=2, prefill_tile=16, vmem_bytes=1 << 24)
MIXES = {
    "decode rows of many lengths": [(1, n) for n in (256, 129, 128, 97, 96, 65, 33, 32, 31, 1)],
    "idle decode rows": [(1, 0), (1, 130), (1, 0), (1, 12), (1, 0)],
    "chunks of several rows": [(5, 5), (31, 164), (2, 90)],
    "decode and prefill": [(1, 50), (1, 3), (1, 228), (20, 41), (7, 7)],
    "nothing": [],
}
VARIANTS = {
    "full": (AttentionParams(scale=0.125), False),
    "window, soft cap and sinks": (
        AttentionParams(scale=0.2, sliding_window=45, logit_softcap=5.0),
        True,
    ),
}
LATENTS = {"heads": (6, 1), "head_dim": 160, "value_size": 128}
PAIRS = list(zip(("int8", "fp8"), VARIANTS, strict=True))


def apart(kv: PagedKV) -> PagedKV:
    """The pool as plain XLA has it."""
    return kv if kv.holds_keys_alone else kv.apart()


def case(rng: np.random.Generator, rows: list[tuple[int, int]], kv_dtype: str, **shape: Any) -> Any:
    """A case with the pool as an engine on a TPU has it."""
    shape = {"page_size": 32, "head_dim": 64, "num_tokens": 40, "num_rows": 10, **shape}
    page_size = shape["page_size"]
    return make_case(
        rng,
        rows,
        table=256 // page_size,
        kv_dtype=kv_dtype,
        layout=pool_layout("mosaic_tpu", shape["head_dim"], page_size, shape.get("value_size")),
        as_bits=False,
        **shape,
    )


@functools.cache
def attend(params: AttentionParams) -> Any:
    """One compiled program a variant and dtype: the lengths of a mix are data."""
    return jax.jit(functools.partial(attend_mosaic_tpu, params=params, tiles=TILES, interpret=True))


def check(q: Any, kv: PagedKV, batch: Any, variant: str, given: PagedKV | None = None) -> None:
    """Compares the kernel, over `given` if there is one, with the reference over `kv`."""
    params, has_sinks = VARIANTS[variant]
    wider = ((0, 0), (0, 0), (0, kv.head_dim - q.shape[2]))
    q = jnp.pad(q, wider)
    sinks = None
    if has_sinks:
        sinks = jnp.asarray(np.random.default_rng(7).standard_normal(q.shape[1]), jnp.float32)
    got = attend(params)(q, kv if given is None else given, batch, sinks=sinks)
    want = attend_reference(q, apart(kv), batch, params, sinks=sinks)[..., : kv.value_size]
    tolerance = TOLERANCE[q.dtype.name]
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("kv_dtype", "variant"), PAIRS)
def test_matches_the_reference(kv_dtype: str, variant: str, mix: str) -> None:
    rng = np.random.default_rng(len(mix))
    q, _, _, kv, batch = case(rng, MIXES[mix], kv_dtype, num_pages=48)
    check(q, kv, batch, variant)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("kv_dtype", "variant"), PAIRS)
def test_latents_have_a_scale_of_values_and_one_of_other_keys(
    kv_dtype: str, variant: str, mix: str
) -> None:
    rng = np.random.default_rng(len(mix))
    q, _, _, kv, batch = case(rng, MIXES[mix], kv_dtype, num_pages=48, **LATENTS)
    assert kv.pages.shape[1:] == (1, 1, 32, 256)
    scales = np.asarray(kv.scales)[..., :32]
    assert not np.allclose(scales[:, 0], scales[:, 1], rtol=0.01)
    check(q, kv, batch, variant)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "heads", "head_dim", "page_size"),
    [
        ("fp8", "bfloat16", (4, 1), 96, 128),
        ("int8", "float32", (6, 3), 256, 256),
        # A page is half a tile of sublanes.
        ("int8", "bfloat16", (4, 2), 64, 16),
    ],
)
def test_matches_the_reference_for_heads_and_pages(
    kv_dtype: str, dtype: str, heads: tuple[int, int], head_dim: int, page_size: int
) -> None:
    q, _, _, kv, batch = case(
        np.random.default_rng(0),
        MIXES["decode and prefill"],
        kv_dtype,
        dtype=dtype,
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
    )
    check(q, kv, batch, "window, soft cap and sinks")


@pytest.mark.parametrize("shape", [{}, LATENTS], ids=["apart", "latents"])
@pytest.mark.parametrize(("kv_dtype", "variant"), PAIRS)
def test_numbers_that_are_not_finite_beyond_a_rows_end_do_no_harm(
    kv_dtype: str, variant: str, shape: dict[str, Any]
) -> None:
    rows = [(1, 50), (1, 3), (20, 41)]
    q, _, _, kv, batch = case(np.random.default_rng(0), rows, kv_dtype, num_pages=48, **shape)
    pages, scales = np.asarray(kv.pages).copy(), np.asarray(kv.scales).copy()
    scales[0] = np.nan
    for row, (_, kv_len) in enumerate(rows):
        page = int(batch.block_table[row, kv_len // 32])
        scales[page, :, :, kv_len % 32 :] = np.nan
        if kv_dtype == "fp8":
            pages[page, :, :, kv_len % 32 :] = np.nan
    poisoned = replace(kv, pages=jnp.asarray(pages), scales=jnp.asarray(scales))
    check(q, kv, batch, variant, poisoned)


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "page_size", "rows", "decode_only"),
    [
        ("int8", 128, 32, MIXES["decode and prefill"], False),
        # Latents.
        ("int8", 160, 32, MIXES["decode and prefill"], False),
        ("fp8", 160, 16, [(1, 64), (1, 0), (1, 33)], True),
        # Several tiles of numbers share a tile of scales, and a row begins and ends within one.
        ("fp8", 128, 256, [(1, 200), (150, 180), (1, 129)], False),
        ("int8", 128, 256, [(1, 130), (1, 0), (1, 128), (1, 65)], True),
        ("fp8", 64, 16, [(1, 50), (1, 16), (37, 41)], False),
        ("int8", 128, 16, [(1, 64), (1, 0), (1, 33)], True),
    ],
)
def test_writes_what_plain_xla_writes(
    kv_dtype: str, head_dim: int, page_size: int, rows: list[tuple[int, int]], decode_only: bool
) -> None:
    num_tokens = sum(new for new, _ in rows) + (0 if decode_only else 5)
    _, k, v, kv, batch = case(
        np.random.default_rng(5),
        rows,
        kv_dtype,
        num_tokens=num_tokens,
        num_rows=len(rows) + (0 if decode_only else 2),
        page_size=page_size,
        **(LATENTS if head_dim == 160 else {"head_dim": head_dim}),
    )
    k = jnp.pad(k, ((0, 0), (0, 0), (0, kv.head_dim - k.shape[2])))
    # This interpreter keeps blocks between visits, as a TPU does.
    got = write_kv_mosaic_tpu(
        kv, k, v, batch, decode_only=decode_only, interpret=pltpu.InterpretParams()
    )
    want = write_kv(apart(kv), k, v, batch)
    assert (np.asarray(want.pages) != np.asarray(apart(kv).pages)).any()
    if kv.in_one_row:
        want = want.side_by_side()
    np.testing.assert_array_equal(
        np.asarray(got.pages[1:], np.float32), np.asarray(want.pages[1:], np.float32)
    )
    np.testing.assert_array_equal(
        np.asarray(got.scales)[1:, ..., :page_size], np.asarray(want.scales)[1:, ..., :page_size]
    )
