"""The copying warpgroup of both GPU kernels: tiles of keys and values, from pool to shared memory.

A pool in the queries' dtype is copied by the bulk tensor engine straight to where the tensor cores
read it. Tiles of an int8 or fp8 pool go there by way of registers: wgmma wants its second operand
in shared memory and in bfloat16, so the warpgroup keeps `num_raw` narrow tiles on their way, widens
each as it comes (exactly: bfloat16 holds every number of both) and starts the copy of a later one
in its place. Memory moves a byte a number; what is widened never leaves the multiprocessor. Scales
are not applied here: they come beside the tiles, for the computing warpgroups to multiply scores
and weights with.

A tile's scales stay in a ring of `num_raw + num_stages + 1`: those copied next overwrite those of
the tile before the last whose keys were let go of, with which every computing warpgroup is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import SCALE_DTYPE
from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import (
    DecodeTiles,
    PrefillTiles,
    tiled_smem,
)

_CHUNK = (64, 64)
"""Keys and columns widened at once: few enough for the registers a copying warpgroup has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTiles:
    """Where one row's tiles of one head lie in global memory.

    Attributes:
        pools: [N, 2, Hkv, P, D], and scales [N, 2, Hkv, P] if the pool is narrow.
        table: int32[S · M]; `table_row` is the row's first entry, `table_pages` is M.
        tile: keys.
    """

    pools: tuple[Any, ...]
    table: Any
    table_row: Any
    table_pages: int
    head: Any
    tile: int

    def copy(self, pool: Any, half: int, index: Any, smem: Any, barrier: Any) -> None:
        """Starts the copies of one tile of keys (half 0) or values (half 1), or of their scales.

        Args:
            pool: of `pools`.
            index: the tile, counted from the row's first key.
            smem: [tile, D], or [tile] for scales.
        """
        page_size, tile = self.pools[0].shape[3], self.tile
        if page_size >= tile:
            per_page = page_size // tile
            page = self.table[self.table_row + lax.div(index, jnp.int32(per_page))]
            offset = pl.multiple_of(lax.rem(index, jnp.int32(per_page)) * tile, tile)
            source = pool.at[page, half, self.head, pl.ds(offset, tile)]
            plgpu.copy_gmem_to_smem(source, smem, barrier)
            return
        pages = tile // page_size
        for i in range(pages):
            # Beyond the row's end lie entries of the trash page; beyond the table's, its last.
            column = jnp.minimum(index * pages + i, self.table_pages - 1)
            page = self.table[self.table_row + column]
            target = smem.at[pl.ds(i * page_size, page_size)]
            plgpu.copy_gmem_to_smem(pool.at[page, half, self.head], target, barrier)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """Shared memory of KV tiles and its barriers; of each pair the first is keys', then values'.

    Attributes:
        first: the tile that the first stage holds first.
        tiles: [stages, tile, D] twice, as the tensor cores read them.
        ready, free: barriers twice, one a stage: filled, and read by all.
        raw: [num_raw, tile, D] twice, narrow; None for a pool in the queries' dtype.
        raw_ready: barriers twice; the keys' is that of both halves' scales too.
        scales: float32[ring, 2, tile].
    """

    first: Any
    tiles: tuple[Any, Any]
    ready: tuple[Any, Any]
    free: tuple[Any, Any]
    raw: tuple[Any, Any] | None = None
    raw_ready: tuple[Any, Any] | None = None
    scales: Any = None

    def stage(self, index: Any) -> Any:
        """Where a tile lies in `tiles`."""
        return self._slot(index, self.tiles[0])

    def scale_row(self, index: Any, half: int, shape: tuple[int, ...]) -> jax.Array:
        """Each key's scale of a tile whose keys are ready, for every query: [Q, tile]."""
        row = plgpu.load(
            self.scales.at[self._slot(index, self.scales), half],
            layout=plgpu.Layout.WGMMA.reduce(0),
        )
        return lax.broadcast_in_dim(row, shape, [1])

    def copy_all(self, source: PagedTiles, end: Any) -> None:
        """What the copying warpgroup does: fills stages with tiles `first` to `end`, in turn."""
        if self.raw is None:
            self._copy_straight(source, end)
        else:
            self._copy_and_widen(source, end, self.raw, self.raw_ready)

    def _slot(self, index: Any, ring: Any) -> Any:
        return lax.rem(index - self.first, jnp.int32(ring.shape[0]))

    def _wait_free(self, index: Any, half: int) -> None:
        @pl.when(index - self.first >= self.tiles[0].shape[0])
        def _wait() -> None:
            plgpu.barrier_wait(self.free[half].at[self.stage(index)])

    def _copy_straight(self, source: PagedTiles, end: Any) -> None:
        @pl.loop(self.first, end)
        def _one_tile(index: Any) -> None:
            slot = self.stage(index)
            for half in (0, 1):
                self._wait_free(index, half)
                smem, ready = self.tiles[half].at[slot], self.ready[half].at[slot]
                source.copy(source.pools[0], half, index, smem, ready)

    def _copy_and_widen(self, source: PagedTiles, end: Any, raw: Any, raw_ready: Any) -> None:
        num_raw = raw[0].shape[0]
        pages, scales = source.pools

        def start(index: Any, half: int) -> None:
            slot = self._slot(index, raw[half])
            ready = raw_ready[half].at[slot]
            source.copy(pages, half, index, raw[half].at[slot], ready)
            if half == 0:
                rows = self.scales.at[self._slot(index, self.scales)]
                source.copy(scales, 0, index, rows.at[0], ready)
                source.copy(scales, 1, index, rows.at[1], ready)

        @pl.loop(self.first, jnp.minimum(self.first + num_raw, end))
        def _ahead(index: Any) -> None:
            start(index, 0)
            start(index, 1)

        @pl.loop(self.first, end)
        def _one_tile(index: Any) -> None:
            for half in (0, 1):
                slot = self._slot(index, raw[half])
                plgpu.barrier_wait(raw_ready[half].at[slot])
                self._wait_free(index, half)
                _widen(raw[half].at[slot], self.tiles[half].at[self.stage(index)])
                # What was read may be overwritten, what was written may be multiplied.
                plgpu.commit_smem()
                plgpu.barrier_arrive(self.ready[half].at[self.stage(index)])

                @pl.when(index + num_raw < end)
                def _next(half: int = half) -> None:
                    start(index + num_raw, half)


def _widen(raw: Any, out: Any) -> None:
    """Numbers [tile, D] of a narrow pool as they are, in the dtype of `out`."""
    tile, head_dim = out.shape
    keys, columns = _CHUNK
    for key in range(0, tile, keys):
        for column in range(0, head_dim, columns):
            here = pl.ds(key, keys), pl.ds(column, columns)
            numbers = plgpu.load(raw.at[here], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            if jnp.issubdtype(numbers.dtype, jnp.floating):
                numbers = numbers.astype(jnp.float32)  # Hopper knows no shorter way from fp8
            numbers = plgpu.layout_cast(numbers.astype(out.dtype), plgpu.Layout.WGMMA)
            out[here] = numbers


def kv_scratch(
    tiles: DecodeTiles | PrefillTiles,
    head_dim: int,
    page_size: int,
    dtype: Any,
    kv_dtype: Any,
    num_readers: int,
) -> dict[str, Any]:
    """Scratch of a kernel, by name, of which `kv_memory` makes a `KVMemory`.

    Args:
        dtype, kv_dtype: of queries and of the pool.
        num_readers: computing warpgroups that read each tile.
    """
    copies, stages = tiles.copies(page_size), tiles.num_stages
    stage = tiled_smem((stages, tiles.tile, head_dim), dtype)
    # Bulk copies arrive each on their own; the warpgroup that widens arrives once.
    ready = plgpu.Barrier(num_arrivals=1 if tiles.num_raw else copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=num_readers, num_barriers=stages)
    scratch = {"k_smem": stage, "v_smem": stage, "k_ready": ready, "v_ready": ready}
    scratch |= {"k_free": free, "v_free": free}
    if tiles.num_raw:
        raw = tiled_smem((tiles.num_raw, tiles.tile, head_dim), kv_dtype, _CHUNK[1])
        scratch |= {"k_raw": raw, "v_raw": raw}
        scratch |= {
            f"{half}_raw_ready": plgpu.Barrier(num_arrivals=n * copies, num_barriers=tiles.num_raw)
            for half, n in (("k", 3), ("v", 1))
        }
        scratch["scale_smem"] = plgpu.SMEM((tiles.scale_ring, 2, tiles.tile), SCALE_DTYPE)
    return scratch


def kv_memory(first: Any, refs: Mapping[str, Any]) -> KVMemory:
    """The memory of `kv_scratch`, by the names of it."""
    narrow = "scale_smem" in refs
    return KVMemory(
        first=first,
        tiles=(refs["k_smem"], refs["v_smem"]),
        ready=(refs["k_ready"], refs["v_ready"]),
        free=(refs["k_free"], refs["v_free"]),
        raw=(refs["k_raw"], refs["v_raw"]) if narrow else None,
        raw_ready=(refs["k_raw_ready"], refs["v_raw_ready"]) if narrow else None,
        scales=refs["scale_smem"] if narrow else None,
    )
