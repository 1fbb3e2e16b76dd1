"""Block sizes of the TPU kernels, from the memory of the device kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from octavo.pallas_kernels.compat import device_kind
from octavo.pallas_kernels.tuning import (
    bad_tiles,
    tuning_key,
    with_tuned,
)

MIB = 1 << 20
LANES = 128
VMEM_BYTES = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5e": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v5p": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU v6e": 128 * MIB,
    "TPU7x": 64 * MIB,
}
"""VMEM of one core."""
SMALLEST_VMEM_BYTES = 16 * MIB
VMEM_SHARE = 0.5
"""Of VMEM a kernel may plan for: the compiler's own temporaries and spills take the rest."""
MAX_BLOCK_TOKENS = 512
MAX_QUERY_ROWS = 512
"""Rows of a prefill tile's matrix product, a tile of the matrix unit four times over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuTiles:
    """Block sizes.

    Attributes:
        decode_pages, prefill_pages: pages in a KV block.
        prefill_tile: query tokens of an item; rounded up to whole sublane tiles by the kernel. At
            most as many as a chunk of `AttentionParams.attention_chunk`, if there is one.
        vmem_bytes: limit given to the compiler.
    """

    decode_pages: int
    prefill_pages: int
    prefill_tile: int
    vmem_bytes: int

    def __post_init__(self) -> None:
        for name in ("decode_pages", "prefill_pages", "prefill_tile", "vmem_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: want at least 1")


def vmem_bytes(kind: str | None) -> int:
    """VMEM of one core of a device kind; the smallest of all for an unknown one."""
    return VMEM_BYTES.get(kind or "", SMALLEST_VMEM_BYTES)


def whole_lanes(count: int) -> int:
    """Lanes that so many numbers of a row take: whole tiles of lanes."""
    return -(-count // LANES) * LANES


def scratch_bytes(
    *,
    rows: int,
    pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    q_itemsize: int,
    kv_itemsize: int,
    halves: int = 2,
    value_dim: int | None = None,
) -> int:
    """VMEM that the kernel's buffers and one head's scores take.

    Args:
        rows: query rows of an item, tile · G.
        pages: of a KV block.
        head_dim: numbers of a pool's row.
        kv_itemsize: bytes of a pool's number; 1 comes with scales.
        halves: rows that a token takes in one head.
        value_dim: the first numbers of a row of values that are looked at; None is all.
    """
    block = pages * page_size
    lanes = whole_lanes(head_dim)
    out_lanes = lanes if value_dim is None else whole_lanes(value_dim)
    rows = max(8, rows)
    of_row = 2 * lanes * q_itemsize + out_lanes * (q_itemsize + 4)  # two in, one out, accumulator
    queries = num_kv_heads * rows * of_row
    stats = 4 * num_kv_heads * rows * 128 * 4  # peak, total, sinks (double-buffered)
    kv = 2 * halves * block * num_kv_heads * lanes * kv_itemsize
    scores = 4 * rows * block * 4
    narrow = 0
    if kv_itemsize == 1:
        heads = 2 * max(8, num_kv_heads) * 4  # keys and values in whole tiles of float32
        scales = heads * (2 * pages * whole_lanes(page_size) + whole_lanes(block))
        narrow = scales + halves * block * lanes * q_itemsize  # one head's block, widened
    return queries + stats + kv + scores + narrow


def choose_tpu_tiles(
    q_shape: tuple[int, ...],
    q_dtype: Any,
    pool_shape: tuple[int, ...],
    kv_dtype: Any,
    kind: str | None = None,
    *,
    value_size: int | None = None,
) -> TpuTiles:
    """Block sizes that fit the device's VMEM: measured ones where a table has them.

    Args:
        q_shape: [T, Hq, D].
        pool_shape: [N, 2, Hkv, P, D], [N, 1, Hkv, P, 2·D], or [N, 1, Hkv, P, D] of keys alone.
        kind: device kind; None asks JAX which one is being compiled for.
        value_size: of a pool of keys alone; see `PagedKV`.

    Raises:
        InvalidConfigError: a table asks for more than VMEM holds.
        ValueError: not even one page and the smallest tile fit.
    """
    _, num_heads, _ = q_shape
    _, halves, num_kv_heads, page_size, width = pool_shape
    group = num_heads // num_kv_heads
    capacity = vmem_bytes(kind if kind is not None else device_kind())
    budget = int(capacity * VMEM_SHARE)
    sizes = {
        "page_size": page_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": width,
        "halves": halves,
        "q_itemsize": jnp.dtype(q_dtype).itemsize,
        "kv_itemsize": jnp.dtype(kv_dtype).itemsize,
        "value_dim": value_size,
    }

    def widest_block(rows: int) -> int:
        pages = max(1, MAX_BLOCK_TOKENS // page_size)
        while pages > 1 and scratch_bytes(rows=rows, pages=pages, **sizes) > budget:
            pages //= 2
        return pages

    tile = min(max(8, MAX_QUERY_ROWS // group), q_shape[0])
    least = max(1, LANES // page_size)
    while tile > 4 and scratch_bytes(rows=tile * group, pages=least, **sizes) > budget:
        tile //= 2
    pages = widest_block(tile * group)
    needed = scratch_bytes(rows=tile * group, pages=pages, **sizes)
    if needed > budget:
        raise ValueError(
            f"attention needs {needed} bytes of VMEM: at most {budget} are planned for"
        )
    tiles = TpuTiles(
        decode_pages=widest_block(group),
        prefill_pages=pages,
        prefill_tile=tile,
        vmem_bytes=min(int(capacity * 0.9), max(budget + budget // 2, needed)),
    )
    most = int(capacity * 0.9)
    for part in ("decode", "prefill"):
        key = tuning_key("mosaic_tpu", part, q_shape, q_dtype, pool_shape, kv_dtype, kind)
        tiles = with_tuned(tiles, key)
        tiles = replace(tiles, prefill_tile=min(tiles.prefill_tile, q_shape[0]))
        rows, num_pages = (
            (group, tiles.decode_pages)
            if part == "decode"
            else (tiles.prefill_tile * group, tiles.prefill_pages)
        )
        needed = scratch_bytes(rows=rows, pages=num_pages, **sizes)
        if needed > most:
            names = {"pages": num_pages, "prefill_tile": tiles.prefill_tile}
            raise bad_tiles(key, names, f"what {most} bytes of VMEM hold, not {needed}")
        tiles = replace(tiles, vmem_bytes=max(tiles.vmem_bytes, needed))
    return tiles
