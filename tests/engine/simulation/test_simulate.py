"""Simulations: everybody ends once, time is the model's, one seed gives the same bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.engine.observability.event_log import EventLog
from octavo.engine.request import Request
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.executor import HostOverhead, output_tokens
from octavo.engine.simulation.faults import Faults
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import SimulationReport, simulate, true_length
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME, ConstantStepTime
from octavo.engine.simulation.workloads.arrivals import ClosedUsers, uniform_lengths
from octavo.engine.simulation.workloads.prompts import block_segments
from octavo.engine.simulation.workloads.traffic import END_TOKEN, Arrival

STEP = ConstantStepTime(0.1)


def one(num_input: int = 8, num_output: int = 4, **fields: object) -> Arrival:
    return Arrival(
        request_id="a", arrival_s=0.0, num_input=num_input, num_output=num_output, **fields
    )  # type: ignore[arg-type]


def test_a_lone_request_takes_a_step_a_token(make_scheduler: Callable[..., Scheduler]) -> None:
    report = simulate([one()], make_scheduler(), STEP)
    record = report.records[0]
    assert record.status == "stop"
    assert record.ttft_s == pytest.approx(0.1)
    assert record.tpot_s == pytest.approx(0.1)
    assert record.e2e_s == pytest.approx(0.4)
    assert record.num_output == 4


def test_without_overlap_a_stopped_row_costs_no_step(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    assert simulate([one()], make_scheduler(), STEP, overlap=False).num_steps == 4


def test_host_time_delays_the_device_when_steps_do_not_overlap(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    host = HostOverhead(plan_s=0.02, commit_s=0.03)
    report = simulate([one()], make_scheduler(), STEP, overlap=False, host=host)
    assert report.records[0].ttft_s == pytest.approx(0.15)
    assert report.records[0].tpot_s == pytest.approx(0.15)


def test_overlap_hides_host_time_behind_the_device(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    host = HostOverhead(plan_s=0.02, commit_s=0.03)
    arrivals = [one(num_output=40)]
    slow = simulate(arrivals, make_scheduler(), STEP, overlap=False, host=host).records[0]
    fast = simulate(arrivals, make_scheduler(), STEP, overlap=True, host=host).records[0]
    assert slow.tpot_s == pytest.approx(0.15)
    assert fast.tpot_s == pytest.approx(0.1)


def test_one_seed_gives_the_same_report_and_log(
    make_scheduler: Callable[..., Scheduler], chats: Callable[..., list[Arrival]]
) -> None:
    faults = Faults(
        slow_step_share=0.1, step_noise=0.1, cancelled_share=0.1, failed_step_share=0.01
    )

    def run(seed: int) -> tuple[str, str]:
        log = io.StringIO()
        report = simulate(
            chats(),
            make_scheduler(policy="slo"),
            NIYAMA_STEP_TIME,
            faults=faults,
            seed=seed,
            log=log,
        )
        return json.dumps([record.to_dict() for record in report.records]), log.getvalue()

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_an_observer_hears_what_the_log_holds(
    chats: Callable[..., list[Arrival]], make_scheduler: Callable[..., Scheduler]
) -> None:
    def run(**options: object) -> None:
        simulate(chats(), make_scheduler(), NIYAMA_STEP_TIME, **options)

    log, beside, alone = io.StringIO(), io.StringIO(), io.StringIO()
    limits = make_scheduler().limits
    run(log=log, observer=EventLog(beside, limits))
    run(observer=EventLog(alone, limits))
    assert log.getvalue() == beside.getvalue() == alone.getvalue()
    assert len(log.getvalue().splitlines()) > 100


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_every_answer_is_what_the_request_says(
    chats: Callable[..., list[Arrival]], overlap: bool, num_steps: int
) -> None:
    arrivals = chats()
    said = {a.request_id: output_tokens(n, a.num_output) for n, a in enumerate(arrivals)}
    ended: list[Request] = []
    limits = replica_limits(kv_tokens=1024, num_rows=8, max_num_batched_tokens=64,
                            max_num_steps=num_steps, max_model_len=512)  # fmt: skip
    simulate(
        arrivals,
        Scheduler(limits, num_decode_steps=num_steps),
        NIYAMA_STEP_TIME,
        overlap=overlap,
        max_tokens=128,
        on_end=ended.append,
    )
    assert len(ended) == len(arrivals)
    assert all(tuple(r.output_token_ids) == said[r.request_id] for r in ended)


def test_the_scheduler_cannot_tell_lengths_apart_before_they_show(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    def log_of(num_output: int) -> list[str]:
        log = io.StringIO()
        arrivals = [
            replace(one(num_output=num_output), request_id=str(n), arrival_s=0.01 * n)
            for n in range(6)
        ]
        simulate(arrivals, make_scheduler(policy="slo"), STEP, log=log, max_tokens=200)
        turns = [line for line in log.getvalue().splitlines() if '"turn"' in line]
        return turns[:18]

    assert log_of(20) == log_of(90)


def test_the_limit_tells_a_length_only_if_asked_to(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    limits: list[int] = []
    for max_tokens in (64, None):
        simulate(
            [one()], make_scheduler(), STEP, max_tokens=max_tokens,
            on_end=lambda request: limits.append(request.max_tokens),
        )  # fmt: skip
    assert limits == [64, 4]


def test_declared_lengths_reach_the_request_only_if_declared(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    seen: list[int | None] = []

    def note(request: Request) -> None:
        seen.append(request.known_output_len)

    simulate([one()], make_scheduler(), STEP, on_end=note)
    simulate([one()], make_scheduler(), STEP, on_end=note, declared_length=true_length)
    assert seen == [None, 4]


def test_a_client_that_leaves_ends_its_request(make_scheduler: Callable[..., Scheduler]) -> None:
    report = simulate([one(num_output=50, cancel_s=0.55)], make_scheduler(), STEP)
    record = report.records[0]
    assert record.status == "cancelled"
    assert 0 < record.num_output < 50
    assert not record.is_counted


def test_failed_steps_cost_time_and_hardly_anybody_an_answer(
    make_scheduler: Callable[..., Scheduler], chats: Callable[..., list[Arrival]]
) -> None:
    def play(faults: Faults) -> SimulationReport:
        return simulate(chats(), make_scheduler(), NIYAMA_STEP_TIME, faults=faults, seed=5)

    whole, faulty = play(Faults()), play(Faults(failed_step_share=0.02))
    assert faulty.num_faults[0] > 0
    num_failed = sum(record.status == "failed" for record in faulty.records)
    # Only those go whose steps failed by chance whenever they were tried alone.
    assert num_failed <= faulty.num_faults[0] // 10
    assert faulty.busy_s > whole.busy_s


def test_hung_steps_are_given_up_and_their_requests_go_on(
    make_scheduler: Callable[..., Scheduler], chats: Callable[..., list[Arrival]]
) -> None:
    def play(faults: Faults) -> SimulationReport:
        return simulate(chats(), make_scheduler(), NIYAMA_STEP_TIME, faults=faults, seed=5)

    whole, hung = play(Faults()), play(Faults(hung_step_share=0.04, hung_step_s=7.0))
    num_hangs = hung.num_faults[0]
    assert num_hangs > 3
    assert hung.busy_s > 7.0 * num_hangs  # what a step computes depends on who has come by then
    assert [record.status for record in whole.records].count("failed") == 0
    assert [record.status for record in hung.records].count("failed") <= num_hangs // 10


def test_slow_steps_make_a_run_longer(make_scheduler: Callable[..., Scheduler]) -> None:
    slow = Faults(slow_step_share=1.0, slow_step_factor=4.0)
    record = simulate([one()], make_scheduler(), STEP, faults=slow).records[0]
    assert record.e2e_s == pytest.approx(1.6)


def test_users_in_a_closed_loop_never_have_more_than_one_request_each(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    users = ClosedUsers(3, 20, uniform_lengths((4, 30), (2, 10)), think_s=0.2, seed=1)
    report = simulate(users, make_scheduler(), STEP, keep_timeline=True)
    assert len(report.records) == 20
    assert all(record.status == "stop" for record in report.records)
    assert max(step.plan.num_rows for step in report.timeline) <= 3


def test_shared_blocks_are_found_in_the_prefix_cache(
    make_scheduler: Callable[..., Scheduler],
) -> None:
    arrivals = [
        Arrival(request_id=name, arrival_s=at, num_input=120, num_output=2,
                segments=block_segments(blocks, 48, 120))
        for name, at, blocks in (("a", 0.0, (1, 2)), ("b", 5.0, (1, 2)), ("c", 10.0, (1, 3)))
    ]  # fmt: skip
    report = simulate(arrivals, make_scheduler(), STEP)
    assert [record.cached_tokens for record in report.records] == [0, 96, 48]


def test_outputs_are_a_hash_of_request_and_position() -> None:
    assert output_tokens(1, 10)[:5] == output_tokens(1, 6)[:5]
    assert output_tokens(1, 10) != output_tokens(2, 10)
    assert output_tokens(1, 1) == (END_TOKEN,)
    assert END_TOKEN not in output_tokens(3, 500)[:-1]


def test_turns_without_end_are_an_error(make_scheduler: Callable[..., Scheduler]) -> None:
    with pytest.raises(RuntimeError, match="no end after"):
        simulate([one(num_output=50)], make_scheduler(), STEP, max_turns=3)


def test_a_run_may_end_when_nobody_left_can_be_on_time(
    chats: Callable[..., list[Arrival]],
) -> None:
    arrivals = chats(rate=40.0, duration_s=5.0)
    limits = replica_limits(
        kv_tokens=1024, num_rows=4, max_num_batched_tokens=64, max_model_len=512
    )
    whole, cut = (
        simulate(
            arrivals, Scheduler(limits, policy="fcfs"), NIYAMA_STEP_TIME, stops_when_all_late=stops
        )
        for stops in (False, True)
    )
    assert cut.duration_s < 0.5 * whole.duration_s
    assert [r.is_on_time for r in cut.records] == [r.is_on_time for r in whole.records]
    assert cut.summary()["num_unfinished"] > 0
    assert whole.summary()["num_unfinished"] == 0
