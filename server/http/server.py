"""uvicorn inside the event loop that gRPC runs in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator

import uvicorn

from octavo.engine.errors import InvalidConfigError
from octavo.server.auth import TokenFile
from octavo.server.file_limit import most_connections
from octavo.server.front import Front
from octavo.server.http.acceptor import Acceptor, Waiting
from octavo.server.http.app import make_app
from octavo.server.http.batches.service import BatchService
from octavo.server.http.connection import Connection, is_urgent
from octavo.server.http.turns import Turns
from octavo.server.serve_config import ServeConfig

BACKLOG = 2048


class HttpServer:
    """The HTTP API on a port of its own.

    Args:
        config: where and how to listen.
        front: the engine's door.
        tokens: that open the server; None lets everybody in.

    Raises:
        InvalidConfigError: the folder of batches cannot be used.
    """

    def __init__(self, config: ServeConfig, front: Front, tokens: TokenFile | None) -> None:
        self._config = config
        self._batches = None if config.batch_files_dir is None else BatchService(config, front)
        waiting = Waiting()
        protocol = functools.partial(
            Connection,
            header_timeout_s=config.receive_timeout_s,
            max_header_bytes=config.max_header_bytes,
            turns=Turns(),
            waiting=waiting,
            stats=front.stats,
        )
        self._server = _Server(
            config,
            waiting,
            uvicorn.Config(
                make_app(config, front, tokens, self._batches),
                http=protocol,  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=max(1, round(config.keepalive_s)),
                **config.uvicorn_tls(),
            ),
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listens.

        Returns: the URL, with the real port.

        Raises:
            InvalidConfigError: the address cannot be bound.
        """
        host, port = self._config.host, self._config.http_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only for sockets that say they are TCP: with it, the
        # second event of a stream waits 40 ms for the first one's acknowledgement.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise InvalidConfigError(
                "http_port", f"{host}:{port}", "an address of this machine whose port is free"
            ) from error
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        scheme = "http" if self._config.tls_cert is None else "https"
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{listener.getsockname()[1]}"

    @property
    def is_listening(self) -> bool:
        """Whether new connections are taken."""
        ended = self._task is None or self._task.done()
        return not ended and self._server.started and not self._server.should_exit

    async def end_batches(self) -> None:
        """Leaves batches to the next server, so that none of their lines is waited for."""
        if self._batches is not None:
            await self._batches.close()

    async def stop(self, grace_s: float) -> None:
        """Closes the port; answers being sent get `grace_s` seconds."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._task
        if self._batches is not None:
            self._batches.folder.close()


class _Server(uvicorn.Server):
    """Accepts with an `Acceptor`, and leaves the process's signals to whoever runs the loop."""

    def __init__(self, serving: ServeConfig, waiting: Waiting, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._serving = serving
        self._waiting = waiting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()

        def make_protocol() -> asyncio.Protocol:
            kind = self.config.http_protocol_class
            protocol: asyncio.Protocol = kind(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )  # type: ignore[call-arg]
            return protocol

        self.servers = [
            Acceptor(
                listener,
                make_protocol,
                is_urgent,
                tls=self.config.ssl,
                open_connections=self.server_state.connections,
                most=most_connections(self._serving.max_connections),
                waiting=self._waiting,
                handshake_timeout_s=self._serving.receive_timeout_s,
            )  # type: ignore[misc]
            for listener in sockets or ()
        ]
        self.started = True
