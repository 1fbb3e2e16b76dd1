"""Renders chats in other processes: what a template does there delays nobody's token here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
)
from octavo.server.chat_workers import BEYOND, BROKEN, INVALID, LENGTH, NUM_WORKERS, TEXT, WALL_S

QUEUE_S = 30.0
"""A chat waits for a worker that long; with workers that all go to their limits, some do."""
ATTEMPTS = 2
"""Of a chat, where the processes ended under it for no fault of its own."""
_SPARE_S = 5.0


class ChatRenderer:
    """The workers of one template; see `octavo.server.chat_workers`. Lives in the event loop.

    Args:
        source: Jinja text; "" if every chat brings its own.
        named_tokens: "bos_token", … -> text.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        self._setup = marshal.dumps({"source": source, "named_tokens": dict(named_tokens)})
        self._slots = asyncio.Semaphore(NUM_WORKERS)
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Starts the processes, unless they run."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                await asyncio.to_thread(self._start)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: Mapping[str, Any],
        template: str | None = None,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages, names: positional and named arguments of `ChatTemplate.render`; plain values,
                as JSON has them.
            template: rendered instead of the model's own.

        Raises:
            InvalidRequestError: messages or a template that cannot be rendered, or not within the
                limits.
            ModelLoadError: the model's template does not compile.
            OverloadedError: every worker is busy, for seconds.
            EngineDeadError: the processes cannot be started.
        """
        request = {"messages": messages, "names": dict(names), "template": template}
        try:
            data = marshal.dumps(request)
        except ValueError:
            raise InvalidRequestError("messages", messages, "plain values, not so deep") from None
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._slots.acquire()
        except TimeoutError:
            raise OverloadedError("all that renders chats is busy", 1.0) from None
        try:
            for _ in range(ATTEMPTS):
                await self.start()
                answer = await self._ask(data)
                if answer:
                    return _text(answer, messages)
                if self._process is not None and self._process.poll() is None:
                    # The worker alone has ended.
                    raise InvalidRequestError("messages", messages, BEYOND)
        finally:
            self._slots.release()
        raise EngineDeadError("what renders chats has ended")

    def close(self) -> None:
        """Ends the processes."""
        self._is_closed = True
        self._stop()

    async def _ask(self, data: bytes) -> bytes:
        """A worker's answer; nothing, or the beginning of one, if it ended."""
        assert self._control is not None
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, contextlib.suppress(TimeoutError, OSError):
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            async with asyncio.timeout(WALL_S + _SPARE_S):
                await loop.sock_sendall(ours, LENGTH.pack(len(data)) + data)
                parts = []
                while part := await loop.sock_recv(ours, 1 << 20):
                    parts.append(part)
                return b"".join(parts)
        return b""

    def _start(self) -> None:
        self._stop()
        if self._is_closed:
            raise EngineDeadError("the server is shutting down")
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "octavo.server.chat_workers", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            ours.sendall(LENGTH.pack(len(self._setup)) + self._setup)
        except OSError as error:
            ours.close()
            raise EngineDeadError(f"what renders chats cannot be started: {error}") from error
        ours.setblocking(False)
        self._control = ours

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # the workers end with it
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _text(answer: bytes, messages: Sequence[Mapping[str, Any]]) -> str:
    kind, rest = answer[:1], answer[1 + LENGTH.size :]
    if len(answer) <= LENGTH.size or len(rest) != LENGTH.unpack_from(answer, 1)[0]:
        raise InvalidRequestError("messages", messages, BEYOND)
    if kind == TEXT:
        return rest.decode("utf-8", "surrogatepass")
    if kind == INVALID:
        field, shown, allowed = json.loads(rest)
        raise InvalidRequestError(field, _Shown(shown), allowed)
    assert kind == BROKEN
    raise ModelLoadError(rest.decode())


class _Shown(str):
    """A value as an error shows it, shortened already."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
