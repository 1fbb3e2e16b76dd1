"""How a backend's KV pool lies in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.pallas_kernels.ragged_paged_attention.batch import PagedKV
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import bytes_per_head
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import LANES, whole_lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """A pool [N, halves, Hkv, P, width] and its scales [N, 2, Hkv, scale_width], if it has any.

    Attributes:
        halves: 2 where a token's key and its value in a head are rows of their own; 1 where they
            lie side by side in one row, [key | value], or there are keys alone.
        width: numbers of a row; what the head leaves of it holds zeros.
        page_size: P, tokens.
        scale_width: scales that a head's keys of a page take, those of its tokens first.
        value_size: of `PagedKV`.
    """

    halves: int
    width: int
    page_size: int
    scale_width: int
    value_size: int | None = None

    @property
    def head_dim(self) -> int:
        """Numbers that a key or a value takes, at least the head's own."""
        return self.width if self.value_size is not None else self.halves * self.width // 2

    def shape(self, num_pages: int, num_kv_heads: int) -> tuple[int, int, int, int, int]:
        """Of the array of numbers."""
        return (num_pages, self.halves, num_kv_heads, self.page_size, self.width)

    def zeros(self, num_pages: int, num_kv_heads: int, dtype: Any) -> PagedKV:
        """An empty pool."""
        shape = self.shape(num_pages, num_kv_heads)
        return PagedKV.zeros(shape, dtype, self.scale_width, self.value_size)

    def bytes_per_head(self, dtype: Any) -> int:
        """Bytes of one token's key or value in one head, padding and scales counted."""
        return bytes_per_head(dtype, self.head_dim, self.scale_width // self.page_size)

    def bytes_per_token(self, dtype: Any) -> int:
        """Bytes of all that is kept of one token in one head."""
        if self.value_size is not None:
            return bytes_per_head(dtype, self.head_dim, 2 * self.scale_width // self.page_size)
        return 2 * self.bytes_per_head(dtype)


def default_page_size(platform: str) -> int:
    """Tokens in a page where nobody says how many.

    On a CPU a page is read by plain loads, and those of a prompt follow each other in memory, so
    that small pages, which hold less for nothing, are read as fast as larger ones.

    Args:
        platform: as JAX names it.
    """
    return 8 if platform == "cpu" else 64


def pool_layout(
    backend: str, head_dim: int, page_size: int, value_size: int | None = None
) -> PoolLayout:
    """The layout that a backend reads and writes.

    A TPU tiles the last dimension by 128 lanes; XLA would keep an array of 64 in another order, and
    copy the whole pool into tiles for every call. Heads of 64 therefore have a key and its value
    share the lanes, and others are padded, as scales are: pages of 128 and 256 tokens waste
    nothing on them, one of 64 adds 4 bytes to the 4 + D of a token's key or value. Hopper's bulk
    copies and wgmma want 64 numbers or a multiple of 128.

    Args:
        backend: its name.
        head_dim: of keys, and of values that lie on their own.
        page_size: tokens.
        value_size: of values that are the beginnings of keys.
    """
    if value_size is not None:
        return PoolLayout(
            halves=1,
            width=whole_lanes(head_dim) if backend == "mosaic_tpu" else head_dim,
            page_size=page_size,
            scale_width=whole_lanes(page_size) if backend == "mosaic_tpu" else page_size,
            value_size=value_size,
        )
    halves, width, scale_width = 2, head_dim, page_size
    if backend == "mosaic_tpu":
        scale_width = whole_lanes(page_size)
        if 2 * head_dim == LANES:
            halves, width = 1, LANES
        else:
            width = whole_lanes(head_dim)
    elif backend == "mosaic_gpu" and head_dim > 64:
        width = -(-head_dim // 128) * 128
    return PoolLayout(halves=halves, width=width, page_size=page_size, scale_width=scale_width)
