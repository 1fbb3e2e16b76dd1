"""Layers of the packaged model, served: what is decided and said does not depend on how.

The small models of the other tests have weights that were drawn; these are weights that learned.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.observability.event_log import start_log
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import decode_planner
from octavo.engine.scheduler.policies import POLICIES
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policy import Policy, Snapshot, cheaper_by_swap
from octavo.engine.simulation.replay import replay

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):",
    "Water boils at",
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
SHORT = PARAMS.replace(max_tokens=10)
"""With these the prompts, which take five pages of eight tokens, do not outgrow the pool's twelve;
with `PARAMS` they do."""


@pytest.fixture
def make_llm(first_layers: str) -> Iterator[Callable[..., Any]]:
    from octavo import LLM

    made = []

    def make(**changes: Any) -> LLM:
        args = {"model": first_layers, "max_num_seqs": 4, "warm_up": "coarse"} | changes
        llm = LLM(
            progress=False, dtype="float32", max_num_batched_tokens=32, max_model_len=64,
            block_size=8, num_kv_pages=13, watermark=0.0, num_decode_steps=2, **args,
        )  # fmt: skip
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()
        llm.engine.check_integrity()


def tokens(
    llm: Any, params: SamplingParams = PARAMS, prompts: list[str] = PROMPTS
) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def recorded(llm: Any, path: Path) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """What all prompts get, and the plans made: without page ids, as a page that is free a step
    sooner is given away sooner."""
    with start_log(llm.engine.core, llm.engine.config, path):
        said = tokens(llm, SHORT)
    llm.engine.core.log = None
    events = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    plans = [event["turn"] for event in events if event.get("turn")]
    return said, [
        {
            "num_steps": plan["num_steps"],
            "decode": [row[1:] for row in plan["decode"]],
            "prefill": [row[1:5] for row in plan["prefill"]],
        }
        for plan in plans
    ]


def test_overlap_and_a_replay_decide_and_say_the_same(
    make_llm: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many iterations a dispatch has follows what steps took, which no two runs share.
    monkeypatch.setattr(decode_planner, "MOST_DISPATCH_S", 1e9)
    overlapped, stepwise = make_llm(), make_llm(overlap=False)
    said, plans = recorded(overlapped, tmp_path / "overlapped")
    assert recorded(stepwise, tmp_path / "stepwise") == (said, plans)
    assert len(plans) > 5
    # Engines with coarse programs alone are over before packed ones would be compiled.
    assert not any(shape.block_quantized for shape in overlapped.engine.executor.lattice.shapes)
    assert [tokens(stepwise, SHORT, [prompt])[0] for prompt in PROMPTS] == said
    for name in ("overlapped", "stepwise"):
        result = replay(tmp_path / name)
        assert result.difference is None
        assert result.num_tokens == SHORT.max_tokens * len(PROMPTS)


def test_swapped_and_recomputed_sequences_say_what_they_would_have_said(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice: list[Callable[[Snapshot, Request], bool]] = [cheaper_by_swap]

    def make(parameters: Parameters) -> Policy:
        whole = POLICIES["fcfs"](parameters)
        return dataclasses.replace(whole, swap_or_recompute=lambda *args: choice[0](*args))

    monkeypatch.setitem(POLICIES, "fcfs-chosen", make)
    llm = make_llm(host_kv_memory_bytes=8 << 20, scheduling_policy="fcfs-chosen")
    alone = [tokens(llm, PARAMS, [prompt])[0] for prompt in PROMPTS]
    scheduler = llm.engine.scheduler
    assert scheduler.load().num_preemptions == 0
    for chosen, swaps in ((lambda *_: True, True), (lambda *_: False, False), (None, None)):
        before = scheduler.load()
        choice[0] = chosen or cheaper_by_swap
        assert tokens(llm) == alone
        load = scheduler.load()
        assert load.num_preemptions > before.num_preemptions
        if swaps is not None:
            assert (load.num_swaps > before.num_swaps) is swaps
            assert (load.num_recomputes > before.num_recomputes) is not swaps
