"""What is guaranteed is found from the steps as they ran, and a broken promise is seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from octavo.engine.request import Priority
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import Decision, DecodeRows
from octavo.engine.simulation.guarantees import class_shares, longest_wait, waits
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import SimulationReport, simulate
from octavo.engine.simulation.step_time import ConstantStepTime
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

NORMAL = TrafficClass(name="chat", priority=Priority.NORMAL)
LOW = TrafficClass(name="batch", priority=Priority.LOW)
PAGE_SIZE = 16


def record(name: str, arrival_s: float, traffic_class: TrafficClass = NORMAL) -> RequestRecord:
    return RequestRecord(
        request_id=name, arrival_s=arrival_s, num_input=10, traffic_class=traffic_class,
        finished_s=100.0,
    )  # fmt: skip


def step(
    begin_s: float,
    begun: tuple[str, ...],
    preempted: tuple[str, ...] = (),
    num_tokens: int = 10,
    brought_back: dict[str, int] | None = None,
    fails: bool = False,
) -> Any:
    rows = tuple(
        SimpleNamespace(request=SimpleNamespace(request_id=n), is_new=True, num_tokens=num_tokens)
        for n in begun
    )
    copies = tuple(
        SimpleNamespace(request_id=name, device_pages=tuple(range(num_pages)))
        for name, num_pages in (brought_back or {}).items()
    )
    plan = SimpleNamespace(
        preempted=preempted, prefill_rows=rows, copy_ins=copies, decode_rows=DecodeRows.of(())
    )
    return SimpleNamespace(plan=plan, begin_s=begin_s, end_s=begin_s + 1.0, fails=fails)


def run_of(records: list[RequestRecord], *steps: Any) -> SimulationReport:
    return SimulationReport(
        records=records, timeline=list(steps), duration_s=100.0, gaps_s=None, busy_s=0.0,
        num_steps=len(steps), num_prefill_tokens=0, num_swapped_pages=(0, 0), num_faults=(0, 0),
        num_held_back=0, load=None,
    )  # fmt: skip


def test_a_wait_ends_with_a_row_and_begins_again_with_a_preemption() -> None:
    report = run_of(
        [record("a", 0.0)], step(2.0, ("a",)), step(5.0, (), preempted=("a",)), step(9.0, ("a",))
    )
    assert [(s.since_s, s.until_s) for s in waits(report)] == [(0.0, 2.0), (5.0, 9.0)]


def test_whoever_comes_before_one_over_the_bound_is_counted() -> None:
    records = [record("old", 0.0), record("new", 5.0)]
    in_order = run_of(records, step(4.0, ()), step(6.0, ("old",)), step(7.0, ("new",)))
    assert longest_wait(in_order, 3.0) == {
        "longest_s": 6.0, "max_wait_s": 3.0, "num_overtaken": 0, "is_kept": True,
    }  # fmt: skip
    overtaken = run_of(records, step(4.0, ()), step(6.0, ("new",)), step(7.0, ("old",)))
    assert longest_wait(overtaken, 3.0)["num_overtaken"] == 1
    assert longest_wait(overtaken, 30.0)["is_kept"]


def test_a_preempted_request_may_have_waited_since_the_step_before_began() -> None:
    """The plan that preempted it was made beside that step, and the scheduler counts from then."""
    records = [record("old", 0.5), record("again", 0.0)]

    def overtaken(before_s: float) -> int:
        steps = (
            step(1.0, ("again",)), step(before_s, ()), step(3.0, (), preempted=("again",)),
            step(5.0, ()), step(5.9, ("again",)), step(7.0, ("old",)),
        )  # fmt: skip
        found = longest_wait(run_of(records, *steps), 3.0)
        assert found["longest_s"] == 6.5
        return found["num_overtaken"]

    assert overtaken(before_s=2.0) == 0
    assert overtaken(before_s=2.95) == 1


def test_a_suspect_of_a_failed_step_is_tried_before_whoever_waits() -> None:
    records = [record("old", 0.0), record("suspect", 3.5), record("other", 4.0)]

    def overtaken(begun: str, fails: bool) -> int:
        steps = (
            step(3.6, ("suspect",), fails=fails), step(4.8, (), preempted=("suspect",)),
            step(6.0, (begun,)), step(7.0, ("old",)),
        )  # fmt: skip
        return longest_wait(run_of(records, *steps), 3.0)["num_overtaken"]

    assert overtaken("suspect", fails=True) == 0
    assert overtaken("suspect", fails=False) == 1
    assert overtaken("other", fails=True) == 1


def test_a_class_that_waits_while_others_take_everything_is_below_its_share() -> None:
    records = [record(str(n), float(n)) for n in range(50)] + [record("low", 0.0, LOW)]
    steps = [step(float(n) + 1, (str(n),), num_tokens=100_000) for n in range(50)]
    found = class_shares(run_of(records, *steps, step(60.0, ("low",))), PAGE_SIZE)
    assert found["LOW"]["tokens"] == 0.0
    assert not found["LOW"]["is_kept"]
    assert found["NORMAL"]["is_kept"]


def test_what_a_class_got_before_it_had_to_wait_counts() -> None:
    served = [record("early", 0.0, LOW), record("low", 2.0, LOW)]
    records = [*served, *(record(str(n), float(n)) for n in range(9))]
    others = [step(float(n) + 2, (str(n),), num_tokens=5_000) for n in range(9)]
    first = step(1.0, ("early",), num_tokens=5_000)
    found = class_shares(run_of(records, first, *others, step(60.0, ("low",))), PAGE_SIZE)["LOW"]
    assert found["lacked_tokens"] == 0.0
    assert 0.05 < found["tokens"] < 1.0
    late = class_shares(run_of(records, *others, step(60.0, ("low",))), PAGE_SIZE)["LOW"]
    assert late["lacked_tokens"] > 0.05 * 20_000
    assert not late["is_kept"]


def test_pages_that_come_back_from_the_host_count_as_what_their_class_was_served() -> None:
    records = [record("back", 0.0, LOW), record("low", 0.0, LOW)]
    records += [record(str(n), float(n)) for n in range(9)]
    others = [step(float(n) + 2, (str(n),), num_tokens=5_000) for n in range(9)]
    back = step(1.0, (), brought_back={"back": 5_000 // PAGE_SIZE})
    kept = class_shares(run_of(records, back, *others, step(60.0, ("low",))), PAGE_SIZE)["LOW"]
    assert kept["is_kept"]
    lost = class_shares(run_of(records, *others, step(60.0, ("low",))), PAGE_SIZE)["LOW"]
    assert not lost["is_kept"]


def test_slo_keeps_what_it_promises_and_says_who_waited(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    arrivals = [
        Arrival(
            request_id=str(n), arrival_s=0.05 * n, num_input=40, num_output=30,
            traffic_class=LOW if n % 4 == 0 else NORMAL,
        )
        for n in range(60)
    ]  # fmt: skip
    scheduler = make_scheduler(policy="slo:max_wait_s=0.5,late=serve", explain=True)
    report = simulate(arrivals, scheduler, ConstantStepTime(0.02), keep_timeline=True)
    wait = longest_wait(report, 0.5)
    assert wait["longest_s"] > 0.5
    assert wait["is_kept"]
    assert all(found["is_kept"] for found in class_shares(report, PAGE_SIZE).values())
    traces = [scheduler.trace(str(n)) for n in range(60)]
    assert any(e.decision is Decision.WAITED and e.text == "for a row" for t in traces for e in t)


def test_a_class_below_its_share_of_tokens_is_not_overtaken_while_it_lacks_pages() -> None:
    """Small requests would fill the pages that the batch work's first is waiting for."""
    low = TrafficClass(name="batch", priority=Priority.LOW, e2e_target_s=500.0)
    chat = TrafficClass(name="chat", ttft_target_s=30.0, tpot_target_s=2.0)
    arrivals = [
        Arrival(
            request_id=f"chat{n}", arrival_s=0.02 * n, num_input=130, num_output=40,
            traffic_class=chat,
        )
        for n in range(900)
    ]  # fmt: skip
    arrivals += [
        Arrival(
            request_id=f"low{n}", arrival_s=0.1, num_input=700, num_output=100, traffic_class=low
        )
        for n in range(20)
    ]
    scheduler = Scheduler(
        replica_limits(kv_tokens=2_000, num_rows=32, max_num_batched_tokens=256),
        policy="slo:late=serve", enable_prefix_caching=False,
    )  # fmt: skip
    report = simulate(
        sorted(arrivals, key=lambda arrival: arrival.arrival_s), scheduler, ConstantStepTime(0.02),
        keep_timeline=True, max_tokens=200, overlap=False,
    )  # fmt: skip
    found = class_shares(report, PAGE_SIZE)["LOW"]
    assert found["tokens"] is not None
    assert found["is_kept"], found


def test_a_plan_says_why_it_runs_several_iterations(
    make_scheduler: Callable[..., Scheduler], small_limits: Any
) -> None:
    import dataclasses

    limits = dataclasses.replace(small_limits, max_num_steps=4)
    scheduler = make_scheduler(limits=limits, policy="slo", num_decode_steps=4, explain=True)
    arrivals = [Arrival(request_id="a", arrival_s=0.0, num_input=8, num_output=20)]
    report = simulate(arrivals, scheduler, ConstantStepTime(0.02), keep_timeline=True)
    reasons = [reason for step in report.timeline for reason in step.plan.reasons]
    told = [reason for reason in reasons if reason.decision is Decision.NUM_STEPS]
    assert (told[0].text, told[0].num_tokens) == ("nobody waits", 4)
