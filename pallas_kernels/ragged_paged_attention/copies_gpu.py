"""The copying warpgroup of both GPU kernels: tiles of keys and values, from pool to shared memory.

A pool in the queries' dtype is copied by the bulk tensor engine straight to where the tensor cores
read it. Tiles of an int8 or fp8 pool go there by way of registers: wgmma wants its second operand
in shared memory and in bfloat16, so the warpgroup keeps `num_raw` narrow tiles on their way, widens
each as it comes (exactly: bfloat16 holds every number of both) and starts the copy of a later one
in its place. Memory moves a byte a number; what is widened never leaves the multiprocessor. Scales
are not applied here: they come beside the keys, for the computing warpgroups to multiply scores
and weights with. Keys and values may have a copying warpgroup each: one alone can take longer to
widen a tile than its bytes are on their way.

A tile's scales stay in a ring of `scale_ring`: those copied next overwrite those of a tile before
the last whose keys its own computing warpgroup let go of, which is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.hopper import tiled_smem
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import SCALE_DTYPE
from octavo.pallas_kernels.ragged_paged_attention.shares import Segment, ShareWalk
from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import (
    DecodeTiles,
    PrefillTiles,
)

SCALE_COPY = 32
"""Scales between the beginnings of two copies: the 128 bytes that a bulk copy starts at."""
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
        """Starts the copies of one tile of keys (half 0) or values (half 1).

        Args:
            pool: of `pools`.
            index: the tile, counted from the row's first key.
            smem: [tile, D].
        """
        for i, (page, keys) in enumerate(self._pieces(index)):
            target = smem.at[pl.ds(i * keys.size, keys.size)]
            plgpu.copy_gmem_to_smem(pool.at[page, half, self.head, keys], target, barrier)

    def copy_scales(self, pool: Any, half: int, index: Any, smem: Any, barrier: Any) -> None:
        """As `copy`, of the keys' or values' scales, into [copies, at least a copy's keys]."""
        for i, (page, keys) in enumerate(self._pieces(index)):
            target = smem.at[i, pl.ds(0, keys.size)]
            plgpu.copy_gmem_to_smem(pool.at[page, half, self.head, keys], target, barrier)

    def _pieces(self, index: Any) -> Iterator[tuple[Any, Any]]:
        """Page and keys in it, of each copy that a tile is made of."""
        page_size, tile = self.pools[0].shape[3], self.tile
        if page_size >= tile:
            per_page = page_size // tile
            page = self.table[self.table_row + lax.div(index, jnp.int32(per_page))]
            offset = pl.multiple_of(lax.rem(index, jnp.int32(per_page)) * tile, tile)
            yield page, pl.ds(offset, tile)
            return
        pages = tile // page_size
        for i in range(pages):
            # Beyond the row's end lie entries of the trash page; beyond the table's, its last.
            column = jnp.minimum(index * pages + i, self.table_pages - 1)
            yield self.table[self.table_row + column], pl.ds(0, page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedItems:
    """Where the tiles of all work items lie.

    Attributes:
        pools, table, table_pages, tile: as of `PagedTiles`.
        rows: int32[items], the row of each.
    """

    pools: tuple[Any, ...]
    table: Any
    rows: Any
    table_pages: int
    tile: int

    def tiles_of(self, segment: Segment) -> PagedTiles:
        """The tiles that a segment reads."""
        return PagedTiles(
            pools=self.pools,
            table=self.table,
            table_row=self.rows[segment.item] * self.table_pages,
            table_pages=self.table_pages,
            head=segment.head,
            tile=self.tile,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """Shared memory of KV tiles and its barriers; of each pair the first is keys', then values'.

    Tiles take their places in the order in which a program walks them; `step` is how many came
    before, over all segments of its share, so that copies run ahead across segments.

    Attributes:
        tiles: [stages, tile, D] twice, as the tensor cores read them.
        ready, free: barriers twice, one a stage: filled, and read by all.
        raw: [num_raw, tile, D] twice, narrow; None for a pool in the queries' dtype.
        raw_ready: barriers twice; the keys' is that of both halves' scales too.
        scales: float32[ring, 2, copies, at least 32]: each copy's begin at a multiple of 128 bytes.
    """

    tiles: tuple[Any, Any]
    ready: tuple[Any, Any]
    free: tuple[Any, Any]
    raw: tuple[Any, Any] | None = None
    raw_ready: tuple[Any, Any] | None = None
    scales: Any = None

    def stage(self, step: Any) -> Any:
        """Where a tile lies in `tiles`."""
        return _slot(step, self.tiles[0])

    def scale_row(self, step: Any, half: int, shape: tuple[int, ...]) -> jax.Array:
        """Each key's scale of a tile whose keys are ready, for every query: [Q, tile]."""
        copies = self.scales.shape[2]
        slot, width = _slot(step, self.scales), shape[1] // copies
        parts = [
            plgpu.load(
                self.scales.at[slot, half, i, pl.ds(0, width)],
                layout=plgpu.Layout.WGMMA.reduce(0),
            )
            for i in range(copies)
        ]
        row = parts[0] if copies == 1 else jnp.concatenate(parts)
        return lax.broadcast_in_dim(row, shape, [1])

    def copy_share(
        self,
        walk: ShareWalk,
        items: PagedItems,
        memory: Any = None,
        halves: tuple[int, ...] = (0, 1),
    ) -> None:
        """What a copying warpgroup does: fills stages with the share's tiles, in turn.

        Args:
            memory: for its place in the share, where registers are few; see `each_in_memory`.
            halves: keys (0) and values (1), or one of them, of a narrow pool.
        """
        if self.raw is None:
            if memory is None:
                walk.each(lambda segment: self._copy_straight(segment, items.tiles_of(segment)))
                return

            def visit(read: Callable[[], Segment]) -> None:
                segment = read()
                self._copy_straight(segment, items.tiles_of(segment))

            walk.each_in_memory(memory, visit, lambda *_: None)
            return
        raw, raw_ready = self.raw, self.raw_ready
        walk.each(
            lambda segment: self._copy_raw(segment, items.tiles_of(segment), raw, raw_ready, halves)
        )
        num_tiles = walk.num_tiles

        @pl.loop(jnp.maximum(num_tiles - raw[0].shape[0], 0), num_tiles)
        def _rest(step: Any) -> None:
            for half in halves:
                self._widen_one(step, half, raw, raw_ready)

    def _wait_free(self, step: Any, half: int) -> None:
        @pl.when(step >= self.tiles[0].shape[0])
        def _wait() -> None:
            plgpu.barrier_wait(self.free[half].at[self.stage(step)])

    def _copy_straight(self, segment: Segment, source: PagedTiles) -> None:
        @pl.loop(segment.first, segment.end)
        def _one_tile(index: Any) -> None:
            step = segment.step(index)
            slot = self.stage(step)
            for half in (0, 1):
                self._wait_free(step, half)
                smem, ready = self.tiles[half].at[slot], self.ready[half].at[slot]
                source.copy(source.pools[0], half, index, smem, ready)

    def _copy_raw(
        self,
        segment: Segment,
        source: PagedTiles,
        raw: Any,
        raw_ready: Any,
        halves: tuple[int, ...],
    ) -> None:
        """Starts the copies of a segment's tiles, each where the one `num_raw` before it was."""
        num_raw = raw[0].shape[0]
        pages, scales = source.pools

        @pl.loop(segment.first, segment.end)
        def _one_tile(index: Any) -> None:
            step = segment.step(index)
            slot = _slot(step, raw[0])
            for half in halves:

                @pl.when(step >= num_raw)
                def _make_room(half: int = half) -> None:
                    self._widen_one(step - num_raw, half, raw, raw_ready)

                ready = raw_ready[half].at[slot]
                source.copy(pages, half, index, raw[half].at[slot], ready)
                if half == 0:
                    rows = self.scales.at[_slot(step, self.scales)]
                    source.copy_scales(scales, 0, index, rows.at[0], ready)
                    source.copy_scales(scales, 1, index, rows.at[1], ready)

    def _widen_one(self, step: Any, half: int, raw: Any, raw_ready: Any) -> None:
        slot, stage = _slot(step, raw[half]), self.stage(step)
        plgpu.barrier_wait(raw_ready[half].at[slot])
        self._wait_free(step, half)
        _widen(raw[half].at[slot], self.tiles[half].at[stage])
        # What was read may be overwritten, what was written may be multiplied.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.ready[half].at[stage])


def _slot(step: Any, ring: Any) -> Any:
    return lax.rem(step, jnp.int32(ring.shape[0]))


def _widen(raw: Any, out: Any) -> None:
    """Numbers [tile, D] of a narrow pool as they are, in the dtype of `out`."""
    tile, head_dim = out.shape
    keys, columns = _CHUNK
    for key in range(0, tile, keys):
        chunks = [
            (pl.ds(key, keys), pl.ds(column, columns)) for column in range(0, head_dim, columns)
        ]
        # All of a row of chunks before any is written: no read may pass a write.
        loaded = [plgpu.load(raw.at[here], layout=plgpu.Layout.WGMMA_UPCAST_2X) for here in chunks]
        for here, numbers in zip(chunks, loaded, strict=True):
            if jnp.issubdtype(numbers.dtype, jnp.floating):
                numbers = numbers.astype(jnp.float32)  # Hopper knows no shorter way from fp8
            out[here] = plgpu.layout_cast(numbers.astype(out.dtype), plgpu.Layout.WGMMA)


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
        width = max(SCALE_COPY, tiles.tile // copies)
        scratch["scale_smem"] = plgpu.SMEM((tiles.scale_ring, 2, copies, width), SCALE_DTYPE)
    return scratch


def kv_memory(refs: Mapping[str, Any]) -> KVMemory:
    """The memory of `kv_scratch`, by the names of it."""
    narrow = "scale_smem" in refs
    return KVMemory(
        tiles=(refs["k_smem"], refs["v_smem"]),
        ready=(refs["k_ready"], refs["v_ready"]),
        free=(refs["k_free"], refs["v_free"]),
        raw=(refs["k_raw"], refs["v_raw"]) if narrow else None,
        raw_ready=(refs["k_raw_ready"], refs["v_raw_ready"]) if narrow else None,
        scales=refs["scale_smem"] if narrow else None,
    )
