"""What the routes of files and batches do."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import IO

from starlette.types import ASGIApp

from octavo.engine.errors import InvalidRequestError, OverloadedError
from octavo.server.caller import CALLER
from octavo.server.front import Front
from octavo.server.http.batches.folder import BatchFolder
from octavo.server.http.batches.protocol import BatchRequest, check_metadata, seconds_of
from octavo.server.http.batches.records import BatchRecord, FileRecord
from octavo.server.http.batches.runner import BatchRunner
from octavo.server.serve_config import ServeConfig

MAX_UNFINISHED = 100
"""Batches of one owner that are still to end."""
RETRY_AFTER_S = 60.0
MAX_UPLOADS, UPLOAD_RETRY_S = 16, 2.0
"""Uploads that are received at once, into temporary files; when another one may find a place."""


class BatchService:
    """Files and batches of the current caller. Lives in the event loop.

    Args:
        config: names the folder and its limits.
        front: the engine's door.

    Raises:
        InvalidConfigError: the folder cannot be used.
    """

    def __init__(self, config: ServeConfig, front: Front) -> None:
        assert config.batch_files_dir is not None
        self.max_file_bytes = config.batch_file_bytes
        self.folder = BatchFolder(config.batch_files_dir, config.batch_files_bytes)
        self._runner = BatchRunner(front, self.folder)
        self._num_uploads = 0

    def start(self, app: ASGIApp) -> None:
        """Goes on with what an earlier server left.

        Args:
            app: that answers lines.
        """
        self._runner.app = app
        self._runner.start()

    async def close(self) -> None:
        """Stops; batches are left for the next server."""
        await self._runner.close()

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """While an upload is received.

        Raises:
            OverloadedError: as many as may be are being received.
        """
        if self._num_uploads >= MAX_UPLOADS:
            reason = f"{self._num_uploads} uploads are being received, the most"
            raise OverloadedError(reason, UPLOAD_RETRY_S)
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    async def upload(self, filename: str, content: IO[bytes]) -> FileRecord:
        """Keeps a file of lines.

        Raises:
            InvalidRequestError: it is too large, or its owner keeps too much.
        """
        owner = CALLER.get().owner
        async with self._runner.lock:
            return await asyncio.to_thread(self.folder.add, owner, filename, "batch", content)

    def files(self, purpose: str | None) -> list[FileRecord]:
        """The caller's files, the oldest first."""
        owner = CALLER.get().owner
        own = [
            file
            for file in self.folder.files.values()
            if file.owner == owner and purpose in (None, file.purpose)
        ]
        return sorted(own, key=lambda file: (file.created_at, file.id))

    def file(self, file_id: str, field: str = "file_id") -> FileRecord:
        """A file of the caller's. Raises as `BatchFolder.file`."""
        return self.folder.file(CALLER.get().owner, file_id, field)

    async def delete(self, file_id: str) -> None:
        """Forgets a file. Raises as `BatchFolder.delete`."""
        file = self.file(file_id)
        async with self._runner.lock:
            await asyncio.to_thread(self.folder.delete, file)

    async def create(self, body: BatchRequest) -> BatchRecord:
        """Begins a batch.

        Raises:
            InvalidRequestError: a field that cannot be served.
            UnknownObjectError: the file is not the caller's.
            OverloadedError: too many batches of the caller's are still to end.
        """
        caller = CALLER.get()
        window_s = seconds_of(body.completion_window)
        check_metadata(body.metadata)
        source = self.file(body.input_file_id, "input_file_id")
        if source.purpose != "batch":
            allowed = f'a file of purpose "batch"; this one has {source.purpose!r}'
            raise InvalidRequestError("input_file_id", source.id, allowed)
        unfinished = sum(each.is_unfinished for each in self.batches())
        if unfinished >= MAX_UNFINISHED:
            raise OverloadedError(f"{unfinished} batches are still to end, the most", RETRY_AFTER_S)
        now_s = int(time.time())
        batch = BatchRecord(
            id=f"batch_{uuid.uuid4().hex}",
            owner=caller.owner,
            tenant=caller.tenant,
            reserved=sorted(caller.reserved),
            endpoint=body.endpoint,
            input_file_id=source.id,
            completion_window=body.completion_window,
            created_at=now_s,
            expires_at=now_s + window_s,
            metadata=body.metadata,
        )
        async with self._runner.lock:
            self.file(body.input_file_id, "input_file_id")  # it may be gone by now
            await asyncio.to_thread(self.folder.save, batch)
            await asyncio.to_thread(self.folder.forget_ended, caller.owner)
        self._runner.take(batch)
        return batch

    def batches(self) -> list[BatchRecord]:
        """The caller's batches, the oldest first."""
        owner = CALLER.get().owner
        own = [batch for batch in self.folder.batches.values() if batch.owner == owner]
        return sorted(own, key=lambda batch: (batch.created_at, batch.id))

    def batch(self, batch_id: str) -> BatchRecord:
        """A batch of the caller's. Raises as `BatchFolder.batch`."""
        return self.folder.batch(CALLER.get().owner, batch_id)

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Ends a batch early.

        Raises:
            UnknownObjectError: the caller has none of this id.
            InvalidRequestError: it has ended.
        """
        batch = self.batch(batch_id)
        if batch.status != "cancelling":
            if not batch.is_unfinished or batch.ends_as is not None:
                allowed = f"a batch that is still to end: this one is {batch.status}"
                raise InvalidRequestError("batch_id", batch_id, allowed)
            await self._runner.cancel(batch)
        return batch
