"""What the kernels move and compute for a case, counted from their own block sizes.

The least that a program must move is in `cases.py`; here every reading is counted as often as the
kernel makes it, with its padding: whole pages and tiles, heads padded to the pool's lanes, queries
packed by XLA and outputs unpacked, partial results, the merging of new KV into stored tiles. Caches
are given no credit. Least over counted, each at the maker's rates, is the share of the roofline
that a kernel could reach if nothing else cost time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.pallas_kernels.ragged_paged_attention.backends import Backend
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import SCALE_DTYPE, kv_quantization
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import PoolLayout, pool_layout


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes between memory and chip, and operations of the matrix unit."""

    num_bytes: float
    flops: float

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Time at these rates: the longer of the two."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


NOTHING = Moved(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One call of attention: `rows` that decode and one chunk, all at the end of `context`.

    Attributes:
        seen: keys that a query sees: `context`, or less with a window.
        itemsize: bytes a number of queries and outputs.
        kv_dtype: of the pool.
        value_size: where values are the first so many numbers of keys; None where they lie apart.
    """

    rows: int
    chunk: int
    context: int
    seen: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    itemsize: int
    kv_dtype: Any
    value_size: int | None = None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def token_bytes(self, backend: Backend) -> int:
        """Keys and values of a token as the pool holds them, padding and scales counted."""
        return self.num_kv_heads * self.layout(backend).bytes_per_token(self.kv_dtype)

    def layout(self, backend: Backend) -> PoolLayout:
        """How the pool lies."""
        return pool_layout(backend, self.head_dim, self.page_size, self.value_size)


def attention_moved(case: Attention, backend: Backend, device_kind: str) -> Moved:
    """Everything of a call: both kernels, the KV write and XLA's part around them."""
    count = _tpu if backend == "mosaic_tpu" else _gpu
    return count(case, case.layout(backend), device_kind)


def _tpu(case: Attention, layout: PoolLayout, device_kind: str) -> Moved:
    from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import (
        LANES,
        choose_tpu_tiles,
        whole_lanes,
    )

    tokens = case.rows + case.chunk
    q_shape = (tokens, case.num_heads, layout.head_dim)
    pool = layout.shape(2, case.num_kv_heads)
    dim = layout.width  # of queries, too
    value_dim = dim if case.value_size is None else whole_lanes(case.value_size)
    both = dim + value_dim  # of a query and its output, and of a pair's two products
    dtype = "float32" if case.itemsize == 4 else "bfloat16"
    tiles = choose_tpu_tiles(
        q_shape, dtype, pool, case.kv_dtype, device_kind, value_size=case.value_size
    )
    token_bytes = case.token_bytes("mosaic_tpu")
    place = min(32 // case.kv_dtype.itemsize, case.page_size)  # rows of a sublane tile
    # KV write: a stored tile in and out for each token that decodes, and for each of the chunk's,
    # and with it 128 scales of each head.
    written = case.rows + (case.chunk // place + 1 if case.chunk else 0)
    tile_bytes = place * layout.halves * case.num_kv_heads * dim * case.kv_dtype.itemsize
    if kv_quantization(case.kv_dtype) is not None:
        tile_bytes += LANES * 2 * case.num_kv_heads * SCALE_DTYPE.itemsize
    total = Moved(2 * written * tile_bytes, 0)
    queries = tokens * case.num_heads * both * case.itemsize
    if case.rows:
        block = tiles.decode_pages * case.page_size
        keys = _whole(case.seen, case.page_size)
        rows = max(8, case.group)
        flops = 2 * case.num_kv_heads * rows * both * _whole(case.seen, block)
        total += Moved(case.rows * keys * token_bytes, case.rows * flops)
    total += Moved(queries, 0)
    if case.chunk:
        block = tiles.prefill_pages * case.page_size
        for last in _tile_ends(case, tiles.prefill_tile):
            keys = _whole(last, case.page_size)
            rows = tiles.prefill_tile * case.num_heads
            total += Moved(keys * token_bytes, 2 * rows * both * _whole(last, block))
        total += Moved(2 * queries, 0)  # packed by XLA, unpacked by XLA
    return total


def _gpu(case: Attention, layout: PoolLayout, device_kind: str) -> Moved:
    from octavo.pallas_kernels.ragged_paged_attention.decode_gpu import QUERY_ROWS
    from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import (
        choose_decode_tiles,
        choose_prefill_tiles,
        prefill_warpgroups,
    )

    del device_kind
    dim = layout.head_dim
    tokens = case.rows + case.chunk
    token_bytes = case.token_bytes("mosaic_gpu")
    queries = 2 * tokens * case.num_heads * dim * case.itemsize
    total = Moved(2 * tokens * token_bytes + queries, 0)
    if case.rows:
        decode = choose_decode_tiles(dim, case.itemsize, case.kv_dtype.itemsize)
        keys = _whole(case.seen, decode.tile)
        pairs = case.rows * case.num_kv_heads
        cuts = _num_cuts(decode, [keys // decode.tile] * pairs)
        # Parts leave in float32 and are read by the combination, two at least where a row has one.
        written = decode.num_warpgroups * (-(-case.group // 8) * 8 * dim + QUERY_ROWS) * 4
        read = 2 * decode.num_warpgroups * case.group * (dim + 1) * 4
        flops = 4 * case.num_kv_heads * QUERY_ROWS * dim * keys
        total += Moved(
            case.rows * keys * token_bytes + (pairs + cuts) * (written + read), case.rows * flops
        )
    if case.chunk:
        prefill = choose_prefill_tiles(dim, case.itemsize, case.kv_dtype.itemsize)
        padded = 1 << (case.group - 1).bit_length()
        rows = QUERY_ROWS * prefill_warpgroups(
            dim, is_narrow=case.kv_dtype.itemsize < case.itemsize
        )
        walked = [_whole(last, prefill.tile) for last in _tile_ends(case, rows // padded)]
        for keys in walked:
            flops = 4 * rows * case.num_kv_heads * dim * keys
            total += Moved(keys * token_bytes, flops)
        total += Moved(2 * queries, 0)
        # Of an item that is cut, two parts and what comes of them are written and read.
        cuts = _num_cuts(prefill, [keys // prefill.tile for keys in walked] * case.num_kv_heads)
        part = rows * (dim * case.itemsize + 4)
        total += Moved(2 * cuts * (2 * part + rows * dim * case.itemsize), 0)
    return total


def _num_cuts(tiles: Any, counts: list[int]) -> int:
    """Most items that ends of shares fall into; see `shares`.

    Args:
        tiles: block sizes of a persistent grid.
        counts: KV tiles of each item.
    """
    share = max(-(-sum(counts) // tiles.num_programs), min(max(counts), tiles.min_tiles))
    ends, line = set(range(share, sum(counts), share)), 0
    for count in counts:
        line += count
        ends.discard(line)
    return len(ends)


def _tile_ends(case: Attention, tile: int) -> Iterator[int]:
    """Keys that each tile of the chunk walks: up to its last query's own."""
    for first in range(0, case.chunk, tile):
        last = case.context - case.chunk + min(case.chunk, first + tile)
        yield min(last, case.seen + tile)


def _whole(count: int, step: int) -> int:
    return -(-count // step) * step
