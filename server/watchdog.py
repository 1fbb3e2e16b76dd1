"""Notices a step that never ends: the engine's thread is alive, and yet nobody is served."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

_log = logging.getLogger(__name__)

END_AFTER = 2
"""A turn of so many times as long as one may take never ends, as far as anybody can tell."""


class Watchdog:
    """Compares the engine's turns between looks.

    Args:
        engine: to be watched.
        stuck_after_s: seconds in one turn after which it is stuck. Longer than any step, and than a
            compilation that a step waits for.
        longest_gap_s: seconds that count at the most between two looks: a pause of the whole
            process, which keeps it from looking too, is not held against the engine.
        clock: seconds.
        file: stacks of all threads are written there, once each time it gets stuck; None takes
            standard error.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        stuck_after_s: float,
        *,
        longest_gap_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        file: TextIO | None = None,
    ) -> None:
        self._engine = engine
        self._stuck_after_s = stuck_after_s
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._file = file
        self._num_turns = -1
        self._looked_s = clock()
        self._in_turn_s = 0.0
        self._stuck = False

    def look(self) -> bool:
        """Whether the engine is stuck now. To be called every now and then."""
        num_turns, now_s = self._engine.num_turns, self._clock()
        self._in_turn_s += min(now_s - self._looked_s, self._longest_gap_s)
        self._looked_s = now_s
        if num_turns != self._num_turns or not self._engine.is_in_turn:
            self._num_turns, self._in_turn_s = num_turns, 0.0
            if self._stuck:
                _log.warning("the engine's thread moves again")
            self._stuck = False
        elif not self._stuck and self._in_turn_s > self._stuck_after_s:
            self._stuck = True
            _log.critical(
                "the engine's thread has been in one turn for %.0f s: stacks follow",
                self._in_turn_s,
            )
            faulthandler.dump_traceback(self._file or sys.stderr, all_threads=True)
        return self._stuck

    @property
    def hangs(self) -> bool:
        """Whether it has been stuck for as long again: it will not come back."""
        return self._stuck and self._in_turn_s > END_AFTER * self._stuck_after_s


class LoopAlarm:
    """Writes the stacks of all threads when the event loop has not turned for too long.

    Every protocol and its health live in that loop: when it hangs, probes get no answer, and
    nothing inside the loop could tell why. One at a time in a process.

    Args:
        stuck_after_s: seconds without a turn after which it hangs.
        file: where to, with a file descriptor; None takes standard error.
    """

    def __init__(self, stuck_after_s: float, file: TextIO | None = None) -> None:
        self._stuck_after_s = stuck_after_s
        self._file = file

    def turned(self) -> None:
        """Waits anew. To be called from the loop every now and then."""
        # What stands for standard error may have no descriptor, as in a notebook.
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            faulthandler.dump_traceback_later(self._stuck_after_s, file=self._file or sys.stderr)

    def close(self) -> None:
        """Waits no more."""
        faulthandler.cancel_dump_traceback_later()
