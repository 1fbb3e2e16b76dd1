"""Block sizes of the GPU kernels, and the pieces both of them use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.ragged_paged_attention.batch import AttentionParams
from octavo.pallas_kernels.ragged_paged_attention.tuning import (
    TuningKey,
    bad_tiles,
    with_tuned,
)

SMEM_BYTES = 232_448
"""Shared memory of one block on Hopper."""
NUM_MULTIPROCESSORS = 132
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiles:
    """Block sizes of decode.

    Attributes:
        tile: keys of one KV tile.
        num_stages: tiles on their way at once.
        target_blocks: blocks of the grid to cut all rows into.
        min_tiles: least KV tiles of an item, so that the copies' latency is spread.
    """

    tile: int
    num_stages: int
    target_blocks: int = 4 * NUM_MULTIPROCESSORS
    min_tiles: int = 4

    def copies(self, page_size: int) -> int:
        """Bulk copies that fill one tile of keys or of values."""
        return max(1, self.tile // page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiles:
    """Block sizes of prefill.

    Attributes:
        tile: keys of one KV tile.
        num_stages: tiles on their way at once.
    """

    tile: int
    num_stages: int

    def copies(self, page_size: int) -> int:
        """Bulk copies that fill one tile of keys or of values."""
        return max(1, self.tile // page_size)


def choose_decode_tiles(
    head_dim: int, page_size: int, itemsize: int, key: TuningKey | None = None
) -> DecodeTiles:
    """Measured block sizes of `key`, else 64 keys a tile and as many stages as memory holds.

    Raises:
        InvalidConfigError: a table asks for more than shared memory holds.
    """
    del page_size
    fits = decode_stages(head_dim, itemsize, 64)
    tiles = DecodeTiles(tile=64, num_stages=max(2, min(4, fits)))
    if key is not None:
        tiles = with_tuned(tiles, key)
        _check_stages(key, tiles, decode_stages(head_dim, itemsize, tiles.tile))
    return tiles


def choose_prefill_tiles(
    head_dim: int, itemsize: int, key: TuningKey | None = None
) -> PrefillTiles:
    """Measured block sizes of `key`, else 128 keys a tile where two stages fit, else 64.

    Raises:
        InvalidConfigError: a table asks for more than shared memory holds.
        ValueError: two stages of the smallest tile do not fit.
    """
    fitting = [t for t in (128, 64) if prefill_stages(head_dim, itemsize, t) >= 2]
    if not fitting:
        raise ValueError(f"head_dim {head_dim}: two stages of 64 keys exceed {SMEM_BYTES} bytes")
    tiles = PrefillTiles(tile=fitting[0], num_stages=2)
    if key is not None:
        tiles = with_tuned(tiles, key)
        _check_stages(key, tiles, prefill_stages(head_dim, itemsize, tiles.tile))
    return tiles


def _check_stages(key: TuningKey, tiles: DecodeTiles | PrefillTiles, most: int) -> None:
    sizes = {"tile": tiles.tile, "num_stages": tiles.num_stages}
    if tiles.tile % 64:
        raise bad_tiles(key, sizes, "tiles of a multiple of 64 keys")
    if tiles.num_stages > most:
        raise bad_tiles(key, sizes, f"at most {most} stages, which shared memory holds")


def decode_stages(head_dim: int, itemsize: int, tile: int) -> int:
    """Stages of decode that shared memory holds."""
    fixed = 64 * (head_dim * itemsize + out_columns(head_dim) * 4) + 4096
    return (SMEM_BYTES - fixed) // (2 * tile * head_dim * itemsize)


def prefill_stages(head_dim: int, itemsize: int, tile: int) -> int:
    """Stages of prefill that shared memory holds."""
    fixed = 128 * (head_dim + out_columns(head_dim)) * itemsize + 4096
    return (SMEM_BYTES - fixed) // (2 * tile * head_dim * itemsize)


def out_columns(head_dim: int) -> int:
    """Columns of an output tile that leave at once: all, where shared memory has room."""
    return head_dim if head_dim <= 128 else 64


def tiled_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that bulk copies write and wgmma reads: 128-byte swizzled tiles of 8 rows."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def copy_tile(
    pool_ref: Any,
    table_ref: Any,
    table_row: Any,
    table_pages: int,
    head: Any,
    page_size: int,
    tile: int,
    half: int,
    index: Any,
    smem: Any,
    barrier: Any,
) -> None:
    """Starts the copies of one tile of keys (half 0) or values (half 1) of one head.

    Args:
        pool_ref: [N, 2, Hkv, P, D].
        table_ref: int32[S · M]; `table_row` is the row's first entry.
        index: the tile, counted from the row's first key.
        smem: [tile, D].
    """
    if page_size >= tile:
        per_page = page_size // tile
        page = table_ref[table_row + lax.div(index, jnp.int32(per_page))]
        offset = pl.multiple_of(lax.rem(index, jnp.int32(per_page)) * tile, tile)
        source = pool_ref.at[page, half, head, pl.ds(offset, tile)]
        plgpu.copy_gmem_to_smem(source, smem, barrier)
        return
    pages = tile // page_size
    for i in range(pages):
        # Beyond the row's end lie entries of the trash page; beyond the table's, its last.
        column = jnp.minimum(index * pages + i, table_pages - 1)
        page = table_ref[table_row + column]
        target = smem.at[pl.ds(i * page_size, page_size)]
        plgpu.copy_gmem_to_smem(pool_ref.at[page, half, head], target, barrier)


def softcap_scores(scores: jax.Array, params: AttentionParams) -> tuple[jax.Array, float]:
    """Scores and what they are still to be multiplied by to be base-2 exponents."""
    if params.logit_softcap is None:
        return scores, params.scale * _LOG2E
    cap = params.logit_softcap
    return jnp.tanh(scores * (params.scale / cap)), cap * _LOG2E


def query_key_product(
    q_smem: Any, k_smem: Any, plain: bool, started: Callable[[], None] | None = None
) -> jax.Array:
    """Scores float32[Q, K] of queries [Q, D] and keys [K, D] in shared memory.

    Args:
        plain: an ordinary product, for the interpreter.
        started: called when the product is on its way.
    """
    if plain:
        scores = jnp.dot(q_smem[...], k_smem[...].T, preferred_element_type=jnp.float32)
        if started is not None:
            started()
        return scores

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, q_smem, k_smem.T)
        if started is not None:
            started()
        return acc[...]

    shape = (q_smem.shape[0], k_smem.shape[0])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def accumulate(acc: jax.Array, weight: jax.Array, v_smem: Any, plain: bool) -> jax.Array:
    """acc [Q, D] + weight [Q, K] in registers × values [K, D] in shared memory.

    Args:
        plain: an ordinary product: the interpreter knows no wgmma operand in registers.
    """
    if plain:
        return acc + jnp.dot(weight, v_smem[...], preferred_element_type=jnp.float32)

    def product(ref: Any) -> None:
        plgpu.wgmma(ref, weight, v_smem)

    return pl.run_state(product)(plgpu.ACC.init(acc))
