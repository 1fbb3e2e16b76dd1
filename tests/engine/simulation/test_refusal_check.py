"""Refusals of a log, tried again one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.refusal_check import check_refusals
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.step_time import LinearCost, StepWork
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

COST = LinearCost(
    base=0.02, token=0.0, prefill=5e-4, decode=1e-3, decode_context=0.0, prefill_context=0.0
)


class Machine:
    def seconds(self, work: StepWork) -> float:
        return COST.seconds(work) * work.num_steps


def record(path: Path, gap_s: float, count: int = 200) -> None:
    """A log of requests that come every so often, each about 0.1 s of the machine."""
    traffic_class = TrafficClass(name="", ttft_target_s=0.5)
    arrivals = [
        Arrival(
            request_id=f"r{n}", arrival_s=gap_s * n, num_input=160, num_output=4,
            traffic_class=traffic_class,
        )
        for n in range(count)
    ]  # fmt: skip
    limits = replica_limits(
        kv_tokens=65_536, num_rows=16, max_num_batched_tokens=256, max_model_len=2048
    )
    arguments = {"policy": "slo"}
    with path.open("w") as file:
        simulate(
            arrivals, Scheduler(limits, **arguments), Machine(), log=file, max_tokens=4,
            scheduler_args=arguments,
        )  # fmt: skip


def test_refusals_of_an_overloaded_machine_were_right(tmp_path: Path) -> None:
    record(tmp_path / "log", 0.04)
    figures = check_refusals(tmp_path / "log").to_dict()
    assert figures["requests"] == 200
    assert figures["refused"] > 50
    assert figures["wrong_share"] <= 0.05
    assert figures["late"] <= 0.05 * (200 - figures["refused"])


def refuse_another(path: Path, before_s: float, **changes: object) -> None:
    """Writes a request into a log that was refused so long before request r15 came."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line.get("add", {}).get("request_id") == "r15")
    extra = json.loads(json.dumps(lines[at]))
    arrival_s = extra["add"]["arrival_s"] - before_s
    extra["add"] |= {"request_id": "refused", "arrival_s": arrival_s, **changes}
    lines.insert(at, extra | {"t": arrival_s, "refused": "OverloadedError"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_refusal_by_an_idle_machine_was_wrong(tmp_path: Path) -> None:
    record(tmp_path / "log", 1.0, count=30)
    refuse_another(tmp_path / "log", 0.5)
    check = check_refusals(tmp_path / "log")
    assert check.wrong == check.refused == ("refused",)
    assert check.to_dict()["wrong_share"] == 1.0


def test_of_what_no_idle_machine_could_do_it_was_right(tmp_path: Path) -> None:
    record(tmp_path / "log", 1.0, count=30)
    refuse_another(tmp_path / "log", 0.5, ttft_target_s=0.09)  # it takes 0.1 s
    assert check_refusals(tmp_path / "log").wrong == ()


@pytest.mark.parametrize(("target_s", "is_wrong"), [(0.15, False), (0.3, True)])
def test_what_was_on_its_way_comes_first(tmp_path: Path, target_s: float, is_wrong: bool) -> None:
    record(tmp_path / "log", 1.0, count=30)
    # 10 ms after another one, whose step takes 0.1 s, as its own does.
    refuse_another(tmp_path / "log", -0.01, ttft_target_s=target_s)
    assert bool(check_refusals(tmp_path / "log").wrong) is is_wrong


def test_of_what_would_have_made_another_late_too(tmp_path: Path) -> None:
    record(tmp_path / "log", 1.0, count=30)
    # As long as the pause: it is done in time, and the one that comes next is not.
    refuse_another(tmp_path / "log", 0.01, prompt_token_ids=[1] * 1600, ttft_target_s=1.05)
    check = check_refusals(tmp_path / "log")
    assert check.refused == ("refused",)
    assert check.wrong == ()


def test_a_log_without_refusals_has_none_wrong(tmp_path: Path) -> None:
    record(tmp_path / "log", 1.0, count=5)
    check = check_refusals(tmp_path / "log")
    assert (check.num_requests, check.refused, check.wrong) == (5, (), ())
    assert check.to_dict()["interval"] == [0.0, 1.0]
