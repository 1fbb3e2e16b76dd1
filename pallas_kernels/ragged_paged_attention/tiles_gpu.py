"""Block sizes of the GPU kernels, and the pieces both of them use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.hopper import (
    MULTIPROCESSOR_SMEM_BYTES,
    NUM_MULTIPROCESSORS,
    SMEM_BYTES,
    num_multiprocessors,
)
from octavo.pallas_kernels.ragged_paged_attention.batch import AttentionParams
from octavo.pallas_kernels.tuning import (
    Tiles,
    TuningKey,
    bad_tiles,
    with_tuned,
)

SMALL_BYTES = 4096
"""Of a block's shared memory, for what is small."""
MAX_RAW = 4
"""Narrow tiles on their way at once: 64 KB at 128 numbers a head, which bandwidth wants."""
_LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KVTiles:
    """Block sizes that both parts have.

    Attributes:
        tile: keys of one KV tile.
        num_stages: tiles in shared memory as the tensor cores read them; of a pool in the queries'
            dtype, tiles on their way at once.
        num_raw: tiles of an int8 or fp8 pool on their way at once; 0 for any other.
        num_programs: of the persistent grid; as many as the GPU has room for at once.
        min_tiles: least KV tiles of a program's share, where an item has so many: partial results
            cost about a tile's time.
        num_copiers: copying warpgroups; 2 of a narrow pool, of keys and of values.
    """

    tile: int
    num_stages: int
    num_raw: int = 0
    num_programs: int = NUM_MULTIPROCESSORS
    min_tiles: int = 4
    num_copiers: int = 1

    @property
    def scale_ring(self) -> int:
        """Tiles whose scales are kept; see `copies_gpu`."""
        return self.num_raw + self.num_stages + 1

    @property
    def copied_halves(self) -> tuple[tuple[int, ...], ...]:
        """Of each copying warpgroup: keys (0), values (1) or both."""
        return ((0, 1),) if self.num_copiers == 1 else ((0,), (1,))

    def copies(self, page_size: int) -> int:
        """Bulk copies that fill one tile of keys or of values."""
        return max(1, self.tile // page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiles(_KVTiles):
    """Block sizes of decode.

    Attributes:
        num_warpgroups: computing ones, which take tiles in turn. `num_stages` is a multiple of it,
            so that each stage is always the same one's.
    """

    num_warpgroups: int = 1

    @property
    def scale_ring(self) -> int:
        """As of other tiles, where each warpgroup lets go of its own alone."""
        return self.num_raw + self.num_stages + self.num_warpgroups


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiles(_KVTiles):
    """Block sizes of prefill."""


def choose_decode_tiles(
    head_dim: int, itemsize: int, kv_itemsize: int, key: TuningKey | None = None
) -> DecodeTiles:
    """Measured block sizes of `key`, else 64 keys a tile and as many stages as memory holds.

    Heads of 96 and 128 have two computing warpgroups: of smaller heads two programs fit on a
    multiprocessor, and of larger ones the registers of three warpgroups do not.

    Args:
        itemsize, kv_itemsize: of queries and of the pool; a pool of single bytes is widened.

    Raises:
        InvalidConfigError: a table asks for more than shared memory holds.
        ValueError: the smallest tiles do not fit.
    """
    num_wgs = 2 if 64 < head_dim <= 128 else 1
    fixed = decode_fixed_bytes(head_dim, itemsize, num_wgs)
    if kv_itemsize == itemsize:
        fits = fitting(fixed, head_dim, itemsize, kv_itemsize, 64)
        tiles = DecodeTiles(tile=64, num_stages=max(2, min(4, fits - fits % num_wgs)))
        # A program takes 128 registers a thread of two warpgroups: half of what there are.
        used = fixed + tiles.num_stages * 2 * tiles.tile * head_dim * itemsize
        places = min(2, MULTIPROCESSOR_SMEM_BYTES // (used + 1024))
    else:
        tiles = DecodeTiles(tile=64, num_stages=2, num_raw=_raw(fixed, head_dim, itemsize))
        places = 1
    tiles = replace(
        tiles,
        num_programs=places * _multiprocessors(key),
        num_warpgroups=num_wgs,
        num_copiers=_num_copiers(head_dim, itemsize, kv_itemsize),
    )
    return _tuned_decode(tiles, key, head_dim, itemsize, kv_itemsize)


def _tuned_decode(
    tiles: DecodeTiles, key: TuningKey | None, head_dim: int, itemsize: int, kv_itemsize: int
) -> DecodeTiles:
    if key is None:
        return tiles
    wanted = with_tuned(tiles, key)
    num_wgs = wanted.num_warpgroups
    if num_wgs > 2 or wanted.num_stages % num_wgs or (num_wgs == 2 and head_dim > 128):
        sizes = {"num_warpgroups": num_wgs, "num_stages": wanted.num_stages}
        allowed = "1, or 2 for heads of up to 128 and an even number of stages"
        raise bad_tiles(key, sizes, allowed)
    fixed = decode_fixed_bytes(head_dim, itemsize, num_wgs)
    return _tuned(tiles, key, fixed, head_dim, itemsize, kv_itemsize)


def choose_prefill_tiles(
    head_dim: int,
    itemsize: int,
    kv_itemsize: int,
    key: TuningKey | None = None,
) -> PrefillTiles:
    """Measured block sizes of `key`, else 128 keys a tile where two stages fit (of a pool that is
    widened, and two raw tiles), else 64.

    Args:
        itemsize, kv_itemsize: of queries and of the pool; a pool of single bytes is widened.

    Raises:
        InvalidConfigError: a table asks for more than shared memory holds.
        ValueError: the smallest tiles do not fit.
    """
    fixed = prefill_fixed_bytes(head_dim, itemsize, is_narrow=kv_itemsize < itemsize)
    if kv_itemsize == itemsize:
        wide = [t for t in (128, 64) if fitting(fixed, head_dim, itemsize, kv_itemsize, t) >= 2]
        if not wide:
            raise ValueError(f"head_dim {head_dim}: two tiles of 64 keys exceed {SMEM_BYTES} bytes")
        tiles = PrefillTiles(tile=wide[0], num_stages=2)
    else:
        tile = 128 if fitting(fixed, head_dim, itemsize, kv_itemsize, 128, 2) >= 2 else 64
        raw = _raw(fixed, head_dim, itemsize, tile)
        tiles = PrefillTiles(tile=tile, num_stages=2, num_raw=raw)
    num_copiers = _num_copiers(head_dim, itemsize, kv_itemsize)
    tiles = replace(tiles, num_programs=_multiprocessors(key), num_copiers=num_copiers)
    return _tuned(tiles, key, fixed, head_dim, itemsize, kv_itemsize)


def _num_copiers(head_dim: int, itemsize: int, kv_itemsize: int) -> int:
    """Two where tiles are widened and the registers of larger heads leave room."""
    return 2 if kv_itemsize < itemsize and head_dim <= 128 else 1


def _multiprocessors(key: TuningKey | None) -> int:
    return NUM_MULTIPROCESSORS if key is None else num_multiprocessors(key.device)


def _raw(fixed: int, head_dim: int, itemsize: int, tile: int = 64) -> int:
    """Raw tiles of a pool of single bytes beside two stages."""
    raw = fitting(fixed, head_dim, itemsize, 1, tile, 2)
    if raw < 1:
        raise ValueError(f"head_dim {head_dim}: two tiles of 64 keys exceed {SMEM_BYTES} bytes")
    return min(MAX_RAW, raw)


def _tuned(
    tiles: Tiles,
    key: TuningKey | None,
    fixed: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int,
) -> Tiles:
    if key is None:
        return tiles
    tiles = with_tuned(tiles, key)
    sizes = {"tile": tiles.tile, "num_stages": tiles.num_stages, "num_raw": tiles.num_raw}
    if tiles.tile % 64:
        raise bad_tiles(key, sizes, "tiles of a multiple of 64 keys")
    if tiles.num_copiers not in {1, _num_copiers(head_dim, itemsize, kv_itemsize)}:
        allowed = "1 copying warpgroup, or 2 of int8 and fp8 pools with heads of up to 128"
        raise bad_tiles(key, {"num_copiers": tiles.num_copiers}, allowed)
    if bool(tiles.num_raw) != (kv_itemsize < itemsize):
        raise bad_tiles(key, sizes, "raw tiles where the pool is int8 or fp8, and nowhere else")
    most = fitting(fixed, head_dim, itemsize, kv_itemsize, tiles.tile, tiles.num_stages)
    if (tiles.num_raw or tiles.num_stages) > most:
        what = "raw tiles" if tiles.num_raw else "stages"
        raise bad_tiles(key, sizes, f"at most {most} {what}, which shared memory holds")
    return tiles


def prefill_warpgroups(head_dim: int, *, is_narrow: bool) -> int:
    """Computing warpgroups of prefill, of 64 query rows each.

    Two, but for heads of 256 of a pool that is widened: shared memory has no room for the queries
    of both beside raw tiles.
    """
    return 1 if is_narrow and head_dim > 128 else 2


def decode_fixed_bytes(head_dim: int, itemsize: int, num_warpgroups: int) -> int:
    """Shared memory of a decode block's queries and outputs, and of what is small."""
    columns = decode_columns(head_dim, num_warpgroups)
    return num_warpgroups * 64 * (head_dim * itemsize + columns * 4) + SMALL_BYTES


def prefill_fixed_bytes(head_dim: int, itemsize: int, *, is_narrow: bool) -> int:
    """Shared memory of a prefill block's queries and outputs, and of what is small.

    Args:
        is_narrow: the pool has fewer bytes a number than queries.
    """
    rows = 64 * prefill_warpgroups(head_dim, is_narrow=is_narrow)
    return rows * (head_dim + out_columns(head_dim)) * itemsize + SMALL_BYTES


def fitting(
    fixed: int, head_dim: int, itemsize: int, kv_itemsize: int, tile: int, stages: int = 0
) -> int:
    """Stages that shared memory holds; of a pool that is widened, raw tiles beside `stages`.

    Args:
        fixed: see `decode_fixed_bytes` and `prefill_fixed_bytes`.
    """
    left = SMEM_BYTES - fixed
    if kv_itemsize == itemsize:
        return left // (2 * tile * head_dim * itemsize)
    scales = 2 * 2 * tile * 4  # of pages of 16, every other place is empty
    left -= stages * 2 * tile * head_dim * itemsize + (stages + 2) * scales
    return left // (2 * tile * head_dim * kv_itemsize + scales)


def out_columns(head_dim: int) -> int:
    """Columns of an output tile that leave at once: all, where shared memory has room."""
    return head_dim if head_dim <= 128 else 64


def decode_columns(head_dim: int, num_warpgroups: int) -> int:
    """Columns of a decode's partial results that leave at once."""
    return out_columns(head_dim) if num_warpgroups == 1 else min(64, head_dim)


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
