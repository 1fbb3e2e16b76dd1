"""Runs batches beside everything else that the server does: lines at low priority, one batch of an
owner after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from pathlib import Path

from starlette.types import ASGIApp

from octavo.server.batch.results import ResultsFile, count_lines
from octavo.server.batch.run import LINES_PER_ROW
from octavo.server.batch.tasks import read_lines
from octavo.server.caller import CALLER, Caller
from octavo.server.front import Front
from octavo.server.http.batches.answering import Answering
from octavo.server.http.batches.folder import BatchFolder
from octavo.server.http.batches.lines import Line, answered_line, ask
from octavo.server.http.batches.records import BatchRecord
from octavo.server.tracing import TRACE_PARENT

MAX_LINES = 50_000
"""Of one batch: as many as OpenAI takes."""
RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
"""Pause before a line is asked again that the server had no room for, and the longest one."""
READY_PERIOD_S = 0.2

_log = logging.getLogger(__name__)


class BatchRunner:
    """Answers the lines of batches.

    A line is asked as a client would ask it, at low priority; one that the server has no room for
    is asked again. Results are written as they come, so that after a restart only lines without
    one are asked. Lives in the event loop; files are read and written in threads.

    Args:
        front: the engine's door.
        folder: of files and batches.

    Attributes:
        app: that answers; to be set before `start`.
        lock: of the folder's writes.
    """

    def __init__(self, front: Front, folder: BatchFolder) -> None:
        self.app: ASGIApp | None = None
        self.lock = asyncio.Lock()
        self._front = front
        self._folder = folder
        self._owners: dict[str, asyncio.Task[None]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._cancels: dict[str, asyncio.Event] = {}
        """Of batches that run: set to cancel them."""
        self._is_closed = False

    def start(self) -> None:
        """Goes on with what an earlier server left."""
        for batch in list(self._folder.batches.values()):
            if batch.is_unfinished:
                self.take(batch)

    def take(self, batch: BatchRecord) -> None:
        """Has an unfinished batch run, or ended, in its turn."""
        if self._is_closed:
            return
        if batch.status == "cancelling":
            if batch.id not in self._cancels:
                self._end_beside(batch)
        elif batch.owner not in self._owners:
            task = asyncio.create_task(self._run_owner(batch.owner))
            self._owners[batch.owner] = task

    async def cancel(self, batch: BatchRecord) -> None:
        """Ends a batch early; what is answered stays."""
        batch.status = "cancelling"
        batch.moments["cancelling"] = int(time.time())
        await self._save(batch)
        if batch.id in self._cancels:
            self._cancels[batch.id].set()
        else:
            self.take(batch)

    async def close(self) -> None:
        """Stops; lines in flight are left for the next server."""
        self._is_closed = True
        tasks = [*self._owners.values(), *self._ends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_beside(self, batch: BatchRecord) -> None:
        task = asyncio.create_task(self._guarded(batch, cancelled=True))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _run_owner(self, owner: str) -> None:
        """Runs the owner's batches, the oldest first, until none is left."""
        try:
            while (batch := self._next(owner)) is not None:
                await self._guarded(batch)
        finally:
            del self._owners[owner]

    def _next(self, owner: str) -> BatchRecord | None:
        waiting = [
            each
            for each in self._folder.batches.values()
            if each.owner == owner and each.is_unfinished and each.status != "cancelling"
        ]
        return min(waiting, key=lambda each: (each.created_at, each.id), default=None)

    async def _guarded(self, batch: BatchRecord, *, cancelled: bool = False) -> None:
        """Runs a batch, and fails it if its files cannot be used."""
        self._cancels[batch.id] = asyncio.Event()
        if cancelled:
            self._cancels[batch.id].set()
        try:
            await self._run(batch)
        except Exception as error:
            _log.exception("batch %s failed", batch.id)
            await self._fail(batch, "internal", f"its files could not be used: {error}")
        finally:
            del self._cancels[batch.id]

    async def _run(self, batch: BatchRecord) -> None:
        if batch.ends_as is None:
            source = self._folder.data_path(self._folder.file(batch.owner, batch.input_file_id))
            if batch.status == "validating":
                batch.total = await asyncio.to_thread(_count_requests, source)
                if not 0 < batch.total <= MAX_LINES:
                    allowed = f"1 to {MAX_LINES} lines"
                    await self._fail(
                        batch, "invalid_file", f"the file has {batch.total} lines: {allowed}"
                    )
                    return
                if batch.status == "validating":
                    await self._come_to(batch, "in_progress")
            batch.ends_as = await self._answer_all(batch, source)
            for kind, number in (("output", batch.completed), ("error", batch.failed)):
                file_id = f"file-{uuid.uuid4().hex}" if number else None
                setattr(batch, f"{kind}_file_id", file_id)
            if batch.status == "cancelling":
                await self._save(batch)
            else:
                await self._come_to(batch, "finalizing")
        async with self.lock:
            await asyncio.to_thread(self._adopt_results, batch)
        assert batch.ends_as is not None
        await self._come_to(batch, batch.ends_as)

    async def _answer_all(self, batch: BatchRecord, source: Path) -> str:
        """Answers the lines without a result; the status that the batch then ends with."""
        paths = [self._folder.results_path(batch, kind) for kind in ("output", "error")]
        files: list[ResultsFile] = []
        try:
            for path in paths:
                files.append(await asyncio.to_thread(ResultsFile, path))
            output, errors = files
            answering = Answering(batch, output, errors, self._answer, self._cancels[batch.id])
            if self._cancels[batch.id].is_set():
                return "cancelled"
            return await answering.run(source, await self._window())
        finally:
            for file in files:  # forced to the disk, which takes a while
                await asyncio.to_thread(file.close)

    def _adopt_results(self, batch: BatchRecord) -> None:
        for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
            path = self._folder.results_path(batch, kind)
            if file_id is not None:
                self._folder.adopt(path, file_id, batch.owner, f"{batch.id}_{kind}.jsonl")
            path.unlink(missing_ok=True)

    async def _fail(self, batch: BatchRecord, code: str, message: str) -> None:
        batch.errors = [{"code": code, "message": message, "param": None, "line": None}]
        batch.output_file_id = batch.error_file_id = None
        with contextlib.suppress(OSError):
            await self._come_to(batch, "failed")

    async def _come_to(self, batch: BatchRecord, status: str) -> None:
        batch.moments[status] = int(time.time())
        batch.status = status
        await self._save(batch)

    async def _save(self, batch: BatchRecord) -> None:
        async with self.lock:
            await asyncio.to_thread(self._folder.save, batch)

    async def _answer(self, batch: BatchRecord, line: Line) -> tuple[bool, bytes]:
        """The result of a line, however long the server has no room for it."""
        assert self.app is not None
        TRACE_PARENT.set(None)  # a batch outlives the call that made it
        CALLER.set(Caller(batch.owner, batch.tenant, frozenset(batch.reserved)))
        pause_s = RETRY_S
        while True:
            while not self._front.is_ready:
                await asyncio.sleep(READY_PERIOD_S)
            answer = await ask(self.app, batch.endpoint, line)
            if answer.status not in (429, 503):
                return answered_line(line, answer)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _window(self) -> int:
        """Lines of a batch that are open at once."""
        while not self._front.is_ready:
            await asyncio.sleep(READY_PERIOD_S)
        return LINES_PER_ROW * self._front.ready_engine().engine.num_rows


def _count_requests(source: Path) -> int:
    """Lines that are not empty; of a file of very many lines, all of them."""
    num_lines = count_lines(source)
    return num_lines if num_lines > 2 * MAX_LINES else sum(1 for _ in read_lines(source))
