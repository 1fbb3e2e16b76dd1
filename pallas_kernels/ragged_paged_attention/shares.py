"""The schedule of a persistent grid: equal shares of a ragged step, computed from its lengths.

All KV tiles of all heads and items, head after head and item after item, are one line; a program
takes one stretch of it and walks whatever items lie there, whole ones or parts of them. No length
makes a program wait for another: shares differ by one tile, and a long item is simply cut where a
share ends. (Source: Osama et al., Stream-K, arXiv 2301.03598; Sanovar et al., Lean Attention,
arXiv 2405.10480.)

A part of an item is worth its cost only from some tiles on, so there is a least share; it is never
more than the longest item, so that short items do not queue behind each other.

Legend: I items of a head, live ones first; H heads; P programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

PLAN_FIELDS = 6
"""Of a program, in `Shares.plan`: head, item, tiles of it before, tiles, segments, live items."""
WALK_FIELDS = 4
"""Of a place in a share: head, item, tiles of it before, tiles walked before."""
_Place = tuple[Any, Any, Any, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Who walks what.

    Attributes:
        plan: int32[P · PLAN_FIELDS] where each program begins and how far it goes.
        first, last: int32[H, I] programs of each item's first and last tile; an item that is not
            live has last < first.
        head_first: int32[H] the program of each head's first tile.
        num_parts: int32[P] programs that share the item which this one begins and another ends; 0
            where there is none.
    """

    plan: jax.Array
    first: jax.Array
    last: jax.Array
    head_first: jax.Array
    num_parts: jax.Array


def share_tiles(
    count: jax.Array,
    *,
    num_heads: int,
    num_programs: int,
    least: int,
    most_parts: int | None = None,
) -> Shares:
    """Cuts the line of all tiles into shares.

    Args:
        count: int32[I] KV tiles of each item; 0 beyond the live ones.
        least: tiles of a share, if an item has so many.
        most_parts: no item is cut into more; None is any number.
    """
    ends = jnp.cumsum(count, dtype=jnp.int32)
    starts = ends - count
    per_head = jnp.maximum(ends[-1], 1)
    total = ends[-1] * num_heads
    longest = count.max()
    share = jnp.maximum(_ceil_div(total, num_programs), jnp.minimum(longest, least))
    if most_parts is not None:
        share = jnp.maximum(share, _ceil_div(longest, most_parts - 1))
    share = jnp.maximum(share, 1).astype(jnp.int32)
    num_live = (count > 0).sum(dtype=jnp.int32)

    def place(tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Head, item, and the item's tiles before this one."""
        head = jnp.minimum(tile // per_head, num_heads - 1)
        within = tile - head * per_head
        item = jnp.searchsorted(ends, within, side="right", method="compare_all")
        item = jnp.clip(item, 0, jnp.maximum(num_live - 1, 0)).astype(jnp.int32)
        return head, item, within - starts[item]

    program = jnp.arange(num_programs, dtype=jnp.int32)
    begin = jnp.minimum(program * share, total)
    end = jnp.minimum(begin + share, total)
    tiles = end - begin
    head, item, before = place(jnp.minimum(begin, jnp.maximum(total - 1, 0)))
    last_head, last_item, _ = place(jnp.maximum(end - 1, 0))
    segments = (last_head * num_live + last_item) - (head * num_live + item) + 1
    segments = jnp.where(tiles > 0, segments, 0)
    plan = jnp.stack([head, item, before, tiles, segments, jnp.full_like(head, num_live)], axis=1)

    line = jnp.arange(num_heads, dtype=jnp.int32)[:, None] * per_head + starts
    first = line // share
    last = jnp.where(count > 0, (line + count - 1) // share, first - 1)
    crosses = first[last_head, last_item] == program
    crosses &= last[last_head, last_item] > program
    parts = last[last_head, last_item] - program + 1
    return Shares(
        plan=plan.reshape(-1).astype(jnp.int32),
        first=first,
        last=last,
        head_first=jnp.arange(num_heads, dtype=jnp.int32) * per_head // share,
        num_parts=jnp.where(crosses & (tiles > 0), parts, 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What a program walks of one item.

    Attributes:
        head, item: which.
        whole_first, whole_end: the item's KV tiles.
        first, end: those that are this program's.
        done: tiles that the program walked before.
    """

    head: Any
    item: Any
    whole_first: Any
    whole_end: Any
    first: Any
    end: Any
    done: Any

    def step(self, tile: Any) -> Any:
        """How many tiles the program walked before this one."""
        return self.done + tile - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareWalk:
    """One program's share, in a kernel.

    Attributes:
        plan_ref: `Shares.plan`.
        first_ref, end_ref: int32[I] KV tiles of each item.
        program: this one.
    """

    plan_ref: Any
    first_ref: Any
    end_ref: Any
    program: Any

    @property
    def num_tiles(self) -> Any:
        return self._field(3)

    def each(self, visit: Callable[[Segment], None]) -> None:
        """Calls `visit` in a loop over the share's segments."""

        def one(_: Any, place: _Place) -> _Place:
            segment = self._segment(place)
            visit(segment)
            return self._next(segment)

        lax.fori_loop(jnp.int32(0), self._field(4), one, self._begin())

    def each_in_memory(
        self,
        memory: Any,
        visit: Callable[[Callable[[], Segment]], Any],
        leave: Callable[[Segment, Any], None],
    ) -> None:
        """As `each`, with the place in the share kept in memory, not in registers.

        Args:
            memory: int32[WALK_FIELDS] of this warpgroup alone.
            visit: is given what reads the segment from memory, for when it is needed.
            leave: is given the segment and what `visit` returned.
        """

        def write(place: _Place) -> None:
            # Warps run apart: each has read the old place before any writes, and none reads before.
            plgpu.commit_smem()
            for i, value in enumerate(place):
                memory[i] = value
            plgpu.commit_smem()

        def read() -> Segment:
            return self._segment((memory[0], memory[1], memory[2], memory[3]))

        write(self._begin())

        @pl.loop(0, self._field(4))
        def _one(_: Any) -> None:
            results = visit(read)
            leave(read(), results)
            write(self._next(read()))

    def _begin(self) -> _Place:
        return self._field(0), self._field(1), self._field(2), jnp.int32(0)

    def _segment(self, place: _Place) -> Segment:
        head, item, before, done = place
        whole_first, whole_end = self.first_ref[item], self.end_ref[item]
        first = whole_first + before
        return Segment(
            head=head,
            item=item,
            whole_first=whole_first,
            whole_end=whole_end,
            first=first,
            end=jnp.minimum(whole_end, first + self.num_tiles - done),
            done=done,
        )

    def _next(self, segment: Segment) -> _Place:
        is_last = segment.item + 1 >= self._field(5)
        return (
            jnp.where(is_last, segment.head + 1, segment.head),
            jnp.where(is_last, 0, segment.item + 1),
            jnp.int32(0),
            segment.done + segment.end - segment.first,
        )

    def _field(self, index: int) -> Any:
        return self.plan_ref[self.program * PLAN_FIELDS + index]


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b
