"""What an engine of several replicas asks of each: a process here, or a server elsewhere."""

from __future__ import annotations

from typing import Protocol

from octavo.engine.replicas import messages


class AnyReplica(Protocol):
    """One replica. `send` is for one thread; what is read of it may be by any.

    Attributes:
        index: its number, from 0 on.
        life: how often it has begun to serve, or to be started.
        ready: what it said when it was; None while it is not.
        report: its newest load report; there is one before it is ready.
        is_lost: whether it is gone for good.
        is_quiet: whether it has been silent for longer than it should.
    """

    index: int
    life: int
    ready: messages.Ready | None
    report: messages.LoadReport | None
    is_lost: bool
    is_quiet: bool

    def send(self, command: messages.Command) -> int:
        """Sends a command to a replica that is ready. Never waits, never raises.

        Returns:
            The life that it goes to.
        """
        ...
