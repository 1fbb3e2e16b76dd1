"""Outputs on their way from the engine's thread to whoever reads them, and when readers are woken.

Waking a reader, and what it then does to send one message, costs the event loop some 100
microseconds; the engine's thread needs the same interpreter. So a stream of deltas has a least
interval between two wakings: tokens that come meanwhile leave together, in an output that is made
when it is read. The first output and the last never wait. Everything here lives in the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from octavo.engine.output.output_pace import OutputPace
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.output.transcript import Transcript

NUM_PHASES = 8
"""Streams that began together are woken in so many groups, one after the other."""

Told = Transcript | RequestOutput
"""Who has something to tell; or an output, where each state is to be read as it was."""


class OutputStream:
    """One request's outputs. One coroutine reads it.

    Args:
        engine_id: the engine's id of the request.
        is_delta: whether each output holds only what is new: several may then be read as one.
        label: what the client calls the request.
        owner: the credential that submitted it; empty for none.
    """

    __slots__ = (
        *("due_s", "engine_id", "is_aborted", "is_begun", "is_delta", "is_ready", "label", "owner"),
        *("_items", "_reader", "_transcript"),
    )

    def __init__(self, engine_id: str, *, is_delta: bool, label: str = "", owner: str = "") -> None:
        self.engine_id = engine_id
        self.is_delta = is_delta
        self.label = label
        self.owner = owner
        self.is_aborted = False
        """Whether its end was asked for."""
        self.due_s = 0.0
        """When its reader may be woken again."""
        self.is_begun = False
        """Whether its first output came."""
        self.is_ready = False
        """Whether its reader may take what is there."""
        self._transcript: Transcript | None = None
        self._items: deque[RequestOutput | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Told | Exception) -> None:
        """Adds what came; `release` lets it be read."""
        if isinstance(item, Transcript):
            self._transcript = item
        else:
            self._items.append(item)

    def end(self, error: Exception) -> None:
        """Ends it with an exception, behind what came before."""
        self.put(error)
        self.release()

    def release(self) -> None:
        """Lets the reader take what is there."""
        self.is_ready = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> RequestOutput | Exception:
        """The next output, or the exception that ends the stream.

        Deltas that came since the last one are read as one, up to an error.
        """
        while True:
            if self.is_ready:
                items, transcript = self._items, self._transcript
                if transcript is not None and transcript.has_news:
                    output = transcript.read()
                    self.is_ready = bool(items) or (transcript.finished and transcript.has_news)
                    return output
                if items:
                    item = items.popleft()
                    self.is_ready = bool(items)
                    return item
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None


class OutputStreams:
    """The streams of one event loop, by the engine's ids of their requests.

    An id is never given twice, so no output can reach the stream of another submission.

    Args:
        interval_s: least seconds between two wakings of one stream of deltas, see `OutputPace`; 0
            wakes its reader for each output.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self.pace = OutputPace(interval_s)
        self._streams: dict[str, OutputStream] = {}
        self._by_label: dict[tuple[str, str], dict[OutputStream, None]] = {}
        self._held: dict[OutputStream, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(
        self, engine_id: str, *, is_delta: bool, label: str | None = None, owner: str = ""
    ) -> OutputStream:
        """A stream for a new request. Without a label it is known by the engine's id."""
        label = label or engine_id
        stream = OutputStream(engine_id, is_delta=is_delta, label=label, owner=owner)
        self._streams[engine_id] = stream
        self._by_label.setdefault((owner, label), {})[stream] = None
        return stream

    def close(self, stream: OutputStream) -> None:
        """Forgets a stream; what still comes for it is dropped."""
        del self._streams[stream.engine_id]
        self._held.pop(stream, None)
        alike = self._by_label[stream.owner, stream.label]
        del alike[stream]
        if not alike:
            del self._by_label[stream.owner, stream.label]

    def labelled(self, label: str, owner: str) -> list[OutputStream]:
        """Every open stream that one credential submitted under a label."""
        return list(self._by_label.get((owner, label), ()))

    def put_all(self, error: Exception) -> None:
        """Ends every stream with an exception."""
        for stream in self._streams.values():
            stream.end(error)

    def deliver(self, told: Iterable[Told], now_s: float) -> None:
        """Hands on what a step had to tell, at a moment of the event loop's clock."""
        interval_s, streams = self.pace.interval_s(now_s), self._streams
        due: list[OutputStream] = []
        for item in told:
            stream = streams.get(item.engine_id)
            if stream is None or (isinstance(item, Transcript) and not item.has_news):
                continue
            stream.put(item)
            if not stream.is_begun:
                stream.is_begun = True
                self._num_begun += 1
                phase = self._num_begun % NUM_PHASES / NUM_PHASES
                stream.due_s = now_s + interval_s * phase
                stream.release()
            elif now_s >= stream.due_s or item.finished or not stream.is_delta:
                stream.due_s = now_s + interval_s
                self._held.pop(stream, None)
                due.append(stream)
            else:
                self._held[stream] = None
        for stream in due:  # behind those that have their first output: readers run in this order
            stream.release()
        if self._held and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(interval_s, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Releases the held whose time has come, also where no further step tells of them."""
        now_s, self._timer = loop.time(), None
        interval_s = self.pace.interval_s(now_s)
        for stream in [stream for stream in self._held if now_s >= stream.due_s]:
            del self._held[stream]
            stream.due_s = now_s + interval_s
            stream.release()
        if self._held:
            least_s = min([stream.due_s for stream in self._held])
            self._timer = loop.call_at(least_s, self._sweep, loop)
