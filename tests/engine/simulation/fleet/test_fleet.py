"""Fleets in simulation: one replica is one engine, and what befalls machines moves requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.routing.autoscaler import Autoscaling
from octavo.engine.routing.prefixes import CHUNK_TOKENS, prompt_chunks
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.fleet import disasters as befallen
from octavo.engine.simulation.fleet.arrivals import arrival_chunks, session_of
from octavo.engine.simulation.fleet.disasters import Disaster, Disasters
from octavo.engine.simulation.fleet.fleet import FleetOptions, simulate_fleet
from octavo.engine.simulation.fleet.machines import Machine, deal, parse_machines
from octavo.engine.simulation.fleet.replica import ReplicaOptions
from octavo.engine.simulation.fleet.report import FleetReport
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.traffic import Arrival, prompt_tokens

ARGS = {"policy": "slo", "enable_prefix_caching": True}


@pytest.fixture
def run(small_limits: StepLimits, chats: Callable[..., list[Arrival]]) -> Callable[..., Any]:
    """Plays chats on a fleet of small replicas."""

    def play(arrivals: list[Arrival] | None = None, **options: Any) -> FleetReport:
        machines = options.pop("machines", [(Machine(
            limits=small_limits, step_time=NIYAMA_STEP_TIME), 1.0)])  # fmt: skip
        options.setdefault("num_replicas", 3)
        replica = ReplicaOptions(scheduler_args=ARGS, max_tokens=64, checks=True)
        return simulate_fleet(
            chats(12.0, 6.0) if arrivals is None else arrivals,
            machines,
            FleetOptions(replica=replica, **options),
        )

    return play


def test_a_fleet_of_one_is_one_engine(
    run: Callable[..., FleetReport],
    make_scheduler: Callable[..., Scheduler],
    chats: Callable[..., list[Arrival]],
) -> None:
    arrivals = chats(40.0, 4.0)  # more than it can serve
    alone = simulate(arrivals, make_scheduler(**ARGS), NIYAMA_STEP_TIME, max_tokens=64)
    fleet = run(arrivals, num_replicas=1, num_tries=1, router="least_work")
    assert {r.status for r in alone.records} >= {"stop", "rejected"}
    for one, other in zip(alone.records, fleet.records, strict=True):
        assert (one.status, one.num_output) == (other.status, other.num_output)
        assert (one.first_token_s, one.last_token_s) == (other.first_token_s, other.last_token_s)
        assert one.max_stall_s == pytest.approx(other.max_stall_s)


def befall(monkeypatch: pytest.MonkeyPatch, *found: Disaster) -> None:
    monkeypatch.setattr(Disasters, "draw", lambda *_: list(found))


@pytest.mark.parametrize("kind", ["death", "hang", "partition"])
def test_streams_of_a_lost_replica_go_on_elsewhere(
    run: Callable[..., FleetReport], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    befall(monkeypatch, Disaster(2.0, 1, kind, 60.0))
    report = run(disasters=Disasters(deaths=1.0, watch_s=1.5, detect_s=0.5, restart_s=2.0))
    moved = [
        record
        for record, places in zip(report.records, report.places, strict=True)
        if len(places) > 1 and record.is_served
    ]
    assert moved
    assert report.num_continued >= len(moved)
    assert not any(record.status == "failed" for record in report.records)
    if kind == "death":
        told = sum(record.num_output for record in report.records)
        assert told == sum(count.num_tokens for count in report.counts.values())
        assert [num for _, num in report.num_replicas] == [3, 2, 3]
    if kind == "hang":  # nobody speaks of it until the watch has seen it
        assert max(record.max_stall_s for record in moved) > 1.5


def test_a_slow_machine_takes_as_many_times_as_long(
    run: Callable[..., FleetReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = [Arrival(request_id="a", arrival_s=1.0, num_input=8, num_output=40)]
    plain = run(lone, num_replicas=1).records[0].tpot_s
    befall(monkeypatch, Disaster(0.5, 0, befallen.SLOW, 100.0))
    slow = run(lone, num_replicas=1, disasters=Disasters(slows=1.0, slow_factor=4.0)).records[0]
    assert slow.tpot_s == pytest.approx(4 * (plain or 0))


def test_a_fast_machine_is_sent_more(run: Callable[..., FleetReport], small_limits) -> None:
    slow = Machine(limits=small_limits, step_time=NIYAMA_STEP_TIME)
    kinds = [(slow, 1.0), (replace(slow, speed=3.0), 1.0)]
    report = run(num_replicas=2, machines=kinds)
    first, second = (sum(p[:1] == [at] for p in report.places) for at in (0, 1))
    assert second > 1.5 * first


def test_reports_that_never_come_leave_a_fleet_that_serves(
    run: Callable[..., FleetReport], chats: Callable[..., list[Arrival]]
) -> None:
    report = run(chats(4.0, 5.0), report_age_s=1.0, report_loss=0.9, num_fronts=4)
    assert report.attainment > 0.5


def test_a_fleet_grows_under_load_and_shrinks_after_it(
    run: Callable[..., FleetReport], chats: Callable[..., list[Arrival]]
) -> None:
    late = Arrival(request_id="late", arrival_s=40.0, num_input=8, num_output=4)
    scaling = Autoscaling(
        signal="saturation", least=1, most=6, high=0.6, low=0.2, every_s=1.0, start_s=2.0,
        calm_looks=2,
    )  # fmt: skip
    report = run(
        [*chats(16.0, 8.0), late], num_replicas=1, autoscaling=scaling, router="least_work"
    )
    sizes = [num for _, num in report.num_replicas]
    assert max(sizes) >= 2
    assert sizes[-1] == 1
    first_more_s = next(at_s for at_s, num in report.num_replicas if num > 1)
    assert first_more_s >= 2.0
    assert not any(record.status == "failed" for record in report.records)


def test_kinds_of_machines_are_dealt_by_their_shares(small_limits: StepLimits) -> None:
    plain = Machine(limits=small_limits, step_time=NIYAMA_STEP_TIME)
    kinds = parse_machines(["a:share=3", "b:share=1,speed=0.5,kv_tokens=1024"], plain)
    machines = deal(kinds, 8)
    assert [machine.name for machine in machines].count("a") == 6
    assert {m.limits.num_pages for m in machines if m.name == "b"} == {1024 // 16 + 1}
    assert {m.name for m in machines[:4]} == {"a", "b"}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (Disasters.parse, "deaths=-1"),
        (Disasters.parse, "floods=1"),
        (Disasters.parse, "deaths=many"),
        (Disasters.parse, "slow_factor=0.5"),
        (lambda text: parse_machines([text], None), "a:speed=0"),  # type: ignore[arg-type]
        (lambda text: FleetOptions(num_replicas=2, router=text), "magic"),
        (lambda text: FleetOptions(num_replicas=int(text)), "0"),
        (lambda text: FleetOptions(num_replicas=1, report_age_s=float(text)), "nan"),
        (lambda text: FleetOptions(num_replicas=1, report_loss=float(text)), "1"),
    ],
)
def test_what_cannot_be_is_refused(parse: Callable[[str], object], text: str) -> None:
    machine = Machine(limits=None, step_time=NIYAMA_STEP_TIME)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError):
        parse_machines([text], machine) if text.startswith("a:") else parse(text)


def test_chunks_of_arrivals_are_equal_where_those_of_their_prompts_are() -> None:
    def arrival(*segments: tuple[int, int], num_input: int = 400) -> Arrival:
        return Arrival(
            request_id="a", arrival_s=0.0, num_input=num_input, num_output=1,
            segments=tuple(Segment(*segment) for segment in segments),
        )  # fmt: skip

    made = [
        arrival((1, 300)),
        arrival((1, 350)),
        arrival((1, 100), (2, 200)),
        arrival((1, 100), (3, 200)),
        arrival((1, 128), (2, 100)),
        arrival((1, 300), num_input=CHUNK_TOKENS),
        arrival((1, 300), num_input=CHUNK_TOKENS + 1),
        arrival(),
    ]
    for one in made:
        for other in made:
            wanted = zip(
                prompt_chunks(prompt_tokens(one, 1)), prompt_chunks(prompt_tokens(other, 2)),
                strict=False,
            )  # fmt: skip
            found = zip(arrival_chunks(one), arrival_chunks(other), strict=False)
            assert sum(a == b for a, b in wanted) == sum(a == b for a, b in found)


def test_turns_of_a_session_carry_its_name() -> None:
    assert session_of("2-sessions-17.3") == session_of("2-sessions-17.11") == "2-sessions-17"
    assert session_of("chat-4") == ""
