"""Who gets the interpreter when the event loop and the engine's thread both want it: the engine.

A thread that finds the interpreter taken waits for it to be given up, for `SWITCH_S` at a time, and
then asks for it. Between two threads that do the same, each is stopped as often: while hundreds of
calls arrive at once, a turn of the engine takes several times as long and the device waits for it.
Python knows no priorities, but the kernel ends a thread's timed waits late by up to its timer slack
(50 microseconds unless set; prctl(2), PR_SET_TIMERSLACK). A large slack makes the event loop wait
that much longer before it asks, and for nothing else of note: when the engine's thread goes to wait
for the device it gives the interpreter up, and the loop has it at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys

SWITCH_S = 0.0001
"""How long a thread waits for the interpreter until it is taken from another that does not give it
up. The wait begins anew whenever the other gives it up for a moment and has it back before this
thread woke, and an event loop under many calls does so several times in a millisecond: with 0.5 ms
the engine's thread was kept out for 40 ms and more. Python's own 5 ms are three steps of a fast
device besides."""
LOOP_SLACK_S = 0.0005
"""So much later may timers of the event loop's thread end: about a turn of the engine."""
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30

_log = logging.getLogger(__name__)


def prefer_engine_thread() -> None:
    """Makes the calling thread, the event loop's, give way to the engine's, which runs already.

    Threads that it starts from here on give way as well. Without Linux only the switch interval is
    set.
    """
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            slack_ns = round(LOOP_SLACK_S * 1e9)
            if ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0):
                _log.warning("the event loop's timer slack cannot be set")


def timer_slack_s() -> float | None:
    """The calling thread's timer slack; None where there is none."""
    if sys.platform != "linux":
        return None
    slack_ns: int = ctypes.CDLL(None).prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    return slack_ns / 1e9
