"""A TCP relay between two parts of a fleet: it holds, delays, repeats or severs what passes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter

from octavo.engine.hosts.messages import _HEAD as HEAD

UP, DOWN = "up", "down"
"""To what the relay stands before, and from it."""
RESET = struct.pack("ii", 1, 0)
"""Of `SO_LINGER`: the other side sees a reset, and no end of what was sent."""


class Relay:
    """Passes on what comes to a port of its own, unless told otherwise. For one event loop.

    Args:
        target: "host:port" that it stands before.
        of_frames: what passes are frames of a group of hosts (`engine/hosts/messages.py`); they
            pass whole.

    Attributes:
        target: as above; it may change.
        address: "host:port" of its own.
        delay_s: longest time that a piece is kept, each way.
        num_repeats: frames to come that pass twice, each way.
    """

    def __init__(self, target: str = "", *, of_frames: bool = False) -> None:
        self.target = target
        self.address = ""
        self.delay_s = {UP: 0.0, DOWN: 0.0}
        self.num_repeats: Counter[str] = Counter()
        self._of_frames = of_frames
        self._passes = {UP: asyncio.Event(), DOWN: asyncio.Event()}
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server
        self.let_go()

    async def open(self, port: int = 0) -> None:
        """Listens from now on.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Listens no more, and breaks every connection."""
        self._server.close()
        self.sever()

    def hold(self, *ways: str) -> None:
        """Nothing passes these ways, not even the end of a connection, until `let_go`."""
        for way in ways:
            self._passes[way].clear()

    def let_go(self) -> None:
        """All passes that was held, and what comes."""
        for event in self._passes.values():
            event.set()

    def sever(self) -> None:
        """Breaks every connection; new ones are taken. What was held is lost."""
        for writer in list(self._writers):
            linger = (socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(*linger)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        others = None
        try:
            host, _, port = self.target.rpartition(":")
            others, to = await asyncio.open_connection(host, int(port))
            self._writers.add(to)
            await asyncio.gather(self._pass(UP, reader, to), self._pass(DOWN, others, writer))
        except OSError:
            pass  # one side is gone, and soon the other is
        finally:
            for each in (writer, to) if others is not None else (writer,):
                self._writers.discard(each)
                each.transport.abort()

    async def _pass(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Passes what comes until one side ends, then ends the other."""
        try:
            while piece := await self._piece(reader):
                if limit_s := self.delay_s[way]:
                    await asyncio.sleep(random.uniform(0.0, limit_s))
                await self._passes[way].wait()
                if self.num_repeats[way] > 0 and self._of_frames:
                    self.num_repeats[way] -= 1
                    piece += piece
                writer.write(piece)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        await self._passes[way].wait()
        writer.close()

    async def _piece(self, reader: asyncio.StreamReader) -> bytes:
        if not self._of_frames:
            return await reader.read(1 << 16)
        head = await reader.readexactly(HEAD.size)
        return head + await reader.readexactly(HEAD.unpack(head)[0])
