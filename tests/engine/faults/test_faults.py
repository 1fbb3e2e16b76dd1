"""Faults in the real engine: a step that raises costs nobody a wrong token, and few an answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.engine.errors import OctavoError, QuarantinedError, StepFailedError
from octavo.engine.faults import quarantine
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.step_plan import StepPlan

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
POISON = 271
"""A token whose embedding is not a number."""


class FaultyExecutor:
    """The real executor, but that it fails where it is told to.

    Args:
        inner: what computes.

    Attributes:
        faults: told of (stage, plan) before each stage of each step; raises to make it fail.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.faults: Callable[[str, StepPlan | None], None] = lambda stage, plan: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: StepPlan) -> Any:
        self.faults("dispatch", plan)
        return self._inner.dispatch(plan)

    def result(self, handle: Any) -> Any:
        self.faults("result", handle.plan)
        return self._inner.result(handle)

    def poll_transfers(self) -> Any:
        self.faults("poll", None)
        return self._inner.poll_transfers()

    def reset(self) -> None:
        self.faults("reset", None)
        self._inner.reset()


def ids_of(plan: StepPlan) -> list[str]:
    requests = [*plan.decode_rows.requests, *(row.request for row in plan.prefill_rows)]
    return [request.label for request in requests]


def prompts(count: int = 6, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(16, 270) for _ in range(rng.randrange(5, 90))] for _ in range(count)]


@pytest.fixture(scope="module")
def built(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine whose model has one token that makes numbers infinite."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    directory = tmp_path_factory.mktemp("poisoned")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, directory / name)
    assert json.loads((directory / "config.json").read_text())["vocab_size"] > POISON
    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    save_file(tensors, directory / "model.safetensors")
    engine = Engine(
        EngineConfig(
            model=str(directory), max_num_seqs=8, max_num_batched_tokens=64, num_decode_steps=2,
            fail_on_compile=True, warm_up="coarse", num_kv_pages=80, block_size=16,
            host_kv_memory_bytes=1 << 20,
        )
    )  # fmt: skip
    executor = FaultyExecutor(engine.executor)
    engine.executor = engine.core.executor = executor  # type: ignore[assignment]
    yield engine
    engine.close()


@pytest.fixture
def engine(built: Any) -> Iterator[Any]:
    """The engine; afterwards everything must be given back and nobody locked out."""
    yield built
    built.executor.faults = lambda stage, plan: None
    while built.has_unfinished:
        built.step()
    built.check_integrity()
    load = built.load()
    assert load.num_free_pages == load.num_total_pages
    assert load.num_running == load.num_waiting == 0
    assert not built.core.recovery._suspects.is_trying
    built.core.recovery.quarantine = quarantine.Quarantine()
    built.core.recovery._broke_once.clear()


def submit(engine: Any, prompt: list[int], name: str, params: SamplingParams = PARAMS) -> None:
    engine.submit(engine.inputs.process(name, prompt, params, now_s=engine.clock.now_s()))


def run(engine: Any, given: list[list[int]], params: SamplingParams = PARAMS) -> dict[str, Any]:
    """Every prompt's last output; each must end once, and no stream take a token back."""
    for index, prompt in enumerate(given):
        submit(engine, prompt, f"r{index}", params)
    last: dict[str, Any] = {}
    for _ in range(5000):
        for output in engine.step():
            before = last.get(output.request_id)
            if before is not None:
                assert not before.finished, "an output after the last"
                told = before.outputs[0].token_ids
                assert output.outputs[0].token_ids[: len(told)] == told
            last[output.request_id] = output
        if not engine.has_unfinished:
            return last
    raise AssertionError("no end")


def tokens(outputs: dict[str, Any]) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


@pytest.fixture(scope="module")
def undisturbed(built: Any) -> dict[str, list[int]]:
    return tokens(run(built, prompts()))


def nth(stage: str, number: int) -> Callable[[str, StepPlan | None], None]:
    """Fails one stage, once, at its n-th turn."""
    seen = 0

    def fault(at: str, plan: StepPlan | None) -> None:
        nonlocal seen
        seen += at == stage
        if at == stage and seen == number:
            seen += 1
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    return fault


@pytest.mark.parametrize("stage", ["dispatch", "result", "poll"])
@pytest.mark.parametrize("number", [1, 2, 3, 7, 12])
def test_a_fault_that_comes_once_costs_nobody_anything(
    engine: Any, undisturbed: dict[str, list[int]], stage: str, number: int
) -> None:
    recoveries = engine.core.recovery.num_recoveries
    engine.executor.faults = nth(stage, number)
    assert tokens(run(engine, prompts())) == undisturbed
    assert engine.core.recovery.num_recoveries == recoveries + 1


def test_a_fault_that_two_steps_tell_of_is_one(
    engine: Any, undisturbed: dict[str, list[int]]
) -> None:
    faults = [nth("dispatch", 3), nth("result", 2)]

    def fault(at: str, plan: StepPlan | None) -> None:
        for one in faults:
            one(at, plan)

    recoveries = engine.core.recovery.num_recoveries
    engine.executor.faults = fault
    # Alone: whoever fails alone twice is guilty.
    assert tokens(run(engine, prompts()[:1])) == {"r0": undisturbed["r0"]}
    assert engine.core.recovery.num_recoveries == recoveries + 1


@pytest.mark.parametrize("stage", ["dispatch", "result"])
@pytest.mark.parametrize("when", ["at once", "when it decodes"])
def test_a_request_that_kills_its_steps_ends_and_no_other(
    engine: Any, undisturbed: dict[str, list[int]], stage: str, when: str
) -> None:
    def fault(at: str, plan: StepPlan | None) -> None:
        if at != stage or plan is None or "r2" not in ids_of(plan):
            return
        decodes = "r2" in [request.label for request in plan.decode_rows.requests]
        if when == "at once" or decodes:
            raise RuntimeError("INTERNAL: illegal address")

    engine.executor.faults = fault
    outputs = run(engine, prompts())
    bad = outputs.pop("r2")
    assert bad.outputs[0].finish_reason == "failed"
    assert isinstance(bad.error, QuarantinedError)
    assert "illegal address" in str(bad.error)
    good = {name: ids for name, ids in undisturbed.items() if name != "r2"}
    assert tokens(outputs) == good
    assert bad.outputs[0].token_ids == undisturbed["r2"][: len(bad.outputs[0].token_ids)]


def test_a_quarantined_prompt_is_refused_for_a_while_and_others_are_not(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(at: str, plan: StepPlan | None) -> None:
        if at == "dispatch" and plan is not None and ids_of(plan):
            raise RuntimeError("no")

    engine.executor.faults = fault
    assert isinstance(run(engine, [[50, 51]])["r0"].error, QuarantinedError)
    engine.executor.faults = lambda stage, plan: None
    with pytest.raises(QuarantinedError, match="refused"):
        submit(engine, [50, 51], "again")
    assert run(engine, [[50, 52]])["r0"].error is None
    later = engine.clock.now_s() + quarantine.QUARANTINE_S + 1
    monkeypatch.setattr(engine.clock, "now_s", lambda: later)
    assert run(engine, [[50, 51]])["r0"].error is None


def test_a_hundred_random_faults_leave_every_token_as_it_was(
    engine: Any, undisturbed: dict[str, list[int]]
) -> None:
    rng = random.Random(11)
    recoveries = engine.core.recovery.num_recoveries

    def fault(at: str, plan: StepPlan | None) -> None:
        if at in ("dispatch", "result", "poll") and rng.random() < 0.06:
            raise RuntimeError("bad luck")

    while engine.core.recovery.num_recoveries - recoveries < 100:
        engine.executor.faults = fault
        outputs = run(engine, prompts())
        for name, output in outputs.items():
            said = output.outputs[0].token_ids
            assert said == undisturbed[name][: len(said)]
            assert isinstance(output.error, StepFailedError) or said == undisturbed[name]
        engine.core.recovery.quarantine = quarantine.Quarantine()


@pytest.mark.parametrize("place", [0, 40, 79])
def test_numbers_that_are_not_finite_end_their_request_alone(
    engine: Any, undisturbed: dict[str, list[int]], place: int
) -> None:
    given = prompts()
    bad = [30 + i % 100 for i in range(80)]
    bad[place] = POISON
    outputs = run(engine, [*given, bad])
    error = outputs.pop("r6").error
    assert isinstance(error, QuarantinedError)
    assert "not finite" in str(error)
    assert tokens(outputs) == undisturbed


@pytest.mark.parametrize("length", [2, 17, 33, 41, 50])
def test_what_padding_reads_of_such_a_request_reaches_nobody(
    engine: Any, undisturbed: dict[str, list[int]], length: int
) -> None:
    """Padding behind a prompt attends to it, and its own keys and values go where all may look."""
    for index, prompt in enumerate(prompts()):
        submit(engine, prompt, f"r{index}")
    while engine.scheduler.num_running < 6:
        engine.step()
    last = {}
    submit(engine, [30 + i % 100 for i in range(length - 1)] + [POISON], "bad")
    while engine.has_unfinished:
        last |= {output.request_id: output for output in engine.step()}
    assert isinstance(last.pop("bad").error, QuarantinedError)
    assert tokens(last) == undisturbed


def test_a_decoded_token_that_is_not_finite_ends_its_request_after_the_good_ones(
    engine: Any, undisturbed: dict[str, list[int]]
) -> None:
    given = prompts()
    # The bias makes POISON the sixth token: its successor has no finite numbers.
    params = PARAMS.replace(logit_bias={POISON: 100.0})
    for index, prompt in enumerate(given):
        submit(engine, prompt, f"r{index}")
    submit(engine, [60, 61], "bad", params)
    last = {}
    while engine.has_unfinished:
        last |= {output.request_id: output for output in engine.step()}
    bad = last.pop("bad")
    assert isinstance(bad.error, QuarantinedError)
    assert bad.outputs[0].token_ids == [POISON]
    assert tokens(last) == undisturbed


@pytest.mark.parametrize("method", ["plan", "commit", "expire"])
@pytest.mark.parametrize("number", [1, 4, 9])
def test_a_bug_of_the_scheduler_costs_nobody_anything(
    engine: Any,
    undisturbed: dict[str, list[int]],
    method: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, seen = getattr(engine.scheduler, method), 0

    def buggy(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        result = whole(*args)  # what it did is done
        if seen == number:
            raise AssertionError("a bug")
        return result

    monkeypatch.setattr(engine.scheduler, method, buggy)
    bugs = engine.core.num_bugs
    assert tokens(run(engine, prompts())) == undisturbed
    assert engine.core.num_bugs == bugs + 1


def test_a_text_that_cannot_be_read_ends_its_request_alone(
    engine: Any, undisturbed: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = engine.outputs
    whole = processor._take

    def buggy(parent: Any, sequence: Any, item: Any) -> None:
        whole(parent, sequence, item)
        if item.request.label == "r1" and len(sequence.token_ids) > 3:
            raise UnicodeError("a bug")

    monkeypatch.setattr(processor, "_take", buggy)
    outputs = run(engine, prompts())
    bad = outputs.pop("r1")
    assert (bad.outputs[0].finish_reason, type(bad.error)) == ("failed", StepFailedError)
    assert tokens(outputs) == {k: v for k, v in undisturbed.items() if k != "r1"}


def test_sampled_requests_go_on_as_they_would_have(engine: Any) -> None:
    params = SamplingParams(
        temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, repetition_penalty=1.2,
        frequency_penalty=0.3,
    )  # fmt: skip
    want = tokens(run(engine, prompts(), params))
    engine.executor.faults = nth("result", 6)
    assert tokens(run(engine, prompts(), params)) == want


def test_requests_that_come_during_a_trial_wait_and_are_served(
    engine: Any, undisturbed: dict[str, list[int]]
) -> None:
    engine.executor.faults = nth("result", 2)
    given = prompts()
    for index, prompt in enumerate(given[:3]):
        submit(engine, prompt, f"r{index}")
    while not engine.core.recovery._suspects.is_trying:
        engine.step()
    for index, prompt in enumerate(given[3:], 3):
        submit(engine, prompt, f"r{index}")
    first = engine.scheduler.live_requests[0]
    assert first.label == "r0"
    engine.abort(first.request_id)  # one of those on trial leaves
    last = {}
    while engine.has_unfinished:
        last |= {output.request_id: output for output in engine.step()}
    assert last.pop("r0").outputs[0].finish_reason == "cancelled"
    assert tokens(last) == {k: v for k, v in undisturbed.items() if k != "r0"}


def test_a_device_that_comes_back_late_is_asked_again(
    engine: Any, undisturbed: dict[str, list[int]]
) -> None:
    num_resets = 0
    once = nth("result", 3)

    def fault(at: str, plan: StepPlan | None) -> None:
        nonlocal num_resets
        once(at, plan)
        num_resets += at == "reset"
        if at == "reset" and num_resets < 3:
            raise RuntimeError("out of memory")

    engine.executor.faults = fault
    assert tokens(run(engine, prompts())) == undisturbed
    assert num_resets == 3


def test_a_device_that_never_comes_back_breaks_the_engine(engine: Any) -> None:
    def fault(at: str, plan: StepPlan | None) -> None:
        if at in ("result", "reset"):
            raise RuntimeError("the device fell off the bus")

    engine.executor.faults = fault
    submit(engine, [40, 41], "lost")

    def several_turns() -> None:  # however many steps are on their way at once
        for _ in range(4):
            engine.step()

    with pytest.raises(RuntimeError, match="fell off"):
        several_turns()
    # Once it is there again, the same engine can serve on.
    engine.executor.faults = lambda stage, plan: None
    engine.executor.reset()
    assert not isinstance(run(engine, [[40, 42]])["r0"].error, OctavoError)
