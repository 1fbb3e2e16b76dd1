"""The leader's side of a group: writes the log of commands, hears what followers report.

A thread for each follower hears it. One more looks for silent followers, and another one tells all
that the leader lives. When the group ends, the engine's thread may be in a step that never ends,
because a host that it needs is gone. So listeners are told, they have a moment to tell their
clients, and then the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from octavo.engine.errors import EngineDeadError, HostLostError, HostsDivergedError
from octavo.engine.hosts.host_executor import DIGEST_STEPS, MAX_BEHIND, Trail
from octavo.engine.hosts.messages import BrokenLinkError, Kind, Link, Message, encode

logger = logging.getLogger(__name__)

BEATS = 6
"""Signs of life in the time after which silence counts as death."""
GRACE_S = 1.0
"""Seconds between a group's end and the process's, for clients to be told."""
LOST_STATUS = 3
"""The process's exit status then."""
START_TIMEOUT_S = 60.0
"""Silence that counts as death before the group is ready, at least."""
KEPT_DIGESTS = 64


def end_process(status: int) -> None:
    """Ends this process, whatever its other threads are in."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _keep(digests: OrderedDict[int, int], trail: Trail) -> None:
    """Remembers a trail as it is now, and a few before it."""
    digests[trail.num_steps] = trail.value
    if len(digests) > KEPT_DIGESTS:
        digests.popitem(last=False)


class Leader:
    """The log of commands of one group, and what its followers said.

    Args:
        links: to each follower, by its number.
        key: of the commands.
        timeout_s: seconds of silence after which a follower counts as dead.
        step_s: seconds in one step after which the hosts wait for each other for ever.
        end_process: called with an exit status when the group has ended.

    Attributes:
        error: what ended the group; None while it lives.
        listeners: told of that error, in a thread of the group's.
    """

    def __init__(
        self,
        links: dict[int, Link],
        key: bytes,
        timeout_s: float,
        step_s: float = 60.0,
        end_process: Callable[[int], None] = end_process,
    ) -> None:
        self._links = links
        self._key = key
        self._timeout_s = timeout_s
        self._step_s = step_s
        self._end_process = end_process
        self.error: EngineDeadError | None = None
        self.listeners: list[Callable[[EngineDeadError], None]] = []
        self._writing = threading.Lock()
        self._sequence = 0
        self._heard = threading.Condition()
        self._is_closing = False
        self.is_live = False
        """Whether all hosts are ready: until then they may be busier than to give signs of life."""
        self._heard_s = dict.fromkeys(links, time.monotonic())
        self._answers: dict[Kind, dict[int, Message]] = defaultdict(dict)
        self._has_program: dict[int, set[int]] = defaultdict(set)
        self._copied: dict[int, dict[int, bool]] = defaultdict(dict)
        self._epoch = 0
        self._own: OrderedDict[int, int] = OrderedDict()
        self._reported: dict[int, tuple[int, int]] = dict.fromkeys(links, (0, 0))
        self._launched: OrderedDict[int, int] = OrderedDict()
        self._waits_since_s: float | None = None
        self._failed: dict[int, tuple[float, str]] = {}
        for host_id in links:
            self._thread(self._hear, host_id)
        self._thread(self._beat)

    def _thread(self, target: Callable[..., None], *args: Any) -> None:
        name = f"octavo-host-{args[0]}" if args else "octavo-hosts"
        threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def go_live(self) -> None:
        """Every host is ready: from here on the log says what they do."""
        with self._heard:
            self.is_live = True
            self._heard.notify_all()

    def wait_until_live(self) -> None:
        """Waits until every host is ready.

        Raises:
            HostLostError: the group has ended.
        """
        with self._heard:
            self._heard.wait_for(lambda: self.error or self.is_live or self._is_closing)
        if self.error is not None:
            raise self.error

    def give_up(self, reason: str) -> EngineDeadError:
        """Ends the group, as the leader cannot go on; the error."""
        return self.fail(HostLostError(f"host 0 is lost: {reason}"))

    # The log.

    def write(self, message: Message) -> None:
        """Has every follower do something, after all that was written before. From any thread.

        Raises:
            HostLostError, HostsDivergedError: the group has ended.
        """
        with self._writing:
            if self.error is not None:
                raise self.error
            frame = encode(message, self._sequence, self._key)
            self._sequence += 1
            for host_id, link in self._links.items():
                try:
                    link.send_frame(frame)
                except BrokenLinkError as error:
                    raise self._lost(host_id, str(error)) from error

    def answers(self, kind: Kind, timeout_s: float) -> dict[int, Message]:
        """What each follower answered, once all have.

        Raises:
            HostLostError: the group has ended, or one did not answer in time.
        """
        with self._heard:
            self._heard.wait_for(
                lambda: self.error or len(self._answers[kind]) == len(self._links), timeout_s
            )
            if self.error is not None:
                raise self.error
            found = self._answers.pop(kind)
        if len(found) < len(self._links):
            silent = sorted(self._links.keys() - found.keys())
            raise HostLostError(f"hosts {silent} did not answer within {timeout_s:.0f} s")
        return found

    def close(self) -> None:
        """Ends the group: followers end by themselves."""
        with self._heard:
            if self._is_closing or self.error is not None:
                return
            self._is_closing = True
        with contextlib.suppress(EngineDeadError):
            self.write(Message(Kind.CLOSE))

    # What followers have.

    def has_program(self, number: int) -> bool:
        """Whether every follower has a program that was compiled since the start."""
        return len(self._has_program[number]) == len(self._links)

    def copy_ended(self, transfer_id: int, ok: bool) -> bool | None:
        """Whether a copy ended well everywhere; None while it is on its way somewhere.

        Args:
            ok: how it ended here.
        """
        with self._heard:
            ends = self._copied[transfer_id]
            if len(ends) < len(self._links):
                return None
            del self._copied[transfer_id]
        return ok and all(ends.values())

    def start_over(self) -> int:
        """Forgets digests and copies: every host has fresh device state from here on.

        Returns:
            The number of this new epoch: reports of earlier ones are passed over.
        """
        with self._heard:
            self._epoch += 1
            self._own.clear()
            self._launched.clear()
            self._copied.clear()
            self._failed.clear()
            self._reported = dict.fromkeys(self._links, (0, 0))
            return self._epoch

    def launching(self, launched: Trail) -> None:
        """Hears what the leader is about to launch, before followers do."""
        with self._heard:
            _keep(self._launched, launched)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While the leader waits for a step, which all hosts have to compute."""
        self._waits_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waits_since_s = None

    def check(self, trail: Trail) -> None:
        """Compares followers' digests with the leader's, which has just grown by a step; waits for
        reports that are due by now.

        Raises:
            HostsDivergedError: one is another. HostLostError: the group has ended.
        """
        due = (trail.num_steps - MAX_BEHIND) // DIGEST_STEPS * DIGEST_STEPS
        with self._heard:
            _keep(self._own, trail)
            for host_id, (at, _) in self._reported.items():
                if at == trail.num_steps:
                    self._compare(host_id)
            while self.error is None and any(at < due for at, _ in self._reported.values()):
                self._heard.wait()
        if self.error is not None:
            raise self.error

    def _compare(self, host_id: int) -> None:
        at, value = self._reported[host_id]
        if self._own.get(at, value) != value:
            self.fail(HostsDivergedError(host_id, at))

    # In the group's threads.

    def _hear(self, host_id: int) -> None:
        link = self._links[host_id]
        try:
            while True:
                message = link.receive()
                with self._heard:
                    self._heard_s[host_id] = time.monotonic()
                    self._take(host_id, message)
                    self._heard.notify_all()
        except (BrokenLinkError, ValueError) as error:
            if not self._is_closing:
                self._lost(host_id, str(error))

    def _take(self, host_id: int, message: Message) -> None:
        match message.kind, message.numbers:
            case ((Kind.SETUP | Kind.READY), _):
                self._answers[message.kind][host_id] = message
            case Kind.PROGRAM, (number, has):
                if has:
                    self._has_program[number].add(host_id)
                else:
                    logger.warning("host %d has no program %d: nobody uses it", host_id, number)
            case Kind.LAUNCHED, (epoch, at, value):
                # None is ahead of the leader, nor so far behind that the leader has forgotten it.
                if epoch == self._epoch and at and self._launched.get(at) != value:
                    self.fail(HostsDivergedError(host_id, at))
            case Kind.COPIED, (epoch, transfer_id, ok):
                if epoch == self._epoch:
                    self._copied[transfer_id][host_id] = bool(ok)
            case Kind.DIGEST, (epoch, at, value):
                if epoch == self._epoch:
                    self._reported[host_id] = at, value
                    self._compare(host_id)
            case Kind.FAILED, (epoch,):
                reason = message.arrays[0].tobytes().decode(errors="replace")
                logger.error("host %d: %s", host_id, reason)
                if epoch == self._epoch:
                    self._failed.setdefault(host_id, (time.monotonic(), reason))
            case Kind.ALIVE, _:
                pass
            case kind, numbers:
                raise ValueError(f"it reported {kind.name} {numbers}")

    def _beat(self) -> None:
        """Tells followers that the leader lives, and ends the group when one is silent."""
        ping = Message(Kind.PING)
        threading.Thread(target=self._ping, args=(ping,), name="octavo-ping", daemon=True).start()
        while self.error is None and not self._is_closing:
            time.sleep(self._timeout_s / BEATS)
            limit_s = self._timeout_s if self.is_live else max(self._timeout_s, START_TIMEOUT_S)
            with self._heard:
                now_s = time.monotonic()
                for host_id, heard_s in self._heard_s.items():
                    if now_s - heard_s > limit_s:
                        self._lost(host_id, f"silent for {now_s - heard_s:.1f} s")
                waits_s = now_s - (self._waits_since_s or now_s)
                if waits_s > self._step_s:
                    self.fail(HostLostError(f"the hosts have been in one step for {waits_s:.0f} s"))
                # What failed everywhere is started over by now.
                for host_id, (failed_s, reason) in self._failed.items():
                    if now_s - failed_s > limit_s:
                        self._lost(host_id, f"it failed and the leader did not: {reason}")

    def _ping(self, ping: Message) -> None:
        # Apart from the watch: where a follower does not read, writing waits.
        while self.error is None and not self._is_closing:
            time.sleep(self._timeout_s / BEATS)
            try:
                self.write(ping)
            except EngineDeadError:
                return

    def _lost(self, host_id: int, reason: str) -> EngineDeadError:
        return self.fail(HostLostError(f"host {host_id} is lost: {reason}"))

    def fail(self, error: EngineDeadError) -> EngineDeadError:
        """Ends the group and, a moment later, the process.

        Returns:
            What ended it, which may be an earlier error.
        """
        with self._heard:
            if self._is_closing or self.error is not None:
                return self.error or error
            self.error = error
            self._heard.notify_all()
        logger.critical("the group of hosts ends: %s", error)
        self._thread(self._end)
        return error

    def _end(self) -> None:
        assert self.error is not None
        for listener in self.listeners:
            listener(self.error)
        time.sleep(GRACE_S)
        self._end_process(LOST_STATUS)
