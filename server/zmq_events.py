"""A prefix cache's batches of events over ZeroMQ, as vLLM publishes them.

Indexers of llm-d and Dynamo read them. A message has three parts: the topic, the batch's number in
eight bytes, and the batch in MessagePack: `[unix_s, [event, ...], null]`, each event an array that
begins with its kind. Source: vllm/distributed/kv_events.py, in the form of arrays, which readers
have understood longest.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.kv.cache_events import CacheEvent, PagesRemoved, PagesStored
from octavo.engine.kv.page_hash import PageHash
from octavo.server.cache_feed import Batch, CacheFeed

MEDIUM = "GPU"
"""vLLM's word for the device's own memory, whatever the device."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger(__name__)


class ZmqPublisher:
    """Publishes what a feed tells, from the event loop.

    A subscriber that comes late, or misses a batch, asks at the replay endpoint for what comes from
    a number on; it is told the whole where that is not kept any more, or the number is 0.

    Args:
        feed: of the prefix cache.
        endpoint: that subscribers connect to, "tcp://HOST:PORT".
        replay_endpoint: that they ask at for what they missed; None for none.
        topic: of all messages, in UTF-8.

    Raises:
        InvalidConfigError: an endpoint cannot be bound, or the packages are not installed.
    """

    def __init__(
        self, feed: CacheFeed, endpoint: str, replay_endpoint: str | None, topic: str
    ) -> None:
        try:
            import msgspec
            import zmq
            import zmq.asyncio
        except ImportError as error:
            allowed = f"not given, unless octavo[kv-events] is installed ({error})"
            raise InvalidConfigError("kv_events_endpoint", endpoint, allowed) from error
        self._feed = feed
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.encode
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._publisher = self._bound(zmq.PUB, "kv_events_endpoint", endpoint)
        self._replayer = None
        if replay_endpoint is not None:
            name = "kv_events_replay_endpoint"
            self._replayer = self._bound(zmq.ROUTER, name, replay_endpoint)

    def start(self) -> None:
        """Begins to publish."""
        self._tasks.append(asyncio.create_task(self._publish()))
        if self._replayer is not None:
            self._tasks.append(asyncio.create_task(self._replay(self._replayer)))

    def close(self) -> None:
        """Closes the endpoints."""
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    def _bound(self, kind: int, name: str, endpoint: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            allowed = f"tcp://HOST:PORT of this machine, with a free port ({error})"
            raise InvalidConfigError(name, endpoint, allowed) from error
        return socket

    async def _publish(self) -> None:
        async for batch in self._feed.batches(0):
            await self._publisher.send_multipart([self._topic, *self._parts(batch)])

    async def _replay(self, socket: Any) -> None:
        while True:
            request = await socket.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                _log.warning("a replay of events was asked for in a way that is none")
                continue
            client, empty, first = request
            last = max(int.from_bytes(first, "big") - 1, 0)
            for batch in self._feed.missed(last):
                await socket.send_multipart([client, empty, *self._parts(batch)])
            await socket.send_multipart([client, empty, END_OF_REPLAY, b""])

    def _parts(self, batch: Batch) -> tuple[bytes, bytes]:
        events = [_event(event, self._feed.page_size) for event in batch.events]
        return batch.number.to_bytes(8, "big"), self._encode([batch.unix_s, events, None])


def _event(event: CacheEvent, page_size: int) -> list[Any]:
    """vLLM's fields in vLLM's order."""
    if isinstance(event, PagesStored):
        parent = None if event.parent is None else _number(event.parent)
        names = [_number(name) for name in event.names]
        lora_id = lora_name = None
        stored = [names, parent, event.token_ids, page_size, lora_id, MEDIUM, lora_name]
        return ["BlockStored", *stored]
    if isinstance(event, PagesRemoved):
        return ["BlockRemoved", [_number(name) for name in event.names], MEDIUM]
    return ["AllBlocksCleared"]


def _number(name: PageHash) -> int:
    """Half of a page's name, as an unsigned number of 64 bits."""
    return int.from_bytes(name[:8], "little")
