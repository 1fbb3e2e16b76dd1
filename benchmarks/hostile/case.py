"""One hostile client of the suite, and where it finds the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the server under attack listens.

    Attributes:
        http: base URL, such as http://127.0.0.1:8000.
        grpc: host and port of the gRPC services.
        token: that opens the server; None for a client that has none.
        paying: a token for those clients of a case that are honest.
    """

    http: str
    grpc: str
    token: str | None = None
    paying: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers (and gRPC metadata) that carry the token."""
        return {} if self.token is None else {"authorization": f"Bearer {self.token}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of hostile client.

    Attributes:
        name: in the table, and on the command line.
        send: attacks the server once, for a few seconds at most, and returns. A refusal is what
            the attacker expects: `send` raises `AssertionError` alone, for an answer that it must
            not get (a 500, INTERNAL, no answer at all). It gives back every connection.
        short: whether the case is part of the short form that CI runs.
    """

    name: str
    send: Callable[[Addresses], Awaitable[None]]
    short: bool = True
