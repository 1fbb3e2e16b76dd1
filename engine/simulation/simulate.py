"""Plays a workload through the real scheduler under a virtual clock.

The loop is the engine's own (`EngineCore`); only the device and the time are made up. Everything
that happens from outside (arrivals, clients that leave, ends of page copies) waits in one heap and
is told to the loop where a server would hear of it: between two turns. One thread, no sleep, no
clock of the machine: the same arguments give the same bytes. The module is long because a run's
options, its loop and what it reports are read together.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import numpy as np

from octavo.engine.core import EngineCore
from octavo.engine.errors import OctavoError, OverloadedError, UnattainableTargetError
from octavo.engine.observability.event_log import EventLog
from octavo.engine.observability.observers import Observer
from octavo.engine.request import Request
from octavo.engine.scheduler.committer import CommittedRows, News
from octavo.engine.scheduler.load import SchedulerLoad
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.executor import (
    NO_OVERHEAD,
    HostOverhead,
    SimulatedExecutor,
    SimulatedStep,
    SwapLink,
)
from octavo.engine.simulation.faults import NO_FAULTS, Faults
from octavo.engine.simulation.metrics import attainment, summarize
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.step_time import StepTime
from octavo.engine.simulation.virtual_clock import VirtualClock
from octavo.engine.simulation.workloads.traffic import Arrival, ClosedLoop, make_request

LengthOracle = Callable[[Arrival], int | None]
"""What a client declares as its output's length."""


def true_length(arrival: Arrival) -> int:
    """For policies that are declared to know lengths, and for upper bounds; never for others."""
    return arrival.num_output


def undeclared(arrival: Arrival) -> None:
    """Clients do not know how long an answer will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """How a run went.

    Attributes:
        records: every offered request, in order of arrival.
        gaps_s: waits between tokens, all requests together.
        duration_s: virtual seconds from the start to the last event.
        busy_s: of those, how long the device computed.
        num_steps, num_prefill_tokens: dispatched.
        num_swapped_pages: (out, in).
        num_faults: (steps, copies) that failed.
        num_held_back: turns in which requests waited and nothing was under way.
        load: the scheduler's figures at the end.
        timeline: steps as they ran, if asked for.
    """

    records: list[RequestRecord]
    gaps_s: array[float]
    duration_s: float
    busy_s: float
    num_steps: int
    num_prefill_tokens: int
    num_swapped_pages: tuple[int, int]
    num_faults: tuple[int, int]
    num_held_back: int
    load: SchedulerLoad
    timeline: list[SimulatedStep] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return sum(record.num_output for record in self.records)

    @property
    def attainment(self) -> float:
        """Share of the offered requests that were on time."""
        return attainment(self.records)

    def summary(self) -> dict[str, Any]:
        """Figures fit for JSON: see `summarize`."""
        first_prefill = sum(r.num_input - r.cached_tokens for r in self.records if r.num_output)
        prefilled = max(1, self.num_prefill_tokens)
        return {
            **summarize(self.records, self.gaps_s),
            "duration_s": self.duration_s,
            "device_busy_share": self.busy_s / self.duration_s if self.duration_s else 0.0,
            "num_steps": self.num_steps,
            "prefill_tokens": self.num_prefill_tokens,
            "recompute_share": max(0.0, 1 - first_prefill / prefilled),
            "swapped_pages_out": self.num_swapped_pages[0],
            "swapped_pages_in": self.num_swapped_pages[1],
            "failed_steps": self.num_faults[0],
            "failed_transfers": self.num_faults[1],
            "output_tokens_per_s": self.num_output_tokens / (self.duration_s or 1.0),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What of a simulation is neither workload nor scheduler.

    Attributes:
        overlap: plan and dispatch the next step while one runs.
        host: what the host spends on a step.
        link: prices page copies.
        faults: what goes wrong.
        seed: of the faults.
        max_tokens: every request's limit, less where it would not fit; None gives each its own
            length, which the scheduler then knows as it knows a client's limit.
        declared_length: what clients tell of their output's length.
        idle_tick_s: how often a scheduler that holds requests back is asked again.
        keep_timeline: keep every step in the report.
        stops_when_all_late: end the run once nobody can arrive and nobody left can be on time:
            what follows in an overload changes no attainment.
        max_turns: stop with an error after so many turns of the loop; None: never.
        executor_type: the simulated device.
        on_end: told of each request that was taken, when it ends.
        log: a file to record events in, as the live engine does.
        observer: told of the same events, beside the log or without one.
        scheduler_args: what the scheduler was made with, for the log's first line.
        num_returns: times that a client which is told when to come back does so, then, with the
            same request; its records are named `ID~1`, `ID~2`, …
        check_every: prove the scheduler's integrity after every so many turns; 0: at the end only.
    """

    overlap: bool = True
    host: HostOverhead = NO_OVERHEAD
    link: SwapLink | None = None
    faults: Faults = NO_FAULTS
    seed: int = 0
    max_tokens: int | None = 4096
    declared_length: LengthOracle = undeclared
    idle_tick_s: float = 1e-3
    keep_timeline: bool = False
    stops_when_all_late: bool = False
    max_turns: int | None = None
    check_every: int = 0
    executor_type: type[SimulatedExecutor] = SimulatedExecutor
    on_end: Callable[[Request], None] | None = None
    log: TextIO | None = None
    observer: Observer | None = None
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    num_returns: int = 0


def simulate(
    workload: Sequence[Arrival] | ClosedLoop,
    scheduler: Scheduler,
    step_time: StepTime,
    options: SimulationOptions | None = None,
    **changes: Any,
) -> SimulationReport:
    """Serves a workload, to the last event.

    Args:
        workload: requests with arrivals, or users in a closed loop.
        scheduler: fresh; the real one.
        step_time: prices a step.
        options: the rest.
        **changes: fields of `SimulationOptions`, over `options`.

    Raises:
        RuntimeError: the scheduler holds requests back and nothing can ever happen.
    """
    options = options or SimulationOptions()
    if changes:
        options = replace(options, **changes)
    return _Simulation(workload, scheduler, step_time, options).run()


MEAN_PATIENCE_S = 5.0
"""After how long a client that leaves does so, on average."""

_ARRIVAL, _CANCEL = 0, 1
_RETURN = "~"
_MAX_IDLE_TICKS = 10_000_000


class _Simulation:
    def __init__(
        self,
        workload: Sequence[Arrival] | ClosedLoop,
        scheduler: Scheduler,
        step_time: StepTime,
        options: SimulationOptions,
    ) -> None:
        self.options = options
        self.loop: ClosedLoop | None = None
        if isinstance(workload, Sequence):
            arrivals = workload
        else:
            self.loop, arrivals = workload, workload.start()
        self.clock = VirtualClock()
        self.timeline: list[SimulatedStep] = []
        self.executor = options.executor_type(
            scheduler.limits,
            self.clock,
            step_time,
            host=options.host,
            link=options.link,
            faults=options.faults,
            seed=options.seed,
            on_step=self.timeline.append if options.keep_timeline else None,
        )
        self.scheduler = scheduler
        self.core = EngineCore(scheduler, self.executor, self.clock, overlap=options.overlap)
        if options.log is not None:
            self.core.observe(EventLog(options.log, scheduler.limits, options.scheduler_args))
        if options.observer is not None:
            self.core.observe(options.observer)
        self.events: list[tuple[float, int, int, Arrival]] = []
        limits = scheduler.limits
        most_tokens = limits.needs.most_tokens(limits.num_pages - 1, limits.max_pages_per_seq)
        self.longest = min(limits.max_model_len, most_tokens + 1)
        self.num_events = 0
        self.num_held_back = 0
        self.cancels = random.Random(f"cancels {options.seed}")
        self.records: dict[str, RequestRecord] = {}
        self.arrivals: dict[str, Arrival] = {}
        self.gaps_s = array("d")
        # By number in order of acceptance, as the scheduler counts: see `CommittedRows`.
        self.numbers: dict[str, int] = {}
        self.first_numbers: dict[str, int] = {}
        self.last_token_s = np.full(1024, np.nan)
        self.max_stall_s = np.zeros(1024)
        for arrival in arrivals:
            self.push(arrival.arrival_s, _ARRIVAL, arrival)

    def push(self, time_s: float, kind: int, arrival: Arrival) -> None:
        heapq.heappush(self.events, (time_s, self.num_events, kind, arrival))
        self.num_events += 1

    def run(self) -> SimulationReport:
        core, executor, clock, events = self.core, self.executor, self.clock, self.events
        options, num_turns, num_idle = self.options, 0, 0
        while True:
            while events and events[0][0] <= clock.now_s():
                self.deliver(*heapq.heappop(events)[2:])
            if not core.has_work and executor.next_transfer_s is None:
                if not events:
                    break
                clock.advance_to(events[0][0])
                continue
            turns_before = core.num_turns
            self.take(core.step())
            num_turns += 1
            if options.check_every and num_turns % options.check_every == 0:
                self.scheduler.check_integrity()
            if options.max_turns is not None and num_turns > options.max_turns:
                raise RuntimeError(f"no end after {num_turns} turns, at {clock.now_s():.3f} s")
            if options.stops_when_all_late and num_turns % 64 == 0 and self.all_are_late():
                self.give_up()
                break
            if core.num_turns == turns_before:
                num_idle += 1
                self.pass_time(num_idle)
            else:
                num_idle = 0
        self.scheduler.check_integrity()
        return self.report()

    def deliver(self, kind: int, arrival: Arrival) -> None:
        if kind == _CANCEL:
            self.core.cancel(arrival.request_id)
            return
        record = RequestRecord(
            request_id=arrival.request_id,
            arrival_s=arrival.arrival_s,
            num_input=arrival.num_input,
            traffic_class=arrival.traffic_class,
        )
        assert arrival.request_id not in self.records, arrival.request_id
        number = self.first_numbers.setdefault(
            arrival.request_id.partition(_RETURN)[0], len(self.records)
        )
        self.records[arrival.request_id] = record
        self.arrivals[arrival.request_id] = arrival
        room = max(1, self.longest - arrival.num_input)
        max_tokens = min(self.options.max_tokens or arrival.num_output, room)
        request = make_request(
            arrival,
            max_tokens=max_tokens,
            number=number,
            known_output_len=self.options.declared_length(arrival),
        )
        num_output = min(arrival.num_output, max_tokens)
        self.executor.learn_output(arrival.request_id, number, num_output)
        try:
            self.core.add(request)
        except OctavoError as error:
            is_refused = isinstance(error, (OverloadedError, UnattainableTargetError))
            self.end(record, "rejected" if is_refused else "failed", self.clock.now_s())
            self.come_back(arrival, error)
            return
        self.numbers[arrival.request_id] = len(self.numbers)
        if len(self.numbers) > len(self.max_stall_s):
            self.last_token_s = np.append(self.last_token_s, np.full(len(self.numbers), np.nan))
            self.max_stall_s = np.append(self.max_stall_s, np.zeros(len(self.numbers)))
        cancel_s, share = arrival.cancel_s, self.options.faults.cancelled_share
        if cancel_s is None and share and self.cancels.random() < share:
            cancel_s = arrival.arrival_s + self.cancels.expovariate(1 / MEAN_PATIENCE_S)
        if cancel_s is not None:
            self.push(cancel_s, _CANCEL, arrival)

    def come_back(self, arrival: Arrival, error: Exception | None) -> None:
        """Has a client that was sent away return when it was told to."""
        name, _, turn = arrival.request_id.partition(_RETURN)
        if isinstance(error, OverloadedError) and int(turn or 0) < self.options.num_returns:
            return_s = self.clock.now_s() + error.retry_after_s
            again = f"{name}{_RETURN}{int(turn or 0) + 1}"
            self.push(return_s, _ARRIVAL, replace(arrival, request_id=again, arrival_s=return_s))

    def take(self, news: News) -> None:
        """Notes what clients see. Nearly everything is rows that go on: those are kept short."""
        for rows in news.rows:
            self.take_rows(rows)
        for request, token_ids, _, _, finished, _ in news.items:
            record = self.records[request.request_id]
            if token_ids:
                now_s = request.metrics.last_token_s
                assert now_s is not None
                number = self.numbers[request.request_id]
                if record.first_token_s is None:
                    record.first_token_s = now_s
                else:
                    gap_s = now_s - float(self.last_token_s[number])
                    self.gaps_s.append(gap_s)
                    self.max_stall_s[number] = max(gap_s, self.max_stall_s[number])
                self.last_token_s[number] = now_s
            if finished:
                record.num_output = len(request.output_token_ids)
                record.num_preemptions = request.metrics.num_preemptions
                record.cached_tokens = request.num_cached_tokens
                finished_s = request.metrics.finished_s
                assert finished_s is not None
                if self.options.on_end is not None:
                    self.options.on_end(request)
                self.end(record, request.status.value, finished_s)
                self.come_back(self.arrivals[request.request_id], request.error)

    def take_rows(self, rows: CommittedRows) -> None:
        """Notes a token of each row, none of them its request's first."""
        numbers = rows.numbers
        gaps_s = rows.now_s - self.last_token_s[numbers]
        self.last_token_s[numbers] = rows.now_s
        self.max_stall_s[numbers] = np.maximum(self.max_stall_s[numbers], gaps_s)
        self.gaps_s.frombytes(gaps_s.tobytes())

    def end(self, record: RequestRecord, status: str, now_s: float) -> None:
        assert not record.status, f"{record.request_id} ended twice"
        record.status = status
        record.finished_s = now_s
        if record.first_token_s is not None:
            number = self.numbers[record.request_id]
            record.last_token_s = float(self.last_token_s[number])
            record.max_stall_s = float(self.max_stall_s[number])
        self.executor.forget_output(record.request_id)
        if self.loop is not None:
            following = self.loop.following(self.arrivals[record.request_id], now_s)
            if following is not None:
                self.push(following.arrival_s, _ARRIVAL, following)

    def all_are_late(self) -> bool:
        """Whether nobody can be on time any more."""
        if any(event[2] == _ARRIVAL for event in self.events):
            return False
        now_s = self.clock.now_s()
        live = (record for record in self.records.values() if not record.status)
        return all(record.is_late(now_s) for record in live)

    def give_up(self) -> None:
        """Leaves everybody who is left unfinished."""
        for record in self.records.values():
            if not record.status:
                self.end(record, "unfinished", self.clock.now_s())

    def pass_time(self, num_idle: int) -> None:
        """Nothing could be done at this moment: on to the next one."""
        nexts = [self.events[0][0]] if self.events else []
        transfer_s = self.executor.next_transfer_s
        if transfer_s is not None:
            nexts.append(transfer_s)
        if self.scheduler.has_unfinished:
            self.num_held_back += transfer_s is None
            # A policy may hold requests back until some time has passed.
            nexts.append(self.clock.now_s() + self.options.idle_tick_s)
        if num_idle > _MAX_IDLE_TICKS:
            raise RuntimeError(f"requests are held back for ever, at {self.clock.now_s():.3f} s")
        if nexts:
            self.clock.advance_to(min(nexts))

    def report(self) -> SimulationReport:
        executor = self.executor
        return SimulationReport(
            records=list(self.records.values()),
            gaps_s=self.gaps_s,
            duration_s=self.clock.now_s(),
            busy_s=executor.busy_s,
            num_steps=executor.num_steps,
            num_prefill_tokens=executor.num_prefill_tokens,
            num_swapped_pages=(executor.num_pages_out, executor.num_pages_in),
            num_faults=(executor.num_failed_steps, executor.num_failed_transfers),
            num_held_back=self.num_held_back,
            load=self.scheduler.load(),
            timeline=self.timeline,
        )
