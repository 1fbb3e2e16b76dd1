"""In float32, greedy tokens do not depend on how a request was served: the first invariant."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.sampling_params import SamplingParams
from tests.engine.alone import one_by_one, tokens_of

NUM_PROMPTS = 32
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Prompts of 1 to 180 tokens; half of them share a beginning."""
    rng = random.Random(5)
    shared = [rng.randrange(16, 272) for _ in range(70)]
    made = []
    for index in range(NUM_PROMPTS):
        own = [rng.randrange(16, 272) for _ in range(rng.randrange(1, 110))]
        made.append((shared if index % 2 else []) + own)
    return made


def tokens(llm: Any, params: SamplingParams = PARAMS) -> list[list[int]]:
    return tokens_of(llm, prompts(), params)


def said_alone(model: Path) -> list[list[int]]:
    found = one_by_one(model, prompts(), PARAMS)
    assert len({tuple(ids) for ids in found}) == NUM_PROMPTS  # different prompts, different texts
    assert all(len(set(ids)) > 5 for ids in found)  # and no text that says one thing for ever
    return found


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[int]]:
    return said_alone(tiny_model)


OTHERS = {
    "tiny_experts": ["batched", "four devices"],
    "tiny_latents": [
        "batched",
        "chunks of 16",
        "eight steps a dispatch",
        "pages of 64",
        "two devices",
        "four devices",
    ],
}
"""Further models, and settings that matter to them: experts, and latents in place of keys."""


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest) -> tuple[str, Path, list[list[int]]]:
    path = request.getfixturevalue(request.param)
    return request.param, path, said_alone(path)


# All programs of a lattice serve "batched" and "whole prompts", the coarse ones alone the others.
SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {"max_num_seqs": 16, "max_num_batched_tokens": 64, "warm_up": "full"},
    "chunks of 16": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
    "whole prompts": {
        "max_num_batched_tokens": 256,
        "enable_chunked_prefill": False,
        "warm_up": "full",
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "programs as they come": {"max_num_seqs": 32, "warm_up": "early"},
    "coarse programs alone": {},
    "not overlapped": {"overlap": False},
    "one step a dispatch": {"num_decode_steps": 1},
    "eight steps a dispatch": {"num_decode_steps": 8, "max_num_seqs": 32},
    "pages of 64": {"block_size": 64},
    "two devices": {"tensor_parallel_size": 2},
    "four devices": {"tensor_parallel_size": 4},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_the_request_alone(
    setting: str, make_llm: Callable[..., Any], alone: list[list[int]]
) -> None:
    llm = make_llm(**SETTINGS[setting])
    assert tokens(llm) == alone
    if setting == "batched":
        assert llm.engine.load().prefix_cache_hits > 0
        assert tokens(llm) == alone  # again, now that every prompt is in the prefix cache


@pytest.mark.parametrize("setting", OTHERS["tiny_latents"])
def test_tokens_of_other_models_are_those_of_the_request_alone(
    setting: str, make_llm: Callable[..., Any], other: tuple[str, Path, list[list[int]]]
) -> None:
    name, path, alone = other
    if setting not in OTHERS[name]:
        pytest.skip("another model stands for all")
    llm = make_llm(model=str(path), **SETTINGS[setting] | {"warm_up": "coarse"})
    assert tokens(llm) == alone
    assert llm.engine.load().prefix_cache_hits > 0
    assert tokens(llm) == alone  # now that prompts are in the prefix cache


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_tokens_survive_preemption(
    overlap: bool, num_decode_steps: int, make_llm: Callable[..., Any], alone: list[list[int]]
) -> None:
    llm = make_llm(
        num_kv_pages=22,  # the longest request alone needs 14
        block_size=16,
        watermark=0.0,
        overlap=overlap,
        num_decode_steps=num_decode_steps,
        max_model_len=256,
    )
    assert tokens(llm) == alone
    assert llm.engine.load().num_preemptions > 0


def test_latents_survive_preemption(
    make_llm: Callable[..., Any], other: tuple[str, Path, list[list[int]]]
) -> None:
    name, path, alone = other
    if name != "tiny_latents":
        pytest.skip("pages of keys and values are preempted above")
    llm = make_llm(
        model=str(path), num_kv_pages=22, block_size=16, watermark=0.0, max_model_len=256
    )
    assert tokens(llm) == alone
    assert llm.engine.load().num_preemptions > 0


def test_sampled_tokens_depend_on_seed_and_position_only(make_llm: Callable[..., Any]) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
    batched = tokens(make_llm(max_num_seqs=32, num_decode_steps=4), params)
    llm = make_llm(num_decode_steps=1, overlap=False)
    alone = [
        llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        for prompt in prompts()[:8]
    ]
    assert batched[:8] == alone
    other = llm.generate(prompts()[0], params.replace(seed=12), use_tqdm=False)
    assert other[0].outputs[0].token_ids != alone[0]
