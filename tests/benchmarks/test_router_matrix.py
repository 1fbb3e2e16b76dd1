"""The router matrix: runs are paired by seed, and what is missing is not made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import router_matrix
from benchmarks.router_matrix import OURS, judge, main, table


def runs(**changes: object) -> list[router_matrix.Run]:
    fields = {"beside": "plain", "duration_s": 9.0, "warm_up_s": 0.0, "num_replicas": 2, **changes}
    return [
        router_matrix.Run(
            case=router_matrix.CASES[0], router=router, load=load, seed=seed, **fields
        )  # type: ignore[arg-type]
        for router in (OURS, "least_work", "round_robin")
        for load in (0.8, 1.0)
        for seed in (1, 2)
    ]


def kept(found: list[router_matrix.Run]) -> dict[str, dict[str, float]]:
    values = {OURS: 0.9, "least_work": 0.8, "round_robin": 0.5}
    return {run.key: {"attainment": values[run.router] - 0.1 * run.seed} for run in found}


def test_ours_is_held_to_the_best_rival_of_each_cell() -> None:
    cells = judge(runs(), kept(runs()))
    assert [cell["load"] for cell in cells] == [0.8, 1.0]
    assert {cell["best_rival"] for cell in cells} == {"least_work"}
    assert all(cell["ahead"] == pytest.approx(0.1) for cell in cells)
    assert all(cell["interval"] == pytest.approx(0.0, abs=1e-9) for cell in cells)
    assert "+0.100 of the best rivals" in table(cells)


def test_a_seed_that_lacks_a_run_is_left_out() -> None:
    some = kept(runs())
    del some[next(r for r in runs() if r.router == "round_robin" and r.load == 1.0).key]
    cells = judge(runs(), some)
    assert [cell["num_seeds"] for cell in cells] == [2, 1]
    assert cells[1]["interval"] is None


def test_runs_are_kept_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "multi-turn", "--loads", "1", "--seeds", "1", "--rivals", "round_robin",
                 "--replicas", "1", "--duration", "6", "--warm-up", "0", "--workers", "1",
                 "--output", str(tmp_path)]  # fmt: skip
    main(arguments)
    assert "2 of 2 runs" in (tmp_path / "matrix.md").read_text()
    capsys.readouterr()
    main(arguments)
    assert "seed 1" not in capsys.readouterr().err
    assert main(["--only", "poetry", "--output", str(tmp_path)]) == 2
