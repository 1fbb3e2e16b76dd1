"""Goes through the lines of one batch: a window of them is open; results are written at once."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.server.batch.results import ResultsFile
from octavo.server.batch.tasks import read_lines
from octavo.server.http.batches.lines import (
    BadLineError,
    Line,
    custom_id_of,
    read_line,
    unasked_line,
)
from octavo.server.http.batches.records import BatchRecord

READ_LINES, READ_BYTES = 64, 4 * 1024 * 1024
"""Lines that are read ahead at once: as many, or of so many bytes."""
OPEN_BYTES = 64 * 1024 * 1024
"""Of the lines that are being answered."""

Result = tuple[bool, bytes]
"""Whether a line was answered well, and the line that says what came of it."""


class Answering:
    """Answers the lines of a batch that have no result yet.

    Args:
        batch: whose counts are kept up to date.
        output, errors: take results.
        answer: answers a line.
        cancel: set to end early.
    """

    def __init__(
        self,
        batch: BatchRecord,
        output: ResultsFile,
        errors: ResultsFile,
        answer: Callable[[BatchRecord, Line], Awaitable[Result]],
        cancel: asyncio.Event,
    ) -> None:
        self._batch = batch
        self._output = output
        self._errors = errors
        self._answer = answer
        self._cancel = cancel
        self._names: set[bytes] = set()
        self._open: dict[asyncio.Task[Result], tuple[int, int]] = {}
        """Tasks of lines -> the line's number and bytes."""
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self._count()

    async def run(self, source: Path, window: int) -> str:
        """Answers them.

        Args:
            source: file of lines.
            window: most lines that are open at once.

        Returns:
            The status that the batch ends with: "completed", "cancelled" or "expired".
        """
        end = asyncio.create_task(self._until_end())
        end.add_done_callback(self._ended.put_nowait)
        try:
            ends_as = await self._answer_some(source, window, end)
        finally:
            for task in (end, *self._open):
                task.cancel()
            await asyncio.gather(end, *self._open, return_exceptions=True)
        if ends_as == "expired":
            await self._give_up_rest(source)
        return ends_as

    async def _until_end(self) -> str:
        left_s = self._batch.expires_at - time.time()
        try:
            await asyncio.wait_for(self._cancel.wait(), max(0.0, left_s))
        except TimeoutError:
            return "expired"
        return "cancelled"

    async def _answer_some(self, source: Path, window: int, end: asyncio.Task[str]) -> str:
        """Answers lines until there are no more, or the end has come."""
        lines, ready, is_last = read_lines(source), deque[tuple[int, bytes]](), False
        while not end.done():
            if not ready and not is_last:
                ready.extend(await asyncio.to_thread(_next_lines, lines))
                is_last = not ready
            while ready and len(self._open) < window and self._open_bytes < OPEN_BYTES:
                await self._begin(*ready.popleft())
            if not self._open:
                if is_last:
                    return "completed"
            elif ready or is_last:
                task = await self._ended.get()
                if task is not end:
                    await self._take(task)
        return end.result()

    @property
    def _open_bytes(self) -> int:
        return sum(size for _, size in self._open.values())

    async def _begin(self, number: int, raw: bytes) -> None:
        """Asks a line, unless it has its result."""
        await asyncio.sleep(0)  # others' tokens come between
        is_done = self._is_done(number)
        try:
            line = await read_line(number, raw, self._batch.endpoint)
            self._check_name(line)
        except BadLineError as error:
            if not is_done:
                await self._write(number, (False, error.result))
            return
        if not is_done:
            task = asyncio.ensure_future(self._answer(self._batch, line))
            self._open[task] = number, len(raw)
            task.add_done_callback(self._ended.put_nowait)

    def _check_name(self, line: Line) -> None:
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "replace"), digest_size=16).digest()
        if digest in self._names:
            allowed = "a name that no line before it has"
            error = InvalidRequestError("custom_id", line.custom_id, allowed)
            raise BadLineError(line.number, line.custom_id, error)
        self._names.add(digest)

    async def _take(self, task: asyncio.Task[Result]) -> None:
        number, _ = self._open.pop(task)
        await self._write(number, task.result())

    async def _write(self, number: int, result: Result) -> None:
        is_good, line = result
        file = self._output if is_good else self._errors
        await asyncio.to_thread(file.append_line, number, line)
        self._count()

    def _count(self) -> None:
        self._batch.completed, self._batch.failed = self._output.num_done, self._errors.num_done

    def _is_done(self, number: int) -> bool:
        return self._output.is_done(number) or self._errors.is_done(number)

    async def _give_up_rest(self, source: Path) -> None:
        """Says of every line without a result that there was no time for it."""
        lines = read_lines(source)
        while some := await asyncio.to_thread(_next_lines, lines):
            for number, raw in some:
                if not self._is_done(number):
                    name = await custom_id_of(raw)
                    await self._write(number, (False, unasked_line(number, name)))


def _next_lines(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    some: list[tuple[int, bytes]] = []
    size = 0
    while len(some) < READ_LINES and size < READ_BYTES:
        found = next(lines, None)
        if found is None:
            break
        some.append(found)
        size += len(found[1])
    return some
