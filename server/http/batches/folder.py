"""The folder of files and batches: what a client names is looked up, and never becomes a path."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from octavo.engine.errors import InvalidConfigError, InvalidRequestError, UnknownObjectError
from octavo.server.http.batches.records import BatchRecord, FileRecord

_OWN_NAME = re.compile(r"file-[0-9a-f]{32}\.(data|json|tmp)")
MAX_FILES = 10_000
"""Of one owner."""
MAX_ENDED = 1_000
"""Batches of one owner that have ended and are still known."""


class BatchFolder:
    """Files and batches on disk, and an index of both in memory.

    Each file is `files/ID.data`, described by `files/ID.json`; each batch is `batches/ID.json`,
    with its results beside it until it has ended. A description is written whole or not at all, and
    after what it describes, so that a kill leaves nothing half there. Methods that write block:
    they are for threads, one at a time.

    Args:
        path: of the folder; made if missing.
        max_bytes: most bytes of files that an owner may keep, to be allowed another one.

    Raises:
        InvalidConfigError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._files_path, self._batches_path = Path(path, "files"), Path(path, "batches")
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        self._lock: int | None = None
        try:
            for folder in (self._files_path, self._batches_path):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(Path(path, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except BlockingIOError:
            allowed = "a folder that no other server uses"
            raise InvalidConfigError("batch_files_dir", path, allowed) from None
        except (OSError, ValueError, TypeError) as error:
            allowed = f"a folder to read and write that holds nothing else ({error})"
            raise InvalidConfigError("batch_files_dir", path, allowed) from error

    def close(self) -> None:
        """Lets another server use the folder."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    # Files
    def file(self, owner: str, file_id: str, field: str = "file_id") -> FileRecord:
        """An owner's file.

        Args:
            field: what the client calls the id.

        Raises:
            UnknownObjectError: the owner has none of this id.
        """
        found = self.files.get(file_id)
        if found is None or found.owner != owner:
            raise UnknownObjectError(field, file_id, "the id of a file that is kept here")
        return found

    def data_path(self, file: FileRecord) -> Path:
        """Where a file's content lies."""
        return self._files_path / f"{file.id}.data"

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Refuses a further file of so many bytes if its owner keeps too much.

        Raises:
            InvalidRequestError: too many files, or bytes.
        """
        own = [file.num_bytes for file in self.files.values() if file.owner == owner]
        if len(own) >= MAX_FILES:
            allowed = f"at most {MAX_FILES} files of one tenant: delete some first"
            raise InvalidRequestError("file", f"one more than {len(own)}", allowed)
        if sum(own) + num_bytes > self._max_bytes:
            allowed = (
                f"at most {self._max_bytes - sum(own)} bytes: a tenant may keep {self._max_bytes} "
                "(batch_files_bytes); delete files first"
            )
            raise InvalidRequestError("file", f"{num_bytes} bytes", allowed)

    def add(self, owner: str, filename: str, purpose: str, content: IO[bytes]) -> FileRecord:
        """Keeps a copy of a file.

        Raises:
            InvalidRequestError: see `check_room`.
            OSError: it cannot be written.
        """
        num_bytes = content.seek(0, os.SEEK_END)
        content.seek(0)
        self.check_room(owner, num_bytes)
        made = _file(f"file-{uuid.uuid4().hex}", owner, filename, purpose, num_bytes)
        path = self.data_path(made)
        try:
            with open(path, "xb") as file:
                shutil.copyfileobj(content, file)
                file.flush()
                os.fsync(file.fileno())
            self._describe(made)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return made

    def adopt(self, path: Path, file_id: str, owner: str, filename: str) -> None:
        """Makes a batch's results a file; again, after a kill, if need be."""
        if file_id in self.files:
            return
        data = self._files_path / f"{file_id}.data"
        if path.exists():
            os.replace(path, data)
        self._describe(_file(file_id, owner, filename, "batch_output", data.stat().st_size))

    def delete(self, file: FileRecord) -> None:
        """Forgets a file.

        Raises:
            InvalidRequestError: a batch is still to read it.
        """
        users = (
            each.id
            for each in self.batches.values()
            if each.is_unfinished and each.input_file_id == file.id
        )
        if (user := next(users, None)) is not None:
            allowed = f"a file that no batch reads: {user} is still to end"
            raise InvalidRequestError("file_id", file.id, allowed)
        (self._files_path / f"{file.id}.json").unlink(missing_ok=True)
        self.data_path(file).unlink(missing_ok=True)
        self.files.pop(file.id, None)

    def _describe(self, file: FileRecord) -> None:
        _write(self._files_path / f"{file.id}.json", dataclasses.asdict(file))
        self.files[file.id] = file

    # Batches
    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """An owner's batch.

        Raises:
            UnknownObjectError: the owner has none of this id.
        """
        found = self.batches.get(batch_id)
        if found is None or found.owner != owner:
            raise UnknownObjectError("batch_id", batch_id, "the id of a batch that is known here")
        return found

    def results_path(self, batch: BatchRecord, kind: str) -> Path:
        """Where results of a kind are written while a batch runs."""
        return self._batches_path / f"{batch.id}.{kind}"

    def save(self, batch: BatchRecord) -> None:
        """Writes a batch down as it is now."""
        self.batches[batch.id] = batch
        _write(self._batches_path / f"{batch.id}.json", dataclasses.asdict(batch))

    def forget_ended(self, owner: str) -> None:
        """Forgets an owner's oldest batches that have ended, if they are too many."""
        own = [each for each in self.batches.values() if each.owner == owner]
        ended = sorted(
            (each for each in own if not each.is_unfinished), key=lambda each: each.created_at
        )
        for batch in ended[: max(0, len(ended) - MAX_ENDED)]:
            (self._batches_path / f"{batch.id}.json").unlink(missing_ok=True)
            del self.batches[batch.id]

    def _load(self) -> None:
        for value in _read_all(self._files_path):
            file = FileRecord(**value)
            if self.data_path(file).exists():
                self.files[file.id] = file
        for value in _read_all(self._batches_path):
            batch = BatchRecord(**value)
            self.batches[batch.id] = batch
        adopting = self._adopting()
        for path in self._files_path.iterdir():  # what a kill left half written
            is_wanted = path.stem in self.files or path.stem in adopting
            if _OWN_NAME.fullmatch(path.name) and (path.suffix == ".tmp" or not is_wanted):
                path.unlink()

    def _adopting(self) -> set[str | None]:
        """Ids of files that batches are about to make of their results."""
        batches = [each for each in self.batches.values() if each.is_unfinished]
        return {name for each in batches for name in (each.output_file_id, each.error_file_id)}


def _file(file_id: str, owner: str, filename: str, purpose: str, num_bytes: int) -> FileRecord:
    return FileRecord(
        id=file_id,
        owner=owner,
        filename=filename,
        purpose=purpose,
        num_bytes=num_bytes,
        created_at=int(time.time()),
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_all(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text("utf-8"))
