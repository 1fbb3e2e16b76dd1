"""Plays a workload through N real schedulers behind K routers that share nothing.

Time goes in exchanges of 10 ms. In each, fronts route what arrives, at its own time, by what has
reached them; replicas play what begins in it; what they told is heard by fronts in the next one.
So nobody knows what is not known yet, replicas can be played in several processes, and the same
arguments give the same bytes however many those are.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.routing.autoscaler import Autoscaling
from octavo.engine.routing.policies import get_route_policy
from octavo.engine.routing.report import ReplicaReport
from octavo.engine.routing.request import Route
from octavo.engine.routing.router import Router
from octavo.engine.simulation.fleet.arrivals import route_request
from octavo.engine.simulation.fleet.disasters import NO_DISASTERS, Disasters
from octavo.engine.simulation.fleet.keeper import LOOK_EVERY_S, Keeper
from octavo.engine.simulation.fleet.machines import Machine, deal
from octavo.engine.simulation.fleet.messages import Cancel, Ended, Order, Submit
from octavo.engine.simulation.fleet.replica import ReplicaOptions
from octavo.engine.simulation.fleet.report import FleetReport
from octavo.engine.simulation.fleet.shard import Shard, ShardPlan, make_shards
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.simulate import MEAN_PATIENCE_S
from octavo.engine.simulation.workloads.traffic import Arrival

EXCHANGE_S = 0.01
"""What one side tells reaches the other after so long at the most."""
MOST_LOSSES = 8
"""A request that so many replicas were lost with has failed."""
ALL_LATE_EVERY_S = 1.0

_REPORT, _ENDED, _PLACE, _CANCEL, _CALL = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What of a fleet's simulation is neither workload nor machine.

    Attributes:
        num_replicas: that serve from the start.
        router: a routing policy, as for `get_route_policy`.
        num_fronts: routers; each takes every `num_fronts`-th request.
        report_age_s: time between two reports of a replica.
        report_delay_s: until a report reaches its fronts.
        report_loss: share of the reports that do not reach a front, 0 to 1.
        num_tries: replicas that a request is sent to, before its client hears of a refusal.
        disasters: what befalls machines.
        autoscaling: how many replicas there are; None for `num_replicas`.
        replica: what replicas have alike.
        seed: of disasters, losses and faults.
        num_processes: that play replicas; 0 plays them in this one.
        stops_when_all_late: end the run once nobody is left who can be on time.
        stops_below: end the run once this attainment is out of reach; 0 never does.
    """

    num_replicas: int
    router: str = "forecast"
    num_fronts: int = 1
    report_age_s: float = 0.1
    report_delay_s: float = EXCHANGE_S
    report_loss: float = 0.0
    num_tries: int = 2
    disasters: Disasters = NO_DISASTERS
    autoscaling: Autoscaling | None = None
    replica: ReplicaOptions = field(default_factory=ReplicaOptions)
    seed: int = 0
    num_processes: int = 0
    stops_when_all_late: bool = False
    stops_below: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("num_replicas", 1), ("num_fronts", 1), ("num_tries", 1),
                            ("num_processes", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise InvalidConfigError(name, getattr(self, name), f"at least {least}")
        if not EXCHANGE_S <= self.report_age_s <= 60:
            raise InvalidConfigError("report_age", self.report_age_s, f"{EXCHANGE_S:g} to 60 s")
        if not 0 <= self.report_delay_s <= 60:
            raise InvalidConfigError("report_delay", self.report_delay_s, "0 to 60 s")
        if not 0 <= self.report_loss < 1:
            raise InvalidConfigError("report_loss", self.report_loss, "a share from 0 to below 1")
        get_route_policy(self.router)


def simulate_fleet(
    arrivals: Sequence[Arrival], machines: Sequence[tuple[Machine, float]], options: FleetOptions
) -> FleetReport:
    """Serves a workload, to the last event.

    Args:
        arrivals: requests, by arrival.
        machines: kinds and their shares.
        options: the rest.
    """
    return _Fleet(arrivals, machines, options).run()


class _Fleet:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        machines: Sequence[tuple[Machine, float]],
        options: FleetOptions,
    ) -> None:
        self.arrivals, self.options = arrivals, options
        scaling = options.autoscaling
        self.num = num = max(options.num_replicas, scaling.most if scaling else 0)
        self.shards = self._make_shards(deal(machines, num))
        self.fronts = [
            Router(num, get_route_policy(options.router), quiet_s=self._quiet_s())
            for _ in range(options.num_fronts)
        ]
        self.records = [
            RequestRecord(
                request_id=a.request_id, arrival_s=a.arrival_s, num_input=a.num_input,
                traffic_class=a.traffic_class,
            )
            for a in arrivals
        ]  # fmt: skip
        self.places: list[list[int]] = [[] for _ in arrivals]
        self.at: dict[int, int] = {}  # number of the arrival -> its replica
        self.tried: dict[int, frozenset[int]] = {}
        self.num_lost: dict[int, int] = defaultdict(int)
        self.forecasts: dict[int, bool] = {}
        self.events: list[tuple[float, int, int, Any]] = []
        self.num_events = 0
        self.mail: dict[int, list[Submit | Cancel | Order]] = defaultdict(list)
        self.num_open = len(arrivals)
        self.num_retried = self.num_continued = 0
        self.cancels = random.Random(f"cancels {options.seed}")
        self.keeper = Keeper(
            options.num_replicas,
            num,
            self.fronts,
            options.disasters,
            scaling,
            order=lambda at, order: self.mail[at].append(order),
            later=lambda time_s, call: self.push(time_s, _CALL, call),
            notice_s=EXCHANGE_S,
        )
        last_s = arrivals[-1].arrival_s if arrivals else 0.0
        for disaster in options.disasters.draw(
            options.num_replicas, options.num_fronts, last_s, options.seed
        ):
            befall = functools.partial(self.keeper.befall, disaster=disaster)
            self.push(disaster.at_s, _CALL, befall)
        if options.disasters != NO_DISASTERS or scaling:
            self.push(LOOK_EVERY_S, _CALL, self.keeper.look)

    def _quiet_s(self) -> float:
        return max(1.0, 5 * self.options.report_age_s)

    def _make_shards(self, machines: Sequence[Machine]) -> list[Shard]:
        options = self.options
        common = replace(
            options.replica,
            report_every_s=options.report_age_s,
            reports_prefixes=options.num_fronts > 1,
            detect_s=options.disasters.detect_s,
            seed=options.seed,
        )
        plan = ShardPlan(
            tuple(range(self.num)), tuple(machines), self.num, options.num_replicas,
            self.arrivals, common,
        )  # fmt: skip
        return make_shards(plan, options.num_processes)

    def push(self, time_s: float, kind: int, what: Any) -> None:
        heapq.heappush(self.events, (time_s, self.num_events, kind, what))
        self.num_events += 1

    def run(self) -> FleetReport:
        arrivals, events = self.arrivals, self.events
        at, turn, now_s, late_s = 0, 0, 0.0, 0.0
        shards_s = 0.0
        while self.num_open:
            next_s = arrivals[at].arrival_s if at < len(arrivals) else math.inf
            if events:
                next_s = min(next_s, events[0][0])
            next_s = min(next_s, shards_s)
            assert next_s < math.inf, f"{self.num_open} requests wait for nothing at {now_s:.3f} s"
            turn = max(turn, int(next_s / EXCHANGE_S))
            begin_s, until_s = turn * EXCHANGE_S, (turn + 1) * EXCHANGE_S
            while True:
                arrival_s = arrivals[at].arrival_s if at < len(arrivals) else math.inf
                if events and events[0][0] <= arrival_s:
                    if events[0][0] >= until_s:
                        break
                    time_s, _, kind, what = heapq.heappop(events)
                    self.happen(max(time_s, begin_s), kind, what)
                elif arrival_s < until_s:
                    self.arrive(at)
                    at += 1
                else:
                    break
            shards_s = self.exchange(until_s)
            now_s, turn = until_s, turn + 1
            if now_s >= late_s:
                late_s = now_s + ALL_LATE_EVERY_S
                if self.is_decided(now_s, all_came=at == len(arrivals)):
                    self.give_up(now_s)
        return self.report(now_s)

    def exchange(self, until_s: float) -> float:
        """Has all replicas play up to a time; when anything happens there next."""
        mail, self.mail = self.mail, defaultdict(list)
        parts: list[dict[int, list[Submit | Cancel | Order]]] = [{} for _ in self.shards]
        for index, messages in mail.items():
            parts[index % len(self.shards)][index] = messages
        for shard, part in zip(self.shards, parts, strict=True):
            shard.begin(until_s, part)
        told = [shard.finish() for shard in self.shards]
        for ended in sorted(e for each in told for e in each.ended):
            self.push(max(ended.time_s, until_s), _ENDED, ended)
        reports = [report for each in told for report in each.reports]
        for report in sorted(reports, key=lambda r: (r.taken_s, r.replica)):
            delay_s = max(self.options.report_delay_s, until_s - report.taken_s)
            self.push(report.taken_s + delay_s, _REPORT, report)
        return min(each.next_s for each in told)

    # What happens.

    def happen(self, now_s: float, kind: int, what: Any) -> None:
        if kind == _REPORT:
            self.hear(now_s, what)
        elif kind == _ENDED:
            self.end(now_s, what)
        elif kind == _PLACE:
            if not self.records[what].status:
                self.place(what, now_s)
        elif kind == _CANCEL:
            self.cancel(what, now_s)
        else:
            what(now_s)

    def arrive(self, number: int) -> None:
        arrival = self.arrivals[number]
        cancel_s, share = arrival.cancel_s, self.options.replica.faults.cancelled_share
        if cancel_s is None and share and self.cancels.random() < share:
            cancel_s = arrival.arrival_s + self.cancels.expovariate(1 / MEAN_PATIENCE_S)
        if cancel_s is not None:
            self.push(cancel_s, _CANCEL, number)
        self.place(number, arrival.arrival_s)

    def place(self, number: int, now_s: float) -> None:
        """Sends a request to the replica that its front chooses."""
        arrival, record = self.arrivals[number], self.records[number]
        front = number % len(self.fronts)
        max_tokens = self.options.replica.max_tokens or arrival.num_output
        request = route_request(
            arrival,
            max_tokens,
            record.num_output,
            self.tried.get(number, frozenset()),
            is_begun=self.num_lost[number] > 0,
        )
        choice = self.fronts[front].route(request, now_s)
        self.keeper.num_routed += 1
        if not isinstance(choice, Route):
            is_stranded = self.num_lost[number] > 0 or not self.keeper.num_serving
            if is_stranded:  # by machines, and not by load: it waits at its front
                self.tried.pop(number, None)
                self.push(now_s + choice.retry_after_s, _PLACE, number)
                return
            self.keeper.num_refused += 1
            self.close(record, "rejected", now_s)
            return
        if choice.is_in_time is not None:
            self.keeper.num_forecast_late += not choice.is_in_time
            self.forecasts[number] = choice.is_in_time
        self.at[number] = choice.replica
        self.places[number].append(choice.replica)
        self.mail[choice.replica].append(
            Submit(now_s, number, front, record.num_output, record.first_token_s)
        )

    def cancel(self, number: int, now_s: float) -> None:
        """A client leaves."""
        record = self.records[number]
        if record.status:
            return
        if number in self.at:
            self.mail[self.at[number]].append(Cancel(now_s, number))
        else:  # it waits at its front
            self.close(record, "cancelled", now_s)

    def hear(self, now_s: float, report: ReplicaReport) -> None:
        """A report reaches the fronts that can hear it."""
        at, options = report.replica, self.options
        if not self.keeper.hears(at, report.life, now_s):
            return
        for index, front in enumerate(self.fronts):
            is_lost = options.report_loss and _share(options.seed, report, index) < (
                options.report_loss
            )
            if not is_lost and not self.keeper.is_cut(at, index, report.taken_s):
                front.report(report)

    def end(self, now_s: float, ended: Ended) -> None:
        """A request is over at its replica."""
        number, record = ended.number, self.records[ended.number]
        front = self.fronts[ended.front]
        is_whole = ended.status in ("stop", "length")
        request_id = record.request_id
        front.ended(request_id, ended.num_told if is_whole else None)
        self.at.pop(number, None)
        if record.status:
            return
        assert ended.num_told >= record.num_output, f"{request_id} lost tokens"
        if ended.num_told > record.num_output:
            if record.first_token_s is None:
                record.first_token_s = ended.first_token_s
            if record.last_token_s is not None and ended.last_token_s is not None:
                stall_s = ended.last_token_s - record.last_token_s
                record.max_stall_s = max(record.max_stall_s, min(stall_s, now_s))
            record.last_token_s = ended.last_token_s
            record.num_output = ended.num_told
        record.max_stall_s = max(record.max_stall_s, ended.max_stall_s)
        record.num_preemptions += ended.num_preemptions
        record.cached_tokens = record.cached_tokens or ended.num_cached
        if ended.status == "lost":
            self.num_lost[number] += 1
            self.num_continued += 1
            if self.num_lost[number] >= MOST_LOSSES:
                self.close(record, "failed", now_s)
                return
            self.tried[number] = frozenset((ended.replica,))
            self.place(number, now_s)
        elif ended.status in ("refused", "rejected"):
            self.refuse(ended, now_s)
        else:
            self.close(record, ended.status, ended.time_s)

    def refuse(self, ended: Ended, now_s: float) -> None:
        """A replica has no room for a request: another may have."""
        number = ended.number
        tried = self.tried.get(number, frozenset()) | {ended.replica}
        if len(tried) < min(self.options.num_tries, self.keeper.num_serving):
            self.tried[number] = tried
            self.num_retried += 1
            self.place(number, now_s)
            return
        self.keeper.num_refused += 1
        self.close(self.records[number], "rejected", now_s)

    def close(self, record: RequestRecord, status: str, now_s: float) -> None:
        assert not record.status, f"{record.request_id} ended twice"
        record.status, record.finished_s = status, now_s
        self.num_open -= 1

    def is_decided(self, now_s: float, *, all_came: bool) -> bool:
        """Whether the run may end before its requests have."""
        options, records = self.options, self.records
        if options.stops_when_all_late and all_came:
            return all(
                self.is_late(number, now_s)
                for number, record in enumerate(records)
                if not record.status
            )
        if not options.stops_below:
            return False
        missed = sum(
            not record.is_on_time if record.status else self.is_late(number, now_s)
            for number, record in enumerate(records)
            if record.is_counted
        )
        return missed > (1.0 - options.stops_below) * len(records)

    def is_late(self, number: int, now_s: float) -> bool:
        """Whether a request that has not ended cannot be on time any more.

        When its first token came, fronts hear at its end. Whoever keeps both of its promises has
        ended by the last of its tokens at the promised pace.
        """
        record, arrival = self.records[number], self.arrivals[number]
        goals = record.traffic_class
        limits_s = [goals.e2e_target_s] if goals.e2e_target_s is not None else []
        if goals.ttft_target_s is not None and goals.tpot_target_s is not None:
            pace_s = goals.tpot_target_s * max(arrival.num_output - 1, 0)
            limits_s.append(goals.ttft_target_s + pace_s)
        waited_s = now_s - record.arrival_s
        return any(waited_s > limit_s for limit_s in limits_s)

    def give_up(self, now_s: float) -> None:
        """Leaves everybody who is left unfinished."""
        for record in self.records:
            if not record.status:
                self.close(record, "unfinished", now_s)

    def report(self, now_s: float) -> FleetReport:
        counts = {}
        for shard in self.shards:
            counts.update(shard.close())
        hits = [0, 0]
        for number, is_in_time in self.forecasts.items():
            goals = self.records[number].traffic_class
            if is_in_time and goals.ttft_target_s is not None:
                ttft_s = self.records[number].ttft_s
                hits[ttft_s is None or ttft_s > goals.ttft_target_s] += 1
        return FleetReport(
            records=self.records,
            places=self.places,
            counts=dict(sorted(counts.items())),
            duration_s=now_s,
            num_retried=self.num_retried,
            num_continued=self.num_continued,
            num_forecast=(hits[0], hits[1]),
            num_replicas=self.keeper.sizes,
        )


def _share(seed: int, report: ReplicaReport, front: int) -> float:
    """A number from 0 to 1 of a report and a front; says whether it is lost on its way there."""
    names = (seed, report.replica, report.life, report.sequence, front)
    return (hash(names) % 1_000_003) / 1_000_003
