"""The fewest replicas that serve a workload on time, by search and by simulation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.engine.simulation.fleet.sizing import fewest_replicas
from octavo.server.cli.main import main

WORKLOAD = [
    "--rate", "2000", "--num-requests", "120", "--workload", "chat", "--ttft", "0.03",
    "--tpot", "0.005",
]  # fmt: skip
PLAN = ["plan", "--slo", "0.9", "--json", *WORKLOAD]


@pytest.mark.parametrize("most", [1, 5, 8, 100])
@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 31, 100])
def test_the_result_is_enough_and_one_fewer_is_not(needed: int, most: int) -> None:
    tried = []

    def attain(num: int) -> float:
        tried.append(num)
        return min(1.0, num / needed)

    found = fewest_replicas(attain, 1.0, most)
    assert found.num_replicas == (needed if needed <= most else None)
    assert len(tried) == len(set(tried)) <= 2 * most.bit_length() + 1
    assert max(tried) <= most
    if found.num_replicas not in (None, 1):
        assert found.attained[needed - 1] < 1.0


def plan(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main([*PLAN, *more]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


def simulated(capsys: pytest.CaptureFixture[str], *more: str) -> float:
    words = ["simulate", "--json", "--policy", "slo", "--prefix-caching", *WORKLOAD]
    assert main([*words, *more]) == 0
    share: float = json.loads(capsys.readouterr().out)["attainment"]
    return share


def test_the_plan_is_what_simulated_fleets_of_that_size_attain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [found] = plan(capsys, "--device", "v5e")
    num = found["replicas"]
    assert num > 1
    at = ("--step-time", "v5e", "--replicas")
    share = simulated(capsys, *at, str(num))
    assert share >= 0.9
    assert found["attained"][str(num)] == pytest.approx(share, abs=1e-6)
    assert simulated(capsys, *at, str(num - 1)) < 0.9
    assert found["attained"][str(num - 1)] is None


def test_a_device_that_the_weights_do_not_fit_is_said_to_be_too_small(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from octavo.engine.simulation import roofline

    small = dataclasses.replace(roofline.DEVICES["v5e"], memory_bytes=1e6)
    monkeypatch.setitem(roofline.DEVICES, "v5e", small)
    found = plan(capsys, "--device", "v5e", "--device", "h100:2")
    assert [one["fits"] for one in found] == [False, True]
    assert found[1]["replicas"] == 1
    assert main([*PLAN[:3], *WORKLOAD, "--device", "v5e"]) == 0
    assert "the weights alone do not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slo", "1.5"], "slo = 1.5 is not allowed: a share above 0"),
        (["--slo", "0.9"], "slo = 0.9 is not allowed: given with targets"),
        (["--rate", "2"], "rate = 2.0 is not allowed: given with --slo alone"),
        (["--slo", "0.9", "--device", "b300"], "device = 'b300' is not allowed: h100"),
        (["--slo", "0.9", "--device", "h100:0"], "device = 'h100:0' is not allowed"),
        (["--slo", "0.9", "--most-replicas", "0"], "most_replicas = 0 is not allowed: 1 to"),
        (["--slo", "0.9", "--seeds", "0"], "seeds = 0 is not allowed: 1 to 100"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
