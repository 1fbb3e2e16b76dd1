"""Ctrl-C where it does no harm.

Python raises KeyboardInterrupt between any two instructions: also where a step has taken the
device's state and has not yet given the next one, or where a plan is not yet in flight. What is
interrupted there must be recovered as after a failure.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Holds the first Ctrl-C back until it is asked for; a second one comes at once.

    It does so in the main thread alone, and where Ctrl-C means what it means in Python.

    Yields: raises KeyboardInterrupt if one came. The end of the block does so, too.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    num_held = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal num_held
        num_held += 1
        if num_held > 1:
            signal.default_int_handler(number, frame)

    def let_in() -> None:
        if num_held:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_in
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    let_in()
