"""`octavo serve` as a child of this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from octavo.engine.errors import EngineDeadError
from octavo.server.ray import guarded

KEPT_LINES = 20
"""Of what a server said last, for the error of one that ends before it serves."""
_SERVES = "octavo: serving "
_OVER = " over gRPC on "


class ServerProcess:
    """A server with an engine of its own, which ends with this process, however that ends.

    What it says is repeated on this process's standard error.

    Args:
        words: options of `octavo serve`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._popen = guarded.start("octavo.server.cli.main", ("serve", *words))
        self._address: Future[str] = Future()
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._reader = threading.Thread(target=self._read, name="octavo-server", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """How it has ended, as a negative signal or an exit status; None while it runs."""
        return self._popen.poll()

    def address(self, timeout_s: float | None = None) -> str:
        """`host:port` of its gRPC services; waits until it serves.

        Raises:
            EngineDeadError: it ended before; with what it said last.
            TimeoutError: it does not serve yet.
        """
        return self._address.result(timeout_s)

    def end(self, grace_s: float) -> None:
        """Has it drain and end; it is killed where that takes longer than `grace_s` seconds."""
        self._popen.terminate()
        try:
            self._popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen:
            for line in self._popen.stdout:
                sys.stderr.write(line)
                self._last.append(line)
                if line.startswith(_SERVES) and _OVER in line and not self._address.done():
                    self._address.set_result(line.rpartition(_OVER)[2].strip())
        status = self._popen.returncode
        if not self._address.done():
            said = "".join(self._last).strip()
            error = EngineDeadError(f"`octavo serve` ended with status {status}: {said}")
            self._address.set_exception(error)
