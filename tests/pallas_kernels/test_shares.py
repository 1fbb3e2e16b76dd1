"""A persistent grid's shares cover all tiles once, and are equal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.ragged_paged_attention.shares import (
    PLAN_FIELDS,
    Segment,
    Shares,
    share_tiles,
)


class Plan:
    """A plan as a kernel walks it, in plain numbers."""

    def __init__(self, shares: Shares, count: list[int]) -> None:
        self.plan = np.asarray(shares.plan).reshape(-1, PLAN_FIELDS)
        self.count = count

    def walk(self, program: int) -> list[tuple[int, int, int, int]]:
        """(head, item, first tile, end) of each segment."""
        head, item, before, tiles, segments, num_live = (int(x) for x in self.plan[program])
        walked = []
        for _ in range(segments):
            end = min(self.count[item], before + tiles)
            walked.append((head, item, before, end))
            tiles -= end - before
            before = 0
            item += 1
            if item == num_live:
                head, item = head + 1, 0
        assert tiles == 0
        return walked


def shares_of(count: list[int], **options: Any) -> tuple[Shares, Plan]:
    share = jax.jit(share_tiles, static_argnames=tuple(options))
    shares = share(jnp.asarray(count, jnp.int32), **options)
    return shares, Plan(shares, count)


LENGTHS = {
    "one long item among short ones": [1, 2, 300, 1, 4, 0, 0],
    "equal items": [16] * 6,
    "many short items": [1] * 40,
    "one item": [9, 0, 0],
    "nothing": [0, 0, 0, 0],
}


@pytest.mark.parametrize("count", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 1, "num_programs": 5, "least": 1},
        {"num_heads": 3, "num_programs": 8, "least": 4},
        {"num_heads": 2, "num_programs": 16, "least": 1, "most_parts": 4},
    ],
    ids=str,
)
def test_every_tile_is_walked_once(count: list[int], options: dict[str, int]) -> None:
    shares, plan = shares_of(count, **options)
    seen = {(head, i): [0] * n for head in range(options["num_heads"]) for i, n in enumerate(count)}
    parts: dict[tuple[int, int], list[int]] = {}
    places = set()
    for program in range(options["num_programs"]):
        for head, item, first, end in plan.walk(program):
            assert end > first
            for tile in range(first, end):
                seen[head, item][tile] += 1
            parts.setdefault((head, item), []).append(program)
            # Where decode leaves a part: nobody else's.
            places.add((head, item + program - int(shares.head_first[head])))
    assert all(set(tiles) <= {1} for tiles in seen.values())
    for (head, item), programs in parts.items():
        assert programs == list(range(int(shares.first[head, item]), programs[-1] + 1))
        assert programs[-1] == int(shares.last[head, item])
        assert len(programs) <= options.get("most_parts", len(programs))
        if len(programs) > 1:
            assert int(shares.num_parts[programs[0]]) == len(programs)
    assert len(places) == sum(map(len, parts.values()))
    bound = len(count) + -(-options["num_programs"] // options["num_heads"])
    assert all(0 <= place < bound for _, place in places)
    begun = sum(len(programs) > 1 for programs in parts.values())
    assert int((shares.num_parts > 0).sum()) == begun


def test_shares_differ_by_the_last_one_alone() -> None:
    _, plan = shares_of([3, 70, 11, 128, 1], num_heads=4, num_programs=132, least=4)
    tiles = plan.plan[:, 3]
    busy = tiles[tiles > 0]
    assert busy.sum() == 4 * 213
    assert set(busy[:-1]) == {-(-4 * 213 // 132)}


def test_short_items_do_not_queue_for_the_sake_of_the_least_share() -> None:
    _, plan = shares_of([1] * 16, num_heads=1, num_programs=32, least=4)
    assert plan.plan[:, 3].max() == 1


def test_a_segment_knows_its_place_in_the_share() -> None:
    segment = Segment(head=0, item=1, whole_first=2, whole_end=9, first=4, end=9, done=7)
    assert (segment.step(4), segment.step(8)) == (7, 11)
