"""A follower: an executor, and a loop that does what the leader's log says. It plans nothing.

Four threads: one hears the leader, one (the caller's) tells the devices, one reads what they said
and reports its digest, one makes programs. One more says that this host lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from octavo.engine.errors import HostLostError
from octavo.engine.executor import TransferDone
from octavo.engine.hosts import commands
from octavo.engine.hosts.handshake import refused
from octavo.engine.hosts.host_executor import FollowingExecutor, Ran, Trail
from octavo.engine.hosts.leader import BEATS, LOST_STATUS, end_process
from octavo.engine.hosts.messages import BrokenLinkError, Kind, Link, Message

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds that a follower has to end what it is at, when the leader has."""


class Follower:
    """Does what the log says.

    Args:
        link: to the leader, which has welcomed this host.
        timeout_s: seconds of silence after which the leader counts as dead.
        end_process: called with an exit status when the leader is lost.
    """

    def __init__(
        self,
        link: Link,
        timeout_s: float,
        end_process: Callable[[int], None] = end_process,
    ) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._end_process = end_process
        self._commands: SimpleQueue[Message] = SimpleQueue()
        self._to_make: SimpleQueue[int] = SimpleQueue()
        self._ran: SimpleQueue[tuple[int, Ran | None]] = SimpleQueue()
        self._epoch = 0
        self._has_failed = False
        self._is_live = False
        self._is_over = threading.Event()
        self._executor: FollowingExecutor
        self._thread(self._hear)
        self._thread(self._beat)

    def _thread(self, target: Callable[[], None]) -> None:
        name = f"octavo-follower{target.__name__.replace('_', '-')}"
        threading.Thread(target=target, name=name, daemon=True).start()

    def report(self, message: Message) -> None:
        """Tells the leader. From any thread; if the leader is gone, the process ends anyway."""
        try:
            self._link.send(message)
        except BrokenLinkError as error:
            self._leader_lost(str(error))

    def answer(self, kind: Kind) -> Message:
        """The next command, before the log begins.

        Raises:
            HostLostError: it is another one.
            InvalidConfigError: the leader refuses a host.
        """
        while (message := self._commands.get()).kind is Kind.PING:
            pass
        if message.kind is Kind.REFUSED:
            raise refused(message)
        if message.kind is not kind:
            raise HostLostError(f"{message.kind.name} came in place of {kind.name}")
        return message

    def close(self) -> None:
        """Leaves the group, which ends it."""
        self._is_over.set()
        self._link.close()

    def run(self, executor: FollowingExecutor, read_weights: Callable[[], None]) -> None:
        """Does what the log says until the leader ends the group.

        Args:
            executor: warm.
            read_weights: gives it weights that it did not keep asleep.
        """
        self._executor = executor
        self._is_live = True
        self._thread(self._digest)
        self._thread(self._make)
        self.report(Message(Kind.READY))
        while (message := self._commands.get()).kind is not Kind.CLOSE:
            try:
                if message.kind is Kind.READ_WEIGHTS:
                    read_weights()
                else:
                    self._do(message)
            except Exception as error:
                self._fail(error)

    def _do(self, message: Message) -> None:
        executor, numbers, arrays = self._executor, message.numbers, message.arrays
        if message.kind in (Kind.RESET, Kind.WAKE):
            (self._epoch,) = numbers
            self._ran.put((self._epoch, None))
            self._has_failed = False
        if self._has_failed:
            return  # the state is lost: the leader starts over if it is, too
        match message.kind:
            case Kind.STEP:
                shape = executor.lattice.shapes[numbers[0]]
                if numbers[1]:
                    executor.try_step(shape, arrays[0])
                else:
                    output = executor.run_step(shape, arrays[0])
                    self._report_launches(only_if_due=True)
                    self._ran.put((self._epoch, executor.ran(output)))
            case Kind.ROW:
                executor.write_row(*commands.read_row(message))
            case Kind.MASKS:
                executor.write_masks(*arrays)
            case Kind.COPY:
                page_copy, is_in = commands.read_copy(message)
                executor.begin_copy(page_copy, is_in=is_in)
                executor.on_copy_ended(partial(self._copied, self._epoch))
            case Kind.LAND:
                executor.land_copy(numbers[0], ok=bool(numbers[1]))
            case Kind.PING:
                self._report_launches()
            case Kind.RESET:
                executor.start_over()
            case Kind.SLEEP:
                executor.sleep(keep_weights=bool(numbers[0]))
            case Kind.WAKE:
                executor.wake_up()
            case kind:
                raise ValueError(f"no follower does {kind.name}")

    def _report_launches(self, *, only_if_due: bool = False) -> None:
        launched = self._executor.launched
        if launched.is_due or not only_if_due:
            numbers = self._epoch, launched.num_steps, launched.value
            self.report(Message(Kind.LAUNCHED, numbers))

    def _copied(self, epoch: int, done: TransferDone) -> None:
        self.report(Message(Kind.COPIED, (epoch, done.transfer_id, done.ok)))

    def _fail(self, error: Exception) -> None:
        """Tells the leader that this host could not do something, once an epoch."""
        logger.error("a command failed", exc_info=error)
        if not self._has_failed:
            self._has_failed = True
            self._report_failure(self._epoch, error)

    def _report_failure(self, epoch: int, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.report(Message(Kind.FAILED, (epoch,), commands.text(reason)))

    # In other threads.

    def _hear(self) -> None:
        try:
            while True:
                # Before the log begins the leader may wait long for others.
                message = self._link.receive(self._timeout_s if self._is_live else None)
                if message.kind is Kind.COMPILE:
                    self._to_make.put(message.numbers[0])
                else:
                    self._commands.put(message)
                if message.kind is Kind.PING:
                    self._ran.put((-1, None))
                if message.kind is Kind.CLOSE:
                    break
        except BrokenLinkError as error:
            self._leader_lost(str(error))
            return
        self._is_over.set()
        time.sleep(CLOSE_S)
        self._end_process(0 if self._is_live else LOST_STATUS)

    def _leader_lost(self, reason: str) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        logger.critical("%s", HostLostError(f"the leader is lost: {reason}"))
        self._end_process(LOST_STATUS)

    def _beat(self) -> None:
        while not self._is_over.wait(self._timeout_s / BEATS):
            self.report(Message(Kind.ALIVE))

    def _make(self) -> None:
        while True:
            number = self._to_make.get()
            has = self._executor.programs.make(self._executor.lattice.shapes[number])
            self.report(Message(Kind.PROGRAM, (number, has)))

    def _digest(self) -> None:
        """Reads what steps said, and reports: every few steps, and when the leader pings."""
        trail, epoch, told, has_failed = Trail(), 0, 0, False
        while True:
            of_epoch, ran = self._ran.get()
            if ran is None and of_epoch >= 0:
                trail, epoch, told, has_failed = Trail(), of_epoch, 0, False
            elif ran is not None and of_epoch == epoch and not has_failed:
                try:
                    trail.take(ran)
                except Exception as error:
                    has_failed = True
                    self._report_failure(epoch, error)
            is_ping = ran is None and of_epoch < 0
            if trail.num_steps > told and (is_ping or trail.is_due):
                told = trail.num_steps
                self.report(Message(Kind.DIGEST, (epoch, told, trail.value)))
