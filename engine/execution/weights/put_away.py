"""Arrays of a device that wait in the host's memory, to be put back where they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from octavo.pallas_kernels.compat import placement_of


@dataclass(frozen=True, slots=True, eq=False)
class PutAway:
    """An array in the host's memory.

    Attributes:
        values: its numbers.
        placement: over which devices it was laid, and in which order.
    """

    values: NDArray[Any]
    placement: Any


def put_away(trees: Any) -> Any:
    """Trees of arrays as trees of `PutAway`s; one array that is in several places stays one.

    The arrays' memory is free once nothing else refers to them.
    """
    known: dict[int, PutAway] = {}

    def move(array: jax.Array) -> PutAway:
        if id(array) not in known:
            known[id(array)] = PutAway(np.asarray(array), placement_of(array))
        return known[id(array)]

    return jax.tree.map(move, trees)


def put_back(trees: Any) -> Any:
    """Trees of `PutAway`s as trees of arrays on their devices."""
    known: dict[int, jax.Array] = {}

    def move(kept: PutAway) -> jax.Array:
        if id(kept) not in known:
            known[id(kept)] = jax.device_put(kept.values, kept.placement)
        return known[id(kept)]

    return jax.tree.map(move, trees, is_leaf=lambda leaf: isinstance(leaf, PutAway))
