"""One replica of a simulated fleet: a real scheduler and loop with a clock of their own.

A turn of the loop begins at the replica's time and ends when its step does. What a step commits is
told when that time has come for everybody, so that a replica which dies meanwhile has not said it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from octavo.engine.core import EngineCore
from octavo.engine.errors import OctavoError, OverloadedError, UnattainableTargetError
from octavo.engine.request import Request
from octavo.engine.routing.report import MOST_PREFIXES, ReplicaReport
from octavo.engine.scheduler.committer import News
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.executor import (
    NO_OVERHEAD,
    HostOverhead,
    SimulatedExecutor,
    SwapLink,
    output_tokens,
)
from octavo.engine.simulation.faults import NO_FAULTS, Faults
from octavo.engine.simulation.fleet.arrivals import arrival_chunks
from octavo.engine.simulation.fleet.disasters import HANG, PARTITION, SLOW
from octavo.engine.simulation.fleet.machines import HostSpeed, Machine
from octavo.engine.simulation.fleet.messages import Cancel, Counts, Ended, Order, Submit
from octavo.engine.simulation.virtual_clock import VirtualClock
from octavo.engine.simulation.workloads.traffic import Arrival, make_request

IDLE_TICK_S = 1e-3
"""How often a scheduler that holds requests back is asked again."""
KILL, START, DRAIN, FAST_AGAIN = "kill", "start", "drain", "fast again"
_LIFE_STRIDE = 7919


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """What all replicas have alike.

    Attributes:
        scheduler_args: of each scheduler.
        overlap, host, link, faults, max_tokens: as in `SimulationOptions`.
        seed: of the faults.
        report_every_s: time between two reports; None where nobody reads them.
        reports_prefixes: whether reports name the prompts that a replica took: routers that share
            nothing learn from it what others sent.
        detect_s: until both ends of a cut connection notice.
        executor_type: the simulated device.
        checks: prove the scheduler's integrity when a replica has come to rest and at its end.
    """

    scheduler_args: dict[str, Any] = field(default_factory=dict)
    overlap: bool = True
    host: HostOverhead = NO_OVERHEAD
    link: SwapLink | None = None
    faults: Faults = NO_FAULTS
    max_tokens: int | None = 4096
    seed: int = 0
    report_every_s: float | None = 0.1
    reports_prefixes: bool = False
    detect_s: float = 1.0
    executor_type: type[SimulatedExecutor] = SimulatedExecutor
    checks: bool = False


@dataclass(slots=True, eq=False)
class _Live:
    """A request here.

    Attributes:
        number: of the arrival.
        front: whose.
        place: by order of acceptance, as the scheduler counts.
        request: as the engine has it.
        is_cut: whether its front hears no more of it.
    """

    number: int
    front: int
    place: int
    request: Request
    is_cut: bool = False


class SimulatedReplica:
    """A replica; `advance` plays it up to a time.

    Args:
        index: of the replica.
        num_replicas: there may be: reports are made in turn.
        machine: what it is.
        arrivals: of the run, by number.
        options: what all have alike.
        is_up: whether it serves from the start.
    """

    def __init__(
        self,
        index: int,
        num_replicas: int,
        machine: Machine,
        arrivals: Sequence[Arrival],
        options: ReplicaOptions,
        *,
        is_up: bool = True,
    ) -> None:
        self.index = index
        self.life = 0
        self.is_up = is_up
        self._machine = machine
        self._arrivals = arrivals
        self._options = options
        self._inbox: list[Submit | Cancel | Order] = []
        self._first = 0
        every_s = options.report_every_s
        self._report_s = math.inf if every_s is None else every_s * (index + 1) / num_replicas
        self._num_steps = self._num_prefill = self._num_turns = self.num_tokens = 0
        self._busy_s = 0.0
        self._begin_life(0.0)

    def _begin_life(self, now_s: float) -> None:
        options, machine = self._options, self._machine
        self._clock = VirtualClock(now_s)
        self._speed = HostSpeed(machine)
        self._scheduler = Scheduler(machine.limits, **options.scheduler_args)
        self._executor = options.executor_type(
            machine.limits,
            self._clock,
            self._speed,
            host=options.host,
            link=options.link,
            faults=options.faults,
            seed=options.seed + _LIFE_STRIDE * self.index + self.life,
        )
        self._core = EngineCore(
            self._scheduler, self._executor, self._clock, overlap=options.overlap
        )
        limits = machine.limits
        most_tokens = limits.needs.most_tokens(limits.num_pages - 1, limits.max_pages_per_seq)
        self._longest = min(limits.max_model_len, most_tokens + 1)
        self._live: dict[str, _Live] = {}
        self._pending = News()
        self._hung_until_s = 0.0
        self._cut: dict[int, float] = {}
        self._is_draining = False
        self._num_reports = 0
        self._prefixes: dict[tuple[int, ...], None] = {}
        self._last_token_s = np.full(256, np.nan)
        self._max_stall_s = np.zeros(256)
        self._num_taken = 0

    # From outside.

    def send(self, message: Submit | Cancel | Order) -> None:
        """Puts a message into the replica's inbox; it is read when its time has come."""
        if self._inbox and message.time_s < self._inbox[-1].time_s:
            insort(self._inbox, message, lo=self._first, key=attrgetter("time_s"))
        else:
            self._inbox.append(message)

    @property
    def next_s(self) -> float:
        """When something happens here next; infinity if nothing does but by messages."""
        next_s = self._inbox[self._first].time_s if self._first < len(self._inbox) else math.inf
        if self.is_up:
            next_s = min(next_s, self._report_s)
            if self._has_work:
                next_s = min(next_s, max(self._clock.now_s(), self._hung_until_s))
        return next_s

    @property
    def is_busy(self) -> bool:
        """Whether it has requests, or messages to read."""
        return bool(self._live) or self._first < len(self._inbox)

    @property
    def _has_work(self) -> bool:
        return (
            self._core.has_work
            or len(self._pending) > 0
            or self._executor.next_transfer_s is not None
        )

    def advance(self, until_s: float, ended: list[Ended], reports: list[ReplicaReport]) -> None:
        """Plays all that begins before `until_s`.

        Args:
            ended, reports: what it tells is appended to them.
        """
        clock = self._clock
        while True:
            # Machines fail at their time, even while a step runs; the rest waits for the loop.
            order = self._next_order()
            if order is not None and order.time_s <= max(clock.now_s(), self._hung_until_s):
                if order.time_s >= until_s:
                    return
                self._obey(order, ended)
                clock = self._clock
                continue
            time_s = self._next_turn_s()
            if order is not None:
                time_s = min(time_s, order.time_s)
            if time_s >= until_s:
                return
            clock.advance_to(time_s)
            if order is not None and order.time_s <= time_s:
                continue
            self._tell(ended)
            self._read(ended)
            if not self.is_up:
                continue
            if self._report_s <= clock.now_s():
                self._make_report(reports)
            if self._core.has_work or self._executor.next_transfer_s is not None:
                self._turn()

    def _next_order(self) -> Order | None:
        """The first of the inbox's orders that is due before any of its other messages is read."""
        for at in range(self._first, len(self._inbox)):
            message = self._inbox[at]
            if isinstance(message, Order):
                return message
            if message.time_s > max(self._clock.now_s(), self._hung_until_s):
                return None
        return None

    def _next_turn_s(self) -> float:
        if not self.is_up:
            return self._inbox[self._first].time_s if self._first < len(self._inbox) else math.inf
        now_s = max(self._clock.now_s(), self._hung_until_s)
        if self._has_work:
            return now_s
        next_s = self._report_s
        if self._first < len(self._inbox):
            next_s = min(next_s, self._inbox[self._first].time_s)
        return max(now_s, next_s)

    # What befalls it.

    def _obey(self, order: Order, ended: list[Ended]) -> None:
        self._inbox.remove(order)
        if order.kind == START:
            if not self.is_up:
                self.is_up = True
                self._begin_life(order.time_s)
                self._catch_up_reports(order.time_s)
        elif not self.is_up:
            return
        elif order.kind == DRAIN:
            self._is_draining = True
        elif order.kind == HANG:
            self._hung_until_s = max(self._hung_until_s, order.time_s + order.for_s)
        elif order.kind == SLOW:
            self._speed.factor = order.factor
            self.send(Order(order.time_s + order.for_s, FAST_AGAIN))
        elif order.kind == FAST_AGAIN:
            self._speed.factor = 1.0
        elif order.kind == PARTITION:
            self._cut[order.front] = order.time_s + order.for_s
            for live in self._live.values():
                if live.front == order.front and not live.is_cut:
                    self._lose(live, order.time_s, order.time_s + self._options.detect_s, ended)
                    live.is_cut = True
                    self.send(Cancel(order.time_s + self._options.detect_s, live.number))
        else:
            self._die(order.time_s, ended)

    def _die(self, now_s: float, ended: list[Ended]) -> None:
        """It is gone, and what it had under way with it."""
        for live in self._live.values():
            if not live.is_cut:
                self._lose(live, now_s, now_s, ended)
        self._retire()
        self.is_up = False
        self.life += 1
        self._live = {}
        self._pending = News()
        self._hung_until_s = 0.0

    def _lose(self, live: _Live, now_s: float, time_s: float, ended: list[Ended]) -> None:
        """Says that a request can go on elsewhere, behind the tokens that were told by `now_s`."""
        num_told = len(live.request.output_token_ids) - self._num_pending(live.request)
        ended.append(self._end_of(live, time_s, "lost", num_told))

    def _num_pending(self, request: Request) -> int:
        return sum(len(item.new_token_ids) for item in self._pending if item.request is request)

    def _retire(self) -> None:
        executor = self._executor
        self._num_steps += executor.num_steps
        self._num_prefill += executor.num_prefill_tokens
        self._busy_s += executor.busy_s

    # What it does.

    def _read(self, ended: list[Ended]) -> None:
        """Reads what has come by now."""
        now_s, inbox = self._clock.now_s(), self._inbox
        while self._first < len(inbox) and inbox[self._first].time_s <= now_s:
            message = inbox[self._first]
            if isinstance(message, Order):
                break
            self._first += 1
            if isinstance(message, Submit):
                self._take(message, ended)
            else:
                self._core.cancel(self._arrivals[message.number].request_id)
        if self._first > 256 or self._first == len(inbox):
            del inbox[: self._first]
            self._first = 0

    def _take(self, message: Submit, ended: list[Ended]) -> None:
        number, now_s, options = message.number, self._clock.now_s(), self._options
        arrival = self._arrivals[number]
        if not self.is_up or self._cut.get(message.front, 0.0) > message.time_s:
            at_s = message.time_s + (options.detect_s if self.is_up else 0.0)
            ended.append(
                Ended(
                    max(at_s, now_s), self.index, number, message.front, "lost", message.num_told,
                    message.first_token_s,
                )
            )  # fmt: skip
            return
        room = max(1, self._longest - arrival.num_input)
        max_tokens = min(options.max_tokens or arrival.num_output, room)
        request = make_request(arrival, max_tokens=max_tokens, number=number)
        num_output = min(arrival.num_output, max_tokens)
        if message.num_told:
            request.output_token_ids = list(output_tokens(number, num_output)[: message.num_told])
            request.metrics.first_token_s = message.first_token_s
            request.metrics.last_token_s = now_s
        self._executor.learn_output(arrival.request_id, number, num_output)
        live = _Live(number, message.front, self._num_taken, request)
        try:
            self._core.add(request)
        except OctavoError as error:
            self._executor.forget_output(arrival.request_id)
            is_refused = isinstance(error, (OverloadedError, UnattainableTargetError))
            retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
            status = "refused" if is_refused else "failed"
            found = self._end_of(live, now_s, status, message.num_told)
            ended.append(found._replace(retry_after_s=retry_after_s))
            return
        self._num_taken += 1
        if self._num_taken > len(self._max_stall_s):
            grown = self._num_taken
            self._last_token_s = np.append(self._last_token_s, np.full(grown, np.nan))
            self._max_stall_s = np.append(self._max_stall_s, np.zeros(grown))
        if message.num_told:
            self._last_token_s[live.place] = now_s
        self._live[arrival.request_id] = live
        if options.reports_prefixes and (chunks := arrival_chunks(arrival)):
            self._prefixes[chunks] = None
            if len(self._prefixes) > MOST_PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]

    def _turn(self) -> None:
        core, turns_before = self._core, self._core.num_turns
        self._pending = core.step()
        self._num_turns += 1
        if core.num_turns == turns_before:
            transfer_s = self._executor.next_transfer_s
            tick_s = self._clock.now_s() + IDLE_TICK_S
            self._clock.advance_to(tick_s if transfer_s is None else min(transfer_s, tick_s))

    def _tell(self, ended: list[Ended]) -> None:
        """Tells clients what was committed by now."""
        if not len(self._pending):
            return
        news, self._pending = self._pending, News()
        late_s = self._clock.now_s() if self._hung_until_s else 0.0
        for rows in news.rows:
            numbers, now_s = rows.numbers, max(rows.now_s, late_s)
            gaps_s = now_s - self._last_token_s[numbers]
            self._last_token_s[numbers] = now_s
            self._max_stall_s[numbers] = np.maximum(self._max_stall_s[numbers], gaps_s)
            self.num_tokens += len(numbers)
        for request, token_ids, _, _, finished, _ in news.items:
            live = self._live[request.request_id]
            if token_ids:
                self.num_tokens += len(token_ids)
                last_s = request.metrics.last_token_s
                now_s = max(last_s or 0.0, late_s)
                before_s = float(self._last_token_s[live.place])
                if before_s == before_s:
                    stall_s = max(now_s - before_s, float(self._max_stall_s[live.place]))
                    self._max_stall_s[live.place] = stall_s
                else:
                    request.metrics.first_token_s = now_s
                self._last_token_s[live.place] = now_s
            if finished:
                self._end(live, ended)
        if not self._live and self._options.checks:
            self._scheduler.check_integrity()

    def _end(self, live: _Live, ended: list[Ended]) -> None:
        request = live.request
        del self._live[request.request_id]
        arrival = self._arrivals[live.number]
        num_output = min(arrival.num_output, request.max_tokens)
        said, got = output_tokens(live.number, num_output), request.output_token_ids
        status = request.status.value
        assert tuple(got) == said[: len(got)], f"{request.request_id} said something else"
        if status in ("stop", "length"):
            assert len(got) == num_output, (request.request_id, len(got), num_output)
        self._executor.forget_output(request.request_id)
        if live.is_cut:
            return
        finished_s = request.metrics.finished_s
        assert finished_s is not None
        found = self._end_of(live, max(finished_s, 0.0), status, len(got))
        if isinstance(request.error, OverloadedError):
            found = found._replace(retry_after_s=request.error.retry_after_s)
        ended.append(found)

    def _end_of(self, live: _Live, time_s: float, status: str, num_told: int) -> Ended:
        request = live.request
        first_s = request.metrics.first_token_s if num_told else None
        is_here = live.place < self._num_taken
        last_s = float(self._last_token_s[live.place]) if is_here and num_told else None
        if last_s is not None and last_s != last_s:
            last_s = None
        return Ended(
            time_s, self.index, live.number, live.front, status, num_told, first_s, last_s,
            float(self._max_stall_s[live.place]) if is_here else 0.0,
            request.metrics.num_preemptions, request.num_cached_tokens,
        )  # fmt: skip

    # What it reports.

    def _make_report(self, reports: list[ReplicaReport]) -> None:
        now_s = self._clock.now_s()
        reports.append(
            ReplicaReport(
                self.index, self.life, self._num_reports, now_s, self._scheduler.standing(now_s),
                tuple(self._prefixes), self._is_draining,
            )
        )  # fmt: skip
        self._prefixes.clear()
        self._num_reports += 1
        self._catch_up_reports(now_s)

    def _catch_up_reports(self, now_s: float) -> None:
        every_s = self._options.report_every_s
        if every_s is not None and self._report_s <= now_s:
            self._report_s += every_s * (math.floor((now_s - self._report_s) / every_s) + 1)
            if self._report_s <= now_s:  # rounding
                self._report_s += every_s

    def is_cut(self, front: int, time_s: float) -> bool:
        """Whether a front hears nothing of it."""
        return self._cut.get(front, 0.0) > time_s

    def counts(self) -> Counts:
        """What it did; the integrity of what is left is proved."""
        load: tuple[Any, ...] = ()
        if self.is_up:
            self._scheduler.check_integrity()
            found = self._scheduler.load()
            load = (found.num_running, found.num_waiting, found.num_owned_pages,
                    found.num_preemptions, found.num_rejected)  # fmt: skip
            self._retire()
        return Counts(
            self._num_steps, self._num_prefill, self.num_tokens, self._busy_s, self._num_turns, load
        )
