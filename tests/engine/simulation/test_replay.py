"""Logs: a replay decides the same, and says where if it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.faults import Faults
from octavo.engine.simulation.replay import arrivals_from_log, replay
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.traffic import Arrival

FAULTS = Faults(
    cancelled_share=0.1, slow_step_share=0.05, failed_step_share=0.01, failed_transfer_share=0.3
)


def record(path: Path, arrivals: list[Arrival], policy: str) -> None:
    limits = replica_limits(
        kv_tokens=1024, num_rows=8, max_num_batched_tokens=128, max_model_len=512,
        max_num_steps=4, host_kv_tokens=1024,
    )  # fmt: skip
    arguments = {"policy": policy, "num_decode_steps": 4}
    with path.open("w") as file:
        simulate(
            arrivals, Scheduler(limits, **arguments), NIYAMA_STEP_TIME, faults=FAULTS,
            max_tokens=128, log=file, scheduler_args=arguments,
        )  # fmt: skip


@pytest.mark.parametrize("policy", ["fcfs", "priority", "mlfq", "niyama", "slo"])
def test_a_replay_reaches_the_same_decisions(
    tmp_path: Path, chats: Callable[..., list[Arrival]], policy: str
) -> None:
    record(tmp_path / "log", chats(rate=12.0), policy)
    result = replay(tmp_path / "log")
    assert result.difference is None
    assert result.num_plans > 100
    assert result.num_tokens > 1000


def test_a_replay_says_where_it_differs(
    tmp_path: Path, chats: Callable[..., list[Arrival]]
) -> None:
    path = tmp_path / "log"
    record(path, chats(), "fcfs")
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"decode":[["' in line)
    event = json.loads(lines[at])
    event["turn"]["decode"][0][2] += 1
    lines[at] = json.dumps(event)
    path.write_text("\n".join(lines))
    result = replay(path)
    assert result.difference is not None
    assert result.difference.startswith(f"line {at + 1}, ")
    assert "decode" in result.difference


def test_a_log_cut_off_while_written_replays_up_to_there(
    tmp_path: Path, chats: Callable[..., list[Arrival]]
) -> None:
    path = tmp_path / "log"
    record(path, chats(), "fcfs")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    result = replay(path)
    assert result.difference is None
    assert result.num_plans > 0


def test_what_is_no_log_is_refused_by_name(tmp_path: Path) -> None:
    for content in ("", "{}", "not json\n"):
        (tmp_path / "log").write_text(content)
        with pytest.raises(InvalidConfigError, match="log = "):
            replay(tmp_path / "log")
    with pytest.raises(InvalidConfigError, match="log = "):
        replay(tmp_path / "absent")


def test_a_log_gives_its_requests_as_a_workload(
    tmp_path: Path, chats: Callable[..., list[Arrival]]
) -> None:
    arrivals = chats()
    limits = replica_limits(kv_tokens=4096, num_rows=8, max_num_batched_tokens=128,
                            max_model_len=512)  # fmt: skip
    with (tmp_path / "log").open("w") as file:
        simulate(arrivals, Scheduler(limits), NIYAMA_STEP_TIME, max_tokens=128, log=file)
    found = arrivals_from_log(tmp_path / "log")
    begin_s = arrivals[0].arrival_s
    assert [a.num_output for a in found] == [a.num_output for a in arrivals]
    assert [a.num_input for a in found] == [a.num_input for a in arrivals]
    assert [a.arrival_s for a in found] == pytest.approx([a.arrival_s - begin_s for a in arrivals])
    assert found[0].traffic_class.ttft_target_s == arrivals[0].traffic_class.ttft_target_s
