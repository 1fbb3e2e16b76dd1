"""The live engine's log: whatever happened to it, a replay decides the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.observability.event_log import start_log
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.simulation.replay import arrivals_from_log, read_log, replay
from octavo.engine.simulation.workloads.bench_requests import random_workload

MIXED = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=15),
    SamplingParams(temperature=0.0, max_tokens=30, stop=["e", "0"]),
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1),
]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_live_run_replays_to_the_same_decisions(
    make_llm: Callable[..., Any], tmp_path: Path, overlap: bool
) -> None:
    # The pool that the streams of test_greedy_invariance.py are preempted in: its programs serve.
    llm = make_llm(overlap=overlap, num_kv_pages=22, block_size=16, max_model_len=256)
    log = start_log(llm.engine.core, llm.engine.config, tmp_path / "log")
    prompts = [list(r.prompt_token_ids) for r in random_workload(12, (3, 90), (1, 1), 272, 5)]
    with log:
        outputs = llm.generate(prompts, [MIXED[n % 4] for n in range(12)], use_tqdm=False)
    llm.engine.core.log = None
    result = replay(tmp_path / "log")
    assert result.difference is None
    assert result.num_plans > 20
    assert len(arrivals_from_log(tmp_path / "log")) == len(outputs) == 12
    commits = [event for event in read_log(tmp_path / "log")[1] if "commit" in event]
    assert commits
    assert all(event["priced_s"] > 0 for event in commits if event["rows"])


def test_an_aborted_request_and_a_failed_step_replay_too(
    make_llm: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_llm().engine
    with start_log(engine.core, engine.config, tmp_path / "log"):
        made = [engine.inputs.process(name, [40, 41], MIXED[0], now_s=0.0) for name in "ab"]
        for submission in made:
            engine.submit(submission)
        engine.step()
        engine.step()
        engine.abort(made[0].request_id)
        engine.step()

        def fail(handle: Any) -> Any:
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "result", fail)
            while engine.has_unfinished:
                engine.step()
        engine.submit(engine.inputs.process("c", [42], MIXED[0], now_s=0.0))
        while engine.has_unfinished:
            engine.step()
    engine.core.log = None
    lines = (tmp_path / "log").read_text()
    assert '"cancel":' in lines
    assert '"fail":' in lines
    assert replay(tmp_path / "log").difference is None
