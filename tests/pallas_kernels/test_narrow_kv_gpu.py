"""The Hopper kernels read pools of int8 and fp8 as the plain reference does, in the interpreter."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.compat import interprets_mosaic_gpu
from octavo.pallas_kernels.hopper import SMEM_BYTES
from octavo.pallas_kernels.ragged_paged_attention import AttentionParams
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from tests.pallas_kernels.reference import attend_reference

pytestmark = pytest.mark.skipif(
    not interprets_mosaic_gpu(), reason="JAX 0.12 is the first to interpret all of these kernels"
)

# Both read the same rounded numbers; weights times scales, and outputs, are rounded to bfloat16.
TOLERANCE = 2e-2
FULL = AttentionParams(scale=0.125)
WINDOW = AttentionParams(scale=0.125, sliding_window=70, logit_softcap=5.0)


def interpreter() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def case(seed: int, rows: list[tuple[int, int]], **shape: Any) -> Any:
    num_tokens = sum(new for new, _ in rows)
    return make_case(
        np.random.default_rng(seed),
        rows,
        num_tokens=num_tokens,
        num_rows=len(rows),
        table=256 // shape["page_size"],
        dtype="bfloat16",
        as_bits=False,
        **shape,
    )


def some_sinks(num_heads: int) -> Any:
    return jnp.asarray(np.random.default_rng(7).standard_normal(num_heads), jnp.float32)


@pytest.mark.parametrize(
    ("kv_dtype", "heads", "head_dim", "page_size", "params", "has_sinks"),
    [
        ("int8", (2, 1), 64, 16, WINDOW, False),
        ("fp8", (2, 2), 128, 128, FULL, True),
    ],
)
@pytest.mark.parametrize(("num_warpgroups", "num_copiers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_decode_matches_the_reference(
    kv_dtype: str,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    params: AttentionParams,
    has_sinks: bool,
    num_warpgroups: int,
    num_copiers: int,
) -> None:
    from octavo.pallas_kernels.ragged_paged_attention.decode_gpu import decode_gpu
    from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import DecodeTiles

    q, _, _, kv, batch = case(
        0,
        [(1, 250), (1, 0), (1, 65)],
        kv_dtype=kv_dtype,
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
    )
    sinks = some_sinks(heads[0]) if has_sinks else None
    # One program walks four tiles of the first row and two of the last, of every head: stages, raw
    # tiles and scales all turn over, and copies run on from one row to the next.
    tiles = DecodeTiles(
        tile=64,
        num_stages=num_warpgroups,
        num_raw=2,
        num_programs=1,
        num_warpgroups=num_warpgroups,
        num_copiers=num_copiers,
    )
    got = decode_gpu(q, kv, batch, params, sinks=sinks, tiles=tiles, interpret=interpreter())
    want = attend_reference(q, kv, batch, params, sinks=sinks).astype(jnp.float32)
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "tile"), [(64, 16, 64), (64, 16, 128), (64, 128, 128), (256, 64, 64)]
)
def test_prefill_matches_the_reference(head_dim: int, page_size: int, tile: int) -> None:
    from octavo.pallas_kernels.ragged_paged_attention.prefill_gpu import prefill_gpu
    from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import PrefillTiles

    q, _, _, kv, batch = case(
        1,
        [(1, 70), (67, 200), (5, 5)],
        kv_dtype="fp8",
        heads=(2, 1),
        head_dim=head_dim,
        page_size=page_size,
    )
    params = AttentionParams(scale=head_dim**-0.5, sliding_window=90)
    sinks = some_sinks(2)
    tiles = PrefillTiles(tile=tile, num_stages=1, num_raw=1, num_programs=2, min_tiles=1)
    got = prefill_gpu(q, kv, batch, params, sinks=sinks, tiles=tiles, interpret=interpreter())
    want = attend_reference(q, kv, batch, params, sinks=sinks)
    np.testing.assert_allclose(
        np.asarray(got, np.float32)[1:], np.asarray(want, np.float32)[1:], atol=TOLERANCE
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_narrow_pools_fit_shared_memory(head_dim: int) -> None:
    from octavo.pallas_kernels.ragged_paged_attention import tiles_gpu as gpu

    choices: Any = {"decode": gpu.choose_decode_tiles, "prefill": gpu.choose_prefill_tiles}
    for part, choose in choices.items():
        tiles = choose(head_dim, 2, 1)
        stage = 2 * tiles.tile * head_dim
        scales = tiles.scale_ring * 2 * 2 * tiles.tile * 4
        if part == "decode":
            fixed = gpu.decode_fixed_bytes(head_dim, 2, tiles.num_warpgroups)
        else:
            fixed = gpu.prefill_fixed_bytes(head_dim, 2, is_narrow=True)
        needed = fixed + (2 * tiles.num_stages + tiles.num_raw) * stage + scales
        assert tiles.num_raw >= 1
        assert needed <= SMEM_BYTES
        assert choose(head_dim, 2, 2).num_raw == 0
