"""One replica as its parent sees it: a process, started again when it dies."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue

import octavo
from octavo.engine.errors import EngineDeadError
from octavo.engine.replicas import messages

BOOT = """\
import sys
sys.path.append(sys.argv[1])
from octavo.engine.replicas.worker import main
main(int(sys.argv[2]))
"""
"""What the process runs: it finds this package wherever this process did."""
MAX_DEATHS, DEATHS_WITHIN_S = 3, 600.0
"""A replica that dies so often in so many seconds is not started again."""
STOP_S = 10.0
"""For a process to end when told to, before it is killed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Died:
    """A replica's process has ended, and with it what it had under way.

    Attributes:
        cause: as a phrase.
        error: why it will not be started again; None if it is being.
    """

    cause: str
    error: Exception | None


EventMessage = (
    messages.Ready | messages.News | messages.Returned | messages.PagesGiven | messages.Building
    | messages.Answer | Died
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """What a replica has to say.

    Attributes:
        replica: its index.
        life: which of its processes it was, from 1 on.
        message: the news.
    """

    replica: int
    life: int
    message: EventMessage


class Replica:
    """Keeps one replica alive. `send` is for one thread; what is read of it may be by any.

    Args:
        index: its number, from 0 on.
        start: what it is told first.
        environment: variables of its process besides this one's.
        events: where news go.

    Attributes:
        life: which of its processes it is, from 1 on.
        ready: what it said when it was; None while it is not.
        report: its newest load report; there is one before it is ready.
        is_lost: whether it died and will not be started again.
        num_heard: messages from it.
        stuck_s: how long its engine has been in one turn, as it last said.
        is_quiet: whether it has been silent for longer than it should; `HangWatch` says so.
    """

    def __init__(
        self,
        index: int,
        start: messages.Start,
        environment: Mapping[str, str],
        events: SimpleQueue[Event | None],
    ) -> None:
        self.index = index
        self.life = 0
        self.ready: messages.Ready | None = None
        self.report: messages.LoadReport | None = None
        self.is_lost = False
        self.num_heard = 0
        self.stuck_s = 0.0
        self.is_quiet = False
        self._start = start
        self._environment = environment
        self._events = events
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._lock = threading.Lock()
        self._is_closed = False
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._outbox: SimpleQueue[bytes | None] | None = None
        self._hang: tuple[subprocess.Popen[bytes], str] | None = None
        self._keeper = threading.Thread(
            target=self._keep, name=f"octavo-replica-{index}", daemon=True
        )

    def open(self) -> None:
        """Starts it; `Event`s tell how that went."""
        self._keeper.start()

    @property
    def process_id(self) -> int | None:
        """Of its process; None before there is one."""
        return None if self.process is None else self.process.pid

    def send(self, command: messages.Command) -> int:
        """Sends a command to a replica that is ready. Never waits: one that hangs does not read.

        Returns:
            The life that it goes to. If that has ended, `Died` tells of it: nothing is raised.
        """
        data = bytes(ForkingPickler.dumps(command))
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(data)
            return self.life

    def kill(self, process: subprocess.Popen[bytes], cause: str) -> None:
        """Ends one of its processes, if that is there still, whatever it is doing; any thread may.

        Args:
            process: which.
            cause: as a phrase.
        """
        self._hang = process, cause
        process.kill()

    def stop(self) -> None:
        """Tells it to end, not to be started again; `join` waits."""
        self._is_closed = True
        self.send(messages.Stop())
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        """Waits until its process has ended, and kills it if it takes too long."""
        process = self.process
        if process is None:
            return
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("replica %d does not stop: killing its process", self.index)
            process.kill()
            process.wait()

    # Below runs in the keeper's thread.

    def _keep(self) -> None:
        deaths = self._deaths
        while True:
            error = self._live()
            if self._is_closed:
                return
            cause = f"its process {_ending(self.process)}" if error is None else str(error)
            if self._hang is not None and self._hang[0] is self.process:
                cause = self._hang[1]
            deaths.append(time.monotonic())
            within_s = deaths[-1] - deaths[0]
            if error is None and len(deaths) == deaths.maxlen and within_s < DEATHS_WITHIN_S:
                error = EngineDeadError(
                    f"replica {self.index} died {len(deaths)} times in {within_s:.0f} s, "
                    f"the last time as {cause}"
                )
            if error is None or self.life > 1:  # else whoever waits for the first start says so
                logger.error(
                    "replica %d died (%s): %s", self.index, cause,
                    "starting it again" if error is None else "it is given up",
                )  # fmt: skip
            self.is_lost = error is not None
            self._tell(Died(cause, error))
            if error is not None:
                return

    def _live(self) -> Exception | None:
        """One life, from start to end; why there can be no other, if it is known."""
        with self._lock:
            if self._is_closed:
                return None
            self.life += 1
            try:
                self._spawn()
            except OSError as error:
                return EngineDeadError(f"replica {self.index} could not be started: {error}")
            ours = self._socket
            assert ours is not None
            connection, outbox = Connection(os.dup(ours.fileno())), SimpleQueue[bytes | None]()
            outbox.put(bytes(ForkingPickler.dumps(self._start)))
            self._outbox = outbox
        sender = threading.Thread(
            target=_send_all, args=(Connection(os.dup(ours.fileno())), outbox),
            name=f"octavo-send-{self.index}", daemon=True,
        )  # fmt: skip
        sender.start()
        final: Exception | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: messages.Message = connection.recv()
                self.num_heard += 1
                match message:
                    case messages.Beat(stuck_s):
                        self.stuck_s = stuck_s
                    case messages.Logged(record):
                        _log(record, self.index)
                    case messages.LoadReport():
                        self.report = dataclasses.replace(message, life=self.life)
                    case messages.NotBuilt(reason):
                        final = reason
                    case messages.Broke(reason):
                        logger.error("replica %d broke: %s", self.index, reason)
                    case messages.Ready():
                        self.ready = message
                        self._tell(message)
                    case _:
                        self._tell(message)
        self.ready = None
        with self._lock:
            outbox.put(None)
            self._outbox = None
            self.stuck_s = 0.0
            connection.close()
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if not self._is_closed:
            self.join()
        return final

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(octavo.__file__).parents[1])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, root, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
            )
        self._socket = ours

    def _tell(self, message: EventMessage) -> None:
        self._events.put(Event(self.index, self.life, message))


def _send_all(connection: Connection, outbox: SimpleQueue[bytes | None]) -> None:
    """Sends what comes to one process, until it has ended."""
    with connection, contextlib.suppress(OSError):
        while (data := outbox.get()) is not None:
            connection.send_bytes(data)


def _ending(process: subprocess.Popen[bytes] | None) -> str:
    code = None if process is None else process.returncode
    if code is None or code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _log(record: logging.LogRecord, index: int) -> None:
    """Hands a replica's record to this process's handlers."""
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.levelno):
        record.msg = f"replica {index}: {record.msg}"
        target.handle(record)
