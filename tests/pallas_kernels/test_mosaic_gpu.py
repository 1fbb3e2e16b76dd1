"""The Hopper kernels agree with the plain reference, run in Pallas' interpreter."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.compat import interprets_mosaic_gpu
from octavo.pallas_kernels.ragged_paged_attention import AttentionParams
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from tests.pallas_kernels.reference import attend_reference

pytestmark = pytest.mark.skipif(
    not interprets_mosaic_gpu(), reason="JAX 0.12 is the first to interpret all of these kernels"
)

# Weights of the softmax, the pool and outputs are rounded to bfloat16's 8 bits of mantissa.
TOLERANCE = 2e-2
HEADS = (2, 1)


def interpreter():  # type: ignore[no-untyped-def]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


@pytest.mark.parametrize(
    ("head_dim", "page_size", "params", "has_sinks"),
    [
        (64, 16, AttentionParams(scale=0.125), True),
        (64, 128, AttentionParams(scale=0.125, sliding_window=70, logit_softcap=5.0), False),
        (64, 64, AttentionParams(scale=0.125, attention_chunk=100), False),
        (256, 64, AttentionParams(scale=0.0625), True),
    ],
)
@pytest.mark.parametrize("num_warpgroups", [1, 2])
@pytest.mark.parametrize("num_programs", [1, 2])
def test_decode_splits_and_combines(
    head_dim: int,
    page_size: int,
    params: AttentionParams,
    has_sinks: bool,
    num_warpgroups: int,
    num_programs: int,
) -> None:
    from octavo.pallas_kernels.ragged_paged_attention.decode_gpu import decode_gpu
    from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import DecodeTiles

    rng = np.random.default_rng(0)
    rows = [(1, 250), (1, 0), (1, 65)]
    q, _, _, kv, batch = make_case(
        rng,
        rows,
        num_tokens=3,
        num_rows=3,
        heads=HEADS,
        head_dim=head_dim,
        page_size=page_size,
        table=256 // page_size,
        dtype="bfloat16",
    )
    sinks = jnp.asarray(rng.standard_normal(HEADS[0]), jnp.float32) if has_sinks else None
    # Six tiles over two programs: the first row is cut, and the second program has its end and all
    # of the last row; two stages, so that they turn over. Of two warpgroups the second one begins
    # the second program's second row.
    tiles = DecodeTiles(
        tile=64,
        num_stages=2,
        num_programs=num_programs,
        min_tiles=1,
        num_warpgroups=num_warpgroups,
    )
    got = decode_gpu(q, kv, batch, params, sinks=sinks, tiles=tiles, interpret=interpreter())
    want = attend_reference(q, kv, batch, params, sinks=sinks).astype(jnp.float32)
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "params", "has_sinks"),
    [
        (64, 64, AttentionParams(scale=0.125), False),
        (64, 32, AttentionParams(scale=0.125, sliding_window=30), True),
        # The second row's queries are of two chunks, which a tile has both of.
        (64, 64, AttentionParams(scale=0.125, attention_chunk=150), False),
        (256, 128, AttentionParams(scale=0.0625), False),
    ],
)
def test_prefill_chunks_do_not_write_over_each_other(
    head_dim: int, page_size: int, params: AttentionParams, has_sinks: bool
) -> None:
    from octavo.pallas_kernels.ragged_paged_attention.prefill_gpu import prefill_gpu
    from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import PrefillTiles

    rng = np.random.default_rng(1)
    rows = [(1, 70), (67, 200), (5, 5)]
    q, _, _, kv, batch = make_case(
        rng,
        rows,
        num_tokens=74,
        num_rows=3,
        heads=HEADS,
        head_dim=head_dim,
        page_size=page_size,
        table=256 // page_size,
        dtype="bfloat16",
    )
    sinks = jnp.asarray(rng.standard_normal(HEADS[0]), jnp.float32) if has_sinks else None
    # Nine tiles over three programs: the first one's item is cut, and the second one's too.
    tiles = PrefillTiles(tile=64, num_stages=2, num_programs=3, min_tiles=1)
    got = prefill_gpu(q, kv, batch, params, sinks=sinks, tiles=tiles, interpret=interpreter())
    want = attend_reference(q, kv, batch, params, sinks=sinks)
    np.testing.assert_allclose(
        np.asarray(got, np.float32)[1:73], np.asarray(want, np.float32)[1:73], atol=TOLERANCE
    )


@pytest.mark.parametrize("window", [200, 150, 129, 64, 1])
@pytest.mark.parametrize("num_programs", [1, 3])
def test_tiles_wholly_within_a_window_are_walked_without_a_mask(
    window: int, num_programs: int
) -> None:
    """A chunk of 20 behind 370: with a window of 200, of five tiles two are before those that all
    queries of a tile of 64 see whole, and two after."""
    from octavo.pallas_kernels.ragged_paged_attention.prefill_gpu import prefill_gpu
    from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import PrefillTiles

    rng = np.random.default_rng(2)
    q, _, _, kv, batch = make_case(
        rng,
        [(1, 70), (20, 390), (64, 320)],
        num_tokens=88,
        num_rows=3,
        heads=HEADS,
        head_dim=64,
        page_size=64,
        table=448 // 64,
        dtype="bfloat16",
    )
    params = AttentionParams(scale=0.125, sliding_window=window)
    tiles = PrefillTiles(tile=64, num_stages=2, num_programs=num_programs, min_tiles=1)
    got = prefill_gpu(q, kv, batch, params, tiles=tiles, interpret=interpreter())
    want = attend_reference(q, kv, batch, params)
    np.testing.assert_allclose(
        np.asarray(got, np.float32)[1:85], np.asarray(want, np.float32)[1:85], atol=TOLERANCE
    )
