"""Answers that end when their client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.errors import NOT_FAILURES, OctavoError
from octavo.engine.output.outputs import RequestOutput
from octavo.server.http.errors import REFUSAL, body_of, cut_off, encode, incident
from octavo.server.status import reason_of

DONE = b"data: [DONE]\n\n"
_LINE_BREAKS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029")
"""Those that JSON does not escape, as they are and as it may write them."""
CLIENT_CLOSED = 499
"""Status of an answer that nobody reads; nginx's number."""

Failed = Callable[[int, dict[str, Any]], bytes]
_T = TypeVar("_T")


def event(content: object) -> bytes:
    """One server-sent event, of one line for clients that split lines as Python does, too."""
    text = encode(content)
    for char, escaped in _LINE_BREAKS:
        if char in text:
            text = text.replace(char, escaped)
    return b"data: " + text + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """One server-sent event under the name that its `type` is."""
    return b"event: " + str(content["type"]).encode() + b"\n" + event(content)


def failed_event(status: int, content: dict[str, Any]) -> bytes:
    """OpenAI's event that tells of an error."""
    return event(content)


async def answer_whole(
    request: Request, content: Coroutine[Any, Any, bytes], headers: dict[str, str]
) -> Response:
    """The answer at once, or nothing if the client left first."""
    done = await unless_gone(request, content)
    if done is None:
        return Response(status_code=CLIENT_CLOSED)
    return Response(done, headers=headers, media_type="application/json")


async def answer_streamed(
    request: Request,
    events: AsyncGenerator[bytes, None],
    headers: dict[str, str],
    failed: Failed = failed_event,
) -> Response:
    """The answer as a stream whose first event is known, or nothing if the client left first."""
    first = await unless_gone(request, anext(events))
    if first is None:
        await events.aclose()
        return Response(status_code=CLIENT_CLOSED)
    return EventStream(first, events, headers, failed)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T | None:
    """The work's result, or None if the client left first: the work is then cancelled."""
    task = asyncio.ensure_future(work)
    return await _race(task, request.receive)


class EventStream(Response):
    """Server-sent events; the first one is known already, so that errors before it had a status.

    Args:
        first: the first event.
        events: the rest; closed when the client leaves.
        headers: of the response.
        failed: the event that tells of an error, from its status and OpenAI's object of it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        failed: Failed,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", **headers})
        # A length was set for the empty body.
        self.raw_headers = [item for item in self.raw_headers if item[0] != b"content-length"]
        self._first = first
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the events end or the client leaves."""
        async with contextlib.aclosing(self._events):
            task = asyncio.ensure_future(self._send_all(scope, send))
            try:
                await _race(task, receive)
            except asyncio.CancelledError:
                # The server stops, and the time to finish is over.
                scope[REFUSAL] = reason_of(type(cut_off())).lower()
                await _send_part(send, self._told(cut_off()))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, scope: Scope, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await _send_part(send, self._first)
        try:
            async for data in self._events:
                await _send_part(send, data)
        except OctavoError as error:
            scope[REFUSAL] = reason_of(type(error)).lower()
            await _send_part(send, self._told(error))
        except NOT_FAILURES:
            raise
        except BaseException:
            scope[REFUSAL] = "internal"
            await _send_part(send, self._failed(500, incident()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _told(self, error: OctavoError) -> bytes:
        return self._failed(error.http_status, body_of(error))


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _race(task: asyncio.Future[_T], receive: Receive) -> _T | None:
    """The task's result; None, and the task cancelled, if the client leaves first."""
    gone = asyncio.ensure_future(_until_gone(receive))
    both: list[asyncio.Future[Any]] = [task, gone]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several streams as they come, each with its stream's place.

    The first error ends all of them.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def read(place: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    queue.put_nowait((place, output))
        except NOT_FAILURES:
            raise
        except BaseException as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(read(*item)) for item in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
