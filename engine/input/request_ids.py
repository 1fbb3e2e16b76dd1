"""What requests are called inside an engine: names that no request had before."""

from __future__ import annotations

import itertools
import time


class RequestIds:
    """Makes ids from an incarnation, which tells the engine's starts apart, and a counter.

    A client's own id is a label beside it (`Request.label`): two requests may carry one label, and
    a label may come again; an id never does. Ids are not random, so a recorded log can be replayed
    and compared. Any thread may ask for one.

    Args:
        incarnation: begins every id; None takes the milliseconds of the clock, in hexadecimal.
    """

    def __init__(self, incarnation: str | None = None) -> None:
        self.incarnation = incarnation or f"{time.time_ns() // 1_000_000:x}"
        self._numbers = itertools.count()

    def next(self) -> str:
        """An id that was never given."""
        return f"{self.incarnation}-{next(self._numbers)}"
