"""How many replicas serve a workload on time.

Each number of replicas is one simulated run, which ends as soon as too many requests are late: of
fleets that are too small only the beginning is played.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Attain = Callable[[int], float]
"""Attainment, 0 to 1, of so many replicas."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The outcome of a search.

    Attributes:
        num_replicas: the fewest that attain what was asked for; None if the most that were allowed
            do not.
        attained: by number of replicas, of all that were tried.
    """

    num_replicas: int | None
    attained: dict[int, float]


def fewest_replicas(attain: Attain, threshold: float, most: int) -> Sizing:
    """The fewest replicas that attain a share.

    Doubles them until they do, and halves the way back: each number is tried once, twice the
    logarithm of the result in all. Attainment is taken to grow with replicas, which holds but for
    noise, so that the result attains the share and one fewer does not.

    Args:
        attain: runs so many replicas.
        threshold: share of requests that must be on time, above 0 and at most 1.
        most: replicas to try, at least 1.
    """
    attained: dict[int, float] = {}

    def is_enough(num: int) -> bool:
        if num not in attained:
            attained[num] = attain(num)
        return attained[num] >= threshold

    too_few, enough = 0, 1
    while not is_enough(enough):
        if enough == most:
            return Sizing(None, attained)
        too_few, enough = enough, min(2 * enough, most)
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return Sizing(enough, attained)
