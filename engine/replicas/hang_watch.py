"""Finds replicas whose processes hang: stopped, or in a step that never ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

    from octavo.engine.replicas.replica import Replica

START_S = 60.0
"""For a process to say its first word, at least: what it imports takes a while."""
QUIET_BEATS = 3
"""Beats of a replica that may be late before requests rather go to others."""


def beat_period_s(timeout_s: float) -> float:
    """Seconds between two beats of a replica that hangs after `timeout_s`."""
    return min(1.0, timeout_s / 8)


@dataclass(slots=True)
class _Seen:
    """What is known of a replica's process.

    Attributes:
        process: which; None before there was any.
        num_heard: messages from the replica when one last came.
        silent_s: seconds since.
        has_spoken: whether this process ever said anything.
    """

    process: subprocess.Popen[bytes] | None = None
    num_heard: int = 0
    silent_s: float = 0.0
    has_spoken: bool = False


class HangWatch:
    """Kills processes of replicas that hang; then `Replica` starts them again, as after a crash.

    It looks from a thread of its own, and counts seconds by its looks: a pause of this process
    itself (a terminal's Ctrl-Z, a debugger) is not held against replicas.

    Args:
        replicas: to be watched.
        timeout_s: seconds of silence, or in one turn, after which one hangs.
    """

    def __init__(self, replicas: Sequence[Replica], timeout_s: float) -> None:
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._period_s = beat_period_s(timeout_s)
        self._seen = [_Seen() for _ in replicas]
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Looks from now on."""
        threading.Thread(target=self._run, name="octavo-hang-watch", daemon=True).start()

    def close(self) -> None:
        """Looks no more."""
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(self._period_s):
            self.look(self._period_s)

    def look(self, seconds: float) -> None:
        """Looks at all replicas once.

        Args:
            seconds: since the last look.
        """
        for replica, seen in zip(self._replicas, self._seen, strict=True):
            process, num_heard = replica.process, replica.num_heard
            if process is not seen.process:
                seen.process, seen.has_spoken = process, False
                seen.num_heard, seen.silent_s = num_heard, 0.0
            elif num_heard != seen.num_heard:
                seen.num_heard, seen.silent_s, seen.has_spoken = num_heard, 0.0, True
            else:
                seen.silent_s += seconds
            replica.is_quiet = seen.silent_s > QUIET_BEATS * self._period_s
            if process is None:
                continue
            timeout_s = self._timeout_s if seen.has_spoken else max(self._timeout_s, START_S)
            if seen.silent_s >= timeout_s:
                replica.kill(process, f"it hung: nothing was heard of it for {seen.silent_s:.0f} s")
                seen.silent_s = 0.0
            elif replica.stuck_s >= self._timeout_s:
                replica.kill(process, f"it hung: one turn took {replica.stuck_s:.0f} s")
