"""Preempted sequences that go to host memory and come back say what they would have said."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies import POLICIES
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policy import Policy
from tests.engine.alone import tokens_of

PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
TIGHT = {"num_kv_pages": 34, "host_kv_memory_bytes": 4 << 20}
"""A pool that eight sequences outgrow."""


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(16, 272) for _ in range(rng.randrange(20, 110))] for _ in range(16)]


def tokens(llm: Any) -> list[list[int]]:
    return tokens_of(llm, prompts(), PARAMS)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """The model's path: of keys and values, unless a test asks for another."""
    return str(request.getfixturevalue(getattr(request, "param", "tiny_model")))


@pytest.fixture
def undisturbed(make_llm: Callable[..., Any], model: str) -> list[list[int]]:
    llm = make_llm(model=model)
    found = tokens(llm)
    assert llm.engine.load().num_preemptions == 0
    return found


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], str]:
    """Adds "fcfs" with its choice between swap and recompute taken; gives its name."""

    def add(swaps: bool) -> str:
        def make(parameters: Parameters) -> Policy:
            whole = POLICIES["fcfs"](parameters)
            return dataclasses.replace(whole, swap_or_recompute=lambda snapshot, victim: swaps)

        monkeypatch.setitem(POLICIES, "fcfs-forced", make)
        return "fcfs-forced"

    return add


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tiny_model", {}),
        ("tiny_latents", {}),
        ("tiny_latents", {"tensor_parallel_size": 2}),
    ],
    indirect=["model"],
    ids=["keys and values", "latents", "latents on two devices"],
)
def test_swapped_sequences_go_on_as_if_nothing_had_happened(
    make_llm: Callable[..., Any],
    undisturbed: list[list[int]],
    policy: Callable[[bool], str],
    model: str,
    changes: dict[str, Any],
) -> None:
    llm = make_llm(model=model, **TIGHT, scheduling_policy=policy(True), **changes)
    assert tokens(llm) == undisturbed
    load = llm.engine.scheduler.load()
    assert load.num_swaps > 0
    assert load.num_recomputes == 0


def test_recomputed_sequences_go_on_as_if_nothing_had_happened(
    make_llm: Callable[..., Any], undisturbed: list[list[int]], policy: Callable[[bool], str]
) -> None:
    llm = make_llm(**TIGHT, scheduling_policy=policy(False))
    assert tokens(llm) == undisturbed
    load = llm.engine.scheduler.load()
    assert load.num_recomputes > 0
    assert load.num_swaps == 0


@pytest.mark.parametrize(("page_copy_s", "swaps"), [(1e-9, True), (1e3, False)])
def test_the_cheaper_way_is_chosen_by_measured_cost(
    make_llm: Callable[..., Any],
    undisturbed: list[list[int]],
    page_copy_s: float,
    swaps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What copies really take on a busy machine would make it dearer to swap than to compute again.
    for name in ("observe_copy", "observe_timed_copy"):
        monkeypatch.setattr(Forecast, name, lambda self, num_pages, seconds: None)
    llm = make_llm(**TIGHT)
    llm.engine.scheduler.forecast.page_copy_s = page_copy_s
    assert tokens(llm) == undisturbed
    load = llm.engine.scheduler.load()
    assert load.num_preemptions > 0
    assert (load.num_swaps > 0) is swaps
    assert (load.num_recomputes > 0) is not swaps
    assert (load.num_swapped_tokens > 0) is (load.swap_cost_s > 0) is swaps
    assert (load.num_recomputed_tokens > 0) is (load.recompute_cost_s > 0) is not swaps


@pytest.mark.parametrize("half", ["_store", "_load"])
def test_a_fault_while_copying_loses_no_request(
    make_llm: Callable[..., Any],
    undisturbed: list[list[int]],
    policy: Callable[[bool], str],
    half: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm(**TIGHT, scheduling_policy=policy(True))
    copier = llm.engine.executor._copier
    whole, calls = getattr(copier, half), []

    def faulty(*args: Any) -> Any:
        calls.append(args)
        if len(calls) % 2:
            raise OSError("the copy failed")
        return whole(*args)

    monkeypatch.setattr(copier, half, faulty)
    assert tokens(llm) == undisturbed
    assert len(calls) > 1
