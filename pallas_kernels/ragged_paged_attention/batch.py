"""What every implementation of ragged paged attention is given.

Shape legend: T tokens of the step, S rows, Hq query heads, Hkv key/value heads, D head size,
N pages in the pool, P tokens in a page, M pages in a row of the block table.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import SCALE_DTYPE, kv_quantization


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Which tokens belong to which row, and where each row's KV lies.

    Tokens are packed row after row; the first `num_decode_rows` rows have one token each, the rest
    any number. Rows at and beyond `num_rows` are padding. Lengths are data, not shape: one
    compiled program serves every mix of decode rows and prefill chunks.

    Attributes:
        block_table: int32[S, M] page ids; 0 is the trash page.
        kv_lens: int32[S] tokens of KV a row attends to, its new tokens included; 0 for an idle row.
        cu_q_lens: int32[S + 1] first token of each row; rows beyond `num_rows` are empty.
        token_row: int32[T] row of each token; any valid row for padding.
        token_page: int32[T] page each new token's KV is written to; 0 for padding.
        token_offset: int32[T] its place in the page.
        num_decode_rows: int32[] rows with exactly one token, first.
        num_rows: int32[] rows in use.
    """

    block_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    token_row: jax.Array
    token_page: jax.Array
    token_offset: jax.Array
    num_decode_rows: jax.Array
    num_rows: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """One layer's KV pool. Page 0 is the trash page.

    Attributes:
        pages: [N, 2, Hkv, P, D], keys and values of a page side by side: reading a page is one
            contiguous copy of 2·Hkv·P·D numbers. Or [N, 1, Hkv, P, 2·D], a token's key and value
            in one row, where `pool_layout` says so. Or [N, 1, Hkv, P, D], keys alone, whose
            beginnings are the values. Narrow floats may be stored as bits, see `kv_dtype`.
        scales: float32 [N, 2, Hkv, P'] where pages hold int8 or fp8: a number stands for itself
            times its token's and head's scale, of keys or of values; None where they hold the
            numbers themselves. Of keys alone, the first is of what is the value, too, the second of
            the rest, which is rotated and not normalized. A scale a token is known when the token
            is written, needs no calibration and clips nothing, for 4 bytes beside the D of a head.
            P' is the `scale_width` of the layout, at least P; nobody reads what exceeds P.
        value_size: static; of a pool of keys alone, how many of a key's numbers, from the first
            on, are the value. None where values lie on their own.
    """

    pages: jax.Array
    scales: jax.Array | None = None
    value_size: int | None = field(default=None, metadata={"static": True})

    @property
    def k(self) -> jax.Array:
        """Keys [N, Hkv, P, D], before scales."""
        return self.pages[:, 0, ..., : self.head_dim]

    @property
    def v(self) -> jax.Array:
        """Values [N, Hkv, P, D], before scales."""
        if self.value_size is not None:
            return self.pages[:, 0, ..., : self.value_size]
        return self.pages[:, -1, ..., -self.head_dim :]

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, ...],
        dtype: Any,
        scale_width: int | None = None,
        value_size: int | None = None,
    ) -> PagedKV:
        """An empty pool, with scales where `dtype` needs them.

        Args:
            shape: [N, 2, Hkv, P, D], [N, 1, Hkv, P, 2·D] or, of keys alone, [N, 1, Hkv, P, D].
            scale_width: P'; None is P.
            value_size: see `PagedKV`.
        """
        is_scaled = kv_quantization(dtype) is not None
        width = shape[3] if scale_width is None else scale_width
        scales = (shape[0], 2, shape[2], width)
        return cls(
            pages=jnp.zeros(shape, dtype),
            scales=jnp.zeros(scales, SCALE_DTYPE) if is_scaled else None,
            value_size=value_size,
        )

    @property
    def num_kv_heads(self) -> int:
        return self.pages.shape[2]

    @property
    def page_size(self) -> int:
        return self.pages.shape[3]

    @property
    def head_dim(self) -> int:
        """D, numbers that a key or a value takes."""
        if self.holds_keys_alone:
            return self.pages.shape[4]
        return self.pages.shape[1] * self.pages.shape[4] // 2

    @property
    def holds_keys_alone(self) -> bool:
        """Whether values are the beginnings of keys, [N, 1, Hkv, P, D]."""
        return self.value_size is not None

    @property
    def in_one_row(self) -> bool:
        """Whether a token's key and value share a row, [N, 1, Hkv, P, 2·D]."""
        return self.pages.shape[1] == 1 and not self.holds_keys_alone

    def apart(self) -> PagedKV:
        """The same pool as [N, 2, Hkv, P, D]."""
        return replace(self, pages=jnp.stack([self.k, self.v], axis=1))

    def side_by_side(self) -> PagedKV:
        """The same pool as [N, 1, Hkv, P, 2·D]."""
        return replace(self, pages=jnp.concatenate([self.k, self.v], axis=-1)[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """The static part of a layer's attention.

    Attributes:
        scale: multiplies the scores.
        sliding_window: a query sees this many latest positions, itself included; None is all.
        logit_softcap: scores become `cap · tanh(score / cap)`; None is off.
        attention_chunk: positions are cut into chunks of so many, and a query sees those of its
            own, up to itself; None is no such cut.
    """

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None
    attention_chunk: int | None = None

    @property
    def sees_all(self) -> bool:
        """Whether a query sees every position before it."""
        return self.sliding_window is None and self.attention_chunk is None

    def first_visible(self, position: jax.Array) -> jax.Array:
        """The first position that queries at `position`, int32 of any shape, see."""
        first = jnp.zeros_like(position)
        if self.sliding_window is not None:
            first = jnp.maximum(position + 1 - self.sliding_window, 0)
        if self.attention_chunk is not None:
            chunk = jnp.asarray(self.attention_chunk, position.dtype)
            first = jnp.maximum(first, position // chunk * chunk)
        return first

    def first_visible_of_tile(
        self, position: jax.Array, last: jax.Array, origin: jax.Array | int = 0
    ) -> jax.Array:
        """As `first_visible` where not all is seen, without a division for each position. What it
        returns may be before all positions.

        Args:
            position: int32 of any shape, counted from `origin`, as what is returned. At most `last`
                and more than `last - attention_chunk`.
            last: int32[], counted from 0.
        """
        assert not self.sees_all
        first = [] if self.sliding_window is None else [position + (1 - self.sliding_window)]
        if self.attention_chunk is not None:
            chunk = jnp.int32(self.attention_chunk)
            begin = jax.lax.div(last, chunk) * chunk - origin
            first.append(jnp.where(position >= begin, begin, begin - chunk))
        return functools.reduce(jnp.maximum, first)
