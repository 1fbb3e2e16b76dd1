"""Servers that a front sends requests to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
    # A server that starts again is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where a server is, and how it is spoken to.

    Attributes:
        target: host and port of its gRPC services.
        token: shown with every call; None for none.
        credentials: for TLS; None is plain text.
    """

    target: str
    token: str | None = None
    credentials: grpc.ChannelCredentials | None = None

    def channel(self) -> grpc.aio.Channel:
        """A new channel; within an event loop."""
        options: Any = CHANNEL_OPTIONS
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.target, options=options)
        return grpc.aio.secure_channel(self.target, self.credentials, options=options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)
