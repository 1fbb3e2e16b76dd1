"""The file of results: one line a request, in the order in which they end.

Each line names the line of the input that it answers, so that a run that was killed goes on where
it stopped: lines that are there are not run again, and one that was cut off is taken away and run
again. A line is written at once and whole, and the file is locked while a run writes to it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.engine.errors import InvalidRequestError

SYNC_PERIOD_S = 5.0
"""How often what was written is forced to the disk."""
NUM_CHECKED = 1000
"""Results whose names are remembered, to see that they are of this input."""
_ID_PREFIX = "batch_req_"
_CHUNK_BYTES = 1 << 20


class ResultsFile:
    """Opens, and goes on with, a file of results.

    Args:
        path: the file; made if missing.
        overwrite: begin anew.

    Attributes:
        num_done: results that are there.
        names: line number -> custom id, of the first results.

    Raises:
        InvalidRequestError: another run writes to it, or it holds something else than results.
        OSError: it cannot be written.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self._path = str(path)
        self._done = bytearray()
        self.num_done = 0
        self.names: dict[int, str | None] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            if overwrite:
                os.ftruncate(self._file, 0)
            self._read()
        except BaseException:
            os.close(self._file)
            raise
        self._synced_s = time.monotonic()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def is_done(self, number: int) -> bool:
        """Whether the input's line of this number, from 1, has its result."""
        byte, bit = divmod(number, 8)
        return byte < len(self._done) and bool(self._done[byte] >> bit & 1)

    def append(self, number: int, record: dict[str, Any]) -> None:
        """Writes the result of a line."""
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        self.append_line(number, text.encode("utf-8", "replace"))

    def append_line(self, number: int, line: bytes) -> None:
        """Writes the result of a line, which is JSON already."""
        assert not self.is_done(number), number
        data = memoryview(line + b"\n")
        while data:
            data = data[os.write(self._file, data) :]
        self._mark(number)
        if time.monotonic() - self._synced_s > SYNC_PERIOD_S:
            os.fsync(self._file)
            self._synced_s = time.monotonic()

    def close(self) -> None:
        """Forces what was written to the disk."""
        os.fsync(self._file)
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            allowed = "a file that no other run writes to"
            raise InvalidRequestError("output", self._path, allowed) from None

    def _read(self) -> None:
        """Notes which lines are done and takes a last line away that was cut off."""
        whole_bytes = 0
        with open(self._path, "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._note(line)
                whole_bytes += len(line)
        os.ftruncate(self._file, whole_bytes)

    def _note(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            number = line_of(record)
            name = record.get("custom_id")
        except (ValueError, KeyError, TypeError, AttributeError):
            allowed = "results of an earlier run, or a new file, or --overwrite"
            raise InvalidRequestError("output", self._path, allowed) from None
        if not self.is_done(number):
            self._mark(number)
        if len(self.names) < NUM_CHECKED:
            self.names[number] = name

    def _mark(self, number: int) -> None:
        byte, bit = divmod(number, 8)
        if byte >= len(self._done):
            self._done.extend(bytes(max(byte + 1 - len(self._done), len(self._done))))
        self._done[byte] |= 1 << bit
        self.num_done += 1


def result_id(number: int) -> str:
    """The id of a result in OpenAI's format."""
    return f"{_ID_PREFIX}{number}"


def line_of(record: dict[str, Any]) -> int:
    """The number of the line that a result answers.

    Raises:
        KeyError, ValueError, TypeError: it is no result.
    """
    if "line" in record:
        number = record["line"]
    else:
        number = int(record["id"].removeprefix(_ID_PREFIX))
    if type(number) is not int or number < 1:
        raise ValueError(number)
    return number


def count_lines(path: str | Path) -> int:
    """Lines of a file, empty ones included.

    Raises:
        OSError: it cannot be read.
    """
    num_lines, last = 0, b"\n"
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_lines += chunk.count(b"\n")
            last = chunk[-1:]
    return num_lines + (last != b"\n")
