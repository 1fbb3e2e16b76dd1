"""Layers whose caches are given pages, and give them back, together. No JAX.

Caches of one page shape share arrays and one set of page ids: each group has a block table, and
layer i of a group lies in array i. A page is so many tokens of *one group's* layers, whichever
group it is: what a window gives back can serve a layer that sees everything.

    18 layers, 3 that see everything (F) and 15 with a window (W): 6 groups over 3 arrays

                 array 0   array 1   array 2
    group 0      F5        F11       F17
    group 1      W0        W1        W2
    group 2      W3        W4        W6
    ...

Source: the hybrid KV cache manager of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.models.cache_spec import LatentCache, PagedCache, RecurrentState

MOST_GROUPS = 8
"""Each has a block table of its own, which the host fills and programs read."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Caches that hold the same positions of a sequence.

    Attributes:
        caches: which of `ModelConfig.own_caches()`; the first lies in array 0, and so on.
        window: tokens that queries of all of them may still see; None if pages are kept to the end.
    """

    caches: tuple[int, ...]
    window: int | None = None


class CachePlace(NamedTuple):
    """Where a cache lies: which array, by which group's block table. Recurrent states come behind
    the arrays of pages, and their group behind those that have block tables."""

    array: int
    group: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a model's caches share arrays.

    Attributes:
        groups: at least one; those that see everything come first.
        arrays: what a page of each array holds.
        states: recurrent states, each in a row's own place.
        state_caches: which of `ModelConfig.own_caches()` they are.
    """

    groups: tuple[CacheGroup, ...]
    arrays: tuple[PagedCache, ...]
    states: tuple[RecurrentState, ...] = ()
    state_caches: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The groups' windows."""
        return tuple(group.window for group in self.groups)

    def places(self) -> tuple[CachePlace, ...]:
        """The place of each cache, in the order of `ModelConfig.own_caches()`."""
        found = {
            cache: CachePlace(array, index)
            for index, group in enumerate(self.groups)
            for array, cache in enumerate(group.caches)
        }
        for index, cache in enumerate(self.state_caches, len(self.arrays)):
            found[cache] = CachePlace(index, len(self.groups))
        return tuple(found[cache] for cache in range(len(found)))


def cache_layout(caches: Sequence[PagedCache | RecurrentState]) -> CacheLayout:
    """The groups of a model's own caches. Recurrent states take no part in groups of pages."""
    states = {i: cache for i, cache in enumerate(caches) if isinstance(cache, RecurrentState)}
    paged = {i: cache for i, cache in enumerate(caches) if not isinstance(cache, RecurrentState)}
    layout = _page_layout(tuple(paged.values()))
    if not states:
        return layout
    numbers = tuple(paged)
    groups = tuple(
        replace(group, caches=tuple(numbers[cache] for cache in group.caches))
        for group in layout.groups
    )
    return CacheLayout(groups, layout.arrays, tuple(states.values()), tuple(states))


def _page_layout(caches: Sequence[PagedCache]) -> CacheLayout:
    """The groups of caches that lie in pages.

    Caches of one kind (shape and window) are cut into groups of as many layers as the rarest kind
    has, so that it wastes nothing; the last group of another kind may leave arrays unused. Where
    that makes too many groups, they are made larger.

    Caches of differing shapes form one group, each with an array of its own, which keeps all pages:
    an array's pages cannot serve another's.
    """
    indices = tuple(range(len(caches)))
    if len(set(map(_page_shape, caches))) > 1:
        return CacheLayout((CacheGroup(indices),), tuple(caches))
    kinds: dict[int | None, list[int]] = {}
    for index, cache in enumerate(caches):
        kinds.setdefault(cache.window, []).append(index)
    size = min(map(len, kinds.values()))
    while sum(-(-len(kind) // size) for kind in kinds.values()) > max(MOST_GROUPS, len(kinds)):
        size += 1
    whole_first = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, -(kind[0] or 0)))
    groups = tuple(
        CacheGroup(tuple(kind[start : start + size]), window)
        for window, kind in whole_first
        for start in range(0, len(kind), size)
    )
    most = max(len(group.caches) for group in groups)
    return CacheLayout(groups, tuple(caches[:1]) * most)


def _page_shape(cache: PagedCache) -> PagedCache:
    """What caches have in common whose pages can serve each other."""
    return cache if isinstance(cache, LatentCache) else replace(cache, window=None)
