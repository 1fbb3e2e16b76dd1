"""Where the servers of an application are: an actor that replicas tell and fronts ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

NAMESPACE = "octavo"
"""Of Ray, in which the actor has its name."""
TELL_S = 1.0
"""Between two words of a replica."""
SILENT_S = 15.0
"""Without a word, after which a replica is none any more."""


class Member(NamedTuple):
    """A server.

    Attributes:
        address: `host:port` of its gRPC services.
        node: the Ray node on which `address` means this server; empty for an address that means it
            everywhere.
    """

    address: str
    node: str


def actor_name(app: str) -> str:
    """The name of an application's actor."""
    return f"octavo-members-{app}"


class Members:
    """The servers that said within `SILENT_S` seconds that they serve.

    Keeps nothing that replicas do not say again: one that is lost is made anew by the next replica
    that has something to say.

    Args:
        now_s: the clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._heard: dict[str, tuple[Member, float]] = {}

    def tell(self, replica: str, member: Member) -> None:
        """A replica's server serves."""
        self._heard[replica] = member, self._now_s()

    def leave(self, replica: str) -> int:
        """A replica's server is going away; how many are left."""
        self._heard.pop(replica, None)
        return len(self.all())

    def all(self) -> list[Member]:
        """The servers that there are, in the order in which they came."""
        least_s = self._now_s() - SILENT_S
        self._heard = {name: each for name, each in self._heard.items() if each[1] >= least_s}
        return [member for member, _ in self._heard.values()]
