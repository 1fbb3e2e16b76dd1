"""What a replica tells its fronts."""

from __future__ import annotations

from typing import NamedTuple

from octavo.engine.request import Priority
from octavo.engine.scheduler.standing import Standing

NUM_CLASSES = len(Priority)

MOST_PREFIXES = 256
"""Prompts that a report names: more in between are not told."""


class ReplicaReport(NamedTuple):
    """A replica at one moment. It is old when it is read: a router adds what it sent since.

    Attributes:
        replica: its index.
        life: times that it was started before. What came of an earlier life counts no more.
        sequence: number of the report in this life. One that was overtaken counts no more.
        taken_s: when, on the fronts' clock. Requests that were sent by then are in the figures.
        standing: of its scheduler.
        prefixes: chunks (`prompt_chunks`) of prompts that it took since its last report, whoever
            sent them; at most `MOST_PREFIXES`, the newest.
        is_draining: whether it takes no new requests.
    """

    replica: int
    life: int
    sequence: int
    taken_s: float
    standing: Standing
    prefixes: tuple[tuple[int, ...], ...] = ()
    is_draining: bool = False
