"""When Python's collector of cycles looks at everything: while that is little.

A look holds every thread. One at 5,000 connections takes 150 ms, and comes just when they do.
"""

from __future__ import annotations

import gc
import sys

COLLECT_AT = (2_000, 10, 100)
"""Objects more than before, and rounds, at which the collector looks at each generation. A look at
the youngest takes under a millisecond, at the next one about 5 ms; at everything, only after two
million more objects without a calm moment."""
FEW_BLOCKS = 30_000
"""Blocks of memory beyond those of the loaded server with which a whole look takes 10 to 40 ms; at
180,000 it takes 120 (on two cores of an EPYC of 2021 that steps keep busy)."""


def leave_out_what_is_loaded() -> None:
    """Has the collector look no more at what there is now: it stays."""
    gc.collect()
    gc.freeze()


class Collector:
    """Leaves out what is loaded already, and looks at the rest whenever that is little."""

    def __init__(self) -> None:
        leave_out_what_is_loaded()
        gc.set_threshold(*COLLECT_AT)
        self._num_loaded = sys.getallocatedblocks()

    def tidy(self) -> None:
        """Looks at everything if objects have come to stay since the last time, and are few."""
        if gc.get_count()[2] and sys.getallocatedblocks() - self._num_loaded < FEW_BLOCKS:
            gc.collect()
