"""A front's view of an application on a Ray cluster."""

from __future__ import annotations

import json
import logging
import threading
import time

from octavo.server.ray import guarded
from octavo.server.ray.watch import ADDRESSES, ERROR

AGAIN_S = 5.0
"""Until another process looks, after one has ended."""
OLD_S = 15.0
"""After which what was said last says nothing of now."""

logger = logging.getLogger(__name__)


class MembersWatcher:
    """Has a process of its own look which servers there are (`watch.py`); another one if it ends.

    Args:
        app: name of the application.
    """

    def __init__(self, app: str) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._told: list[str] = []
        self._heard_s = time.monotonic()
        self._error: str | None = None
        threading.Thread(target=self._watch, name="octavo-ray", daemon=True).start()

    def addresses(self) -> list[str]:
        """The servers that there are; none before the first look.

        Raises:
            OSError: the last look failed, or is older than `OLD_S` seconds.
        """
        with self._lock:
            if self._error is not None:
                raise OSError(self._error)
            if time.monotonic() - self._heard_s > OLD_S:
                raise OSError("nothing was heard of the cluster for a while")
            return self._told

    def _watch(self) -> None:
        while True:
            with guarded.start("octavo.server.ray.watch", (self._app,)) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    self._read(line)
            logger.info("the process that looks for servers ended: %s", process.returncode)
            time.sleep(AGAIN_S)

    def _read(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            logger.debug("ray: %s", line.rstrip())
            return
        with self._lock:
            self._heard_s = time.monotonic()
            self._error = said.get(ERROR)
            if self._error is None:
                self._told = said[ADDRESSES]
