"""Layers with a window give back the pages behind it, and say what they said with all of them.

Models like Gemma 3 (five windows to one layer that sees all: six groups), Gemma 2 (one to one: two
groups) and Mistral (windows alone: one group), with sequences many times as long as the window. And
one like Llama 4, whose chunks are windows that begin anew.
What the engine says is compared with a decoder that keeps everything, one sequence at a time.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.policies import POLICIES
from octavo.engine.scheduler.step_plan import StepPlan
from octavo.models import decoder
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.blocks.router import Router
from octavo.models.config import ModelConfig
from octavo.models.parameters import declare, is_spec
from octavo.models.rope import Rope, Temperature
from tests.engine.alone import save_model

VOCAB, HIDDEN, NUM_TOKENS, LONGEST = 272, 32, 40, 160
WINDOW, PAGE = 20, 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
NORM = RMSNorm(eps=1e-5)
LETTERS = {
    "gemma 3": "WWWWWF",
    "gemma 2": "WFWF",
    "mistral": "WW",
    "gpt-oss": "wf",
    "llama 4": "CN",
}
"""A layer a letter: W has a window, C chunks, and N queries that grow in place of rotations. Small
ones have sinks, and experts with all that is odd."""
NUM_GROUPS = {"gemma 3": 6, "gemma 2": 2, "mistral": 1, "gpt-oss": 2, "llama 4": 2}
EXPERTS = Experts(
    router=Router(num_experts=8, num_chosen=2, bias=True),
    intermediate_size=24,
    gate_limit=1.5,
    bias=True,
)
SCALED = Experts(
    router=Router(
        num_experts=6, num_chosen=2, scores="sigmoid", normalizes=False, scales_inputs=True
    ),
    intermediate_size=24,
    shared_size=24,
)


def model_config(letters: str) -> ModelConfig:
    whole = Attention(num_heads=8, num_kv_heads=4, head_dim=8, rope=Rope())
    window = dataclasses.replace(whole, sliding_window=WINDOW, rope=Rope(theta=500.0))
    grows = Rope(fraction=0.0, temperature=Temperature(beta=0.3, span=16, first=1))
    mixers = {
        "W": window,
        "F": whole,
        "C": dataclasses.replace(
            whole, attention_chunk=WINDOW, qk_norm=RMSNorm(weighted=False), scale=1.0
        ),
        "N": dataclasses.replace(whole, rope=grows),
    }
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=tuple(
            LayerSpec(
                mixer=dataclasses.replace(mixers[letter.upper()], sinks=letter.islower()),
                feed_forward=feed_forward(letter),
                norms=Norms(norm=NORM),
            )
            for letter in letters
        ),
        final_norm=NORM,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_ids=(1,),
    )


def feed_forward(letter: str) -> Experts | MLP:
    if letter.islower():
        return EXPERTS
    return SCALED if letter in "CN" else MLP(intermediate_size=48)


def make_weights(config: ModelConfig) -> Any:
    """Random weights whose greedy tokens depend on what is attended to, and come near no tie."""
    rng = np.random.default_rng(0)
    gains = {"wqkv": 4.0, "w_down": 0.5, "router": 4.0, "experts_down": 2.0}

    def values(spec: Any) -> np.ndarray:
        if spec.init == "ones":
            return np.ones(spec.shape, spec.dtype)
        contracted = slice(spec.num_stacked, spec.num_stacked + (spec.num_inputs or 0))
        inputs = HIDDEN if spec.num_inputs is None else math.prod(spec.shape[contracted])
        return np.asarray(rng.standard_normal(spec.shape) / math.sqrt(inputs), spec.dtype)

    weights = jax.tree.map(values, declare(config, jnp.dtype("float32")), is_leaf=is_spec)
    layers = [
        {name: array * gains.get(name, 1.0) for name, array in layer.items()}
        for layer in weights["layers"]
    ]
    return {
        **weights,
        "layers": layers,
        "embed": weights["embed"] * 4,
        "lm_head": weights["lm_head"] * 8,
    }


def prompts() -> list[list[int]]:
    """Shorter than the window and many times as long; some begin alike."""
    rng = random.Random(11)
    shared = [rng.randrange(16, VOCAB) for _ in range(60)]
    lengths = (3, 90, 17, 40, 64, 8, 110, 33)
    return [
        (shared[:length] if index % 2 else [])
        + [rng.randrange(16, VOCAB) for _ in range(length - min(60, length) * (index % 2))]
        + [rng.randrange(16, VOCAB)]
        for index, length in enumerate(lengths)
    ]


def dense_tokens(config: ModelConfig, weights: Any) -> list[list[int]]:
    """Greedy tokens of each prompt alone, by attention over whole sequences."""
    positions = jnp.arange(LONGEST, dtype=jnp.int32)
    behind = positions[:, None] - positions[None]

    def attend(q: Any, k: Any, v: Any, cache: Any, attention: Any, sinks: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        keys, values = (jnp.repeat(each, group, axis=1) for each in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, keys, precision="highest") * attention.scale
        seen = (behind >= 0) & (behind < (attention.sliding_window or LONGEST))
        chunk = attention.attention_chunk or LONGEST
        seen &= positions[:, None] // chunk == positions[None] // chunk
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        odds = jax.nn.softmax(scores, axis=-1)[..., :LONGEST]
        return jnp.einsum("hqk,khd->qhd", odds, values, precision="highest"), cache

    @jax.jit
    def logits_at(ids: jax.Array, last: jax.Array) -> jax.Array:
        x = decoder.embed(weights, config, ids)
        caches = (None,) * len(config.layers)
        x, _ = decoder.run_layers(weights, config, x, positions, attend, caches)
        return decoder.unembed(weights, config, x[last][None])[0]

    texts = []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            padded = jnp.asarray([*ids, *[0] * (LONGEST - len(ids))], jnp.int32)
            logits = np.asarray(logits_at(padded, jnp.int32(len(ids) - 1)))
            second, first = np.sort(logits)[-2:]
            assert first - second > 5e-4, "a tie proves nothing"
            ids.append(int(logits.argmax()))
        texts.append(ids[len(prompt) :])
    assert all(len(set(text)) > NUM_TOKENS // 3 for text in texts), "a loop proves little"
    return texts


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    path: str
    expected: list[list[int]]


@pytest.fixture(scope="module", params=list(LETTERS))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Model:
    config = model_config(LETTERS[request.param])
    weights = make_weights(config)
    path = save_model(tmp_path_factory.mktemp("windows") / "model", config, weights, tiny_model)
    return Model(request.param, str(path), dense_tokens(config, jax.device_put(weights)))


class PoisonedExecutor:
    """The real executor; before each step, whatever no sequence holds is not a number.

    A page that is taken is zeroed again: what a page holds behind its sequence's last token is
    masked by nobody, and no page of a pool ever holds such numbers when it is taken, as a step that
    makes any ends with a fresh pool.
    """

    def __init__(self, llm: Any) -> None:
        self._inner, self._engine = llm.engine.core.executor, llm.engine
        self._poisoned: set[int] = set()
        self.most_poisoned = 0
        llm.engine.core.executor = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: StepPlan) -> Any:
        pool = self._engine.scheduler._kv.pool
        pool.flush()
        leaving = {page for copy in plan.copy_outs for page in copy.device_pages}
        free = {*pool._free} - leaving
        state = self._inner._state
        kv = state.kv
        for pages, value in ((self._poisoned - free, 0.0), (free - self._poisoned, np.nan)):
            if pages:
                ids = np.array(sorted(pages))
                kv = jax.tree.map(lambda x, ids=ids, value=value: x.at[ids].set(value), kv)
        self._inner._state = dataclasses.replace(state, kv=kv)
        self._poisoned = free
        self.most_poisoned = max(self.most_poisoned, len(free))
        return self._inner.dispatch(plan)

    def reset(self) -> None:
        self._inner.reset()
        self._poisoned.clear()


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16, "num_decode_steps": 1},
    "eight steps a dispatch": {"num_decode_steps": 8},
    "whole prompts": {
        "max_num_batched_tokens": 128,
        "enable_chunked_prefill": False,
        "overlap": False,
        "enable_prefix_caching": False,
    },
    "all programs": {"warm_up": "full", "max_num_batched_tokens": 48},
    "two devices": {"tensor_parallel_size": 2},
    "reference": {"attention_backend": "reference"},
}
FOR_ONE_MODEL = ("all programs", "two devices", "reference")
"""Settings that the model of six groups stands for alone: they compile for long. Over two devices
go those with experts, too."""


def generated(llm: Any, order: list[int] | None = None) -> list[list[int]]:
    wanted = prompts()
    outputs = llm.generate([wanted[i] for i in order or range(len(wanted))], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_a_decoder_that_keeps_everything(
    setting: str, make_llm: Callable[..., Any], model: Model
) -> None:
    goes_over_two = setting == "two devices" and model.name in ("gpt-oss", "llama 4")
    if setting in FOR_ONE_MODEL and NUM_GROUPS[model.name] < 6 and not goes_over_two:
        pytest.skip("the model of six groups stands for all")
    llm = make_llm(model=model.path, block_size=PAGE, **SETTINGS[setting])
    assert len(llm.engine.limits.windows) == NUM_GROUPS[model.name]
    poisoned = PoisonedExecutor(llm)
    assert generated(llm) == model.expected
    assert generated(llm) == model.expected  # whose beginnings come from the prefix cache
    assert poisoned.most_poisoned > 0


def test_prompts_one_by_one_find_each_others_beginnings_at_every_length(
    make_llm: Callable[..., Any], model: Model
) -> None:
    llm = make_llm(model=model.path, block_size=PAGE)
    PoisonedExecutor(llm)
    text, expected = prompts()[6], model.expected[6]
    whole = [*text, *expected]
    for length in [*range(1, len(whole), 7), len(text)]:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        output = llm.generate(whole[:length], params, use_tqdm=False)[0]
        at = length - len(text)
        if 0 <= at <= len(expected) - 4:
            assert output.outputs[0].token_ids == expected[at : at + 4]
    assert llm.engine.scheduler.load().prefix_hit_tokens > 0


@pytest.mark.parametrize("swaps", [False, True], ids=["recomputed", "swapped"])
def test_preempted_sequences_go_on_as_if_nothing_had_happened(
    swaps: bool, make_llm: Callable[..., Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced(parameters: Any) -> Any:
        whole = POLICIES["fcfs"](parameters)
        return dataclasses.replace(whole, swap_or_recompute=lambda snapshot, victim: swaps)

    monkeypatch.setitem(POLICIES, "fcfs-forced", forced)
    num_pages = {
        **dict.fromkeys(("gemma 2", "gpt-oss", "llama 4"), 50),
        "gemma 3": 90,
        "mistral": 14,
    }[model.name]
    llm = make_llm(
        model=model.path,
        block_size=PAGE,
        num_kv_pages=num_pages,
        host_kv_memory_bytes=4 << 20,
        scheduling_policy="fcfs-forced",
    )
    PoisonedExecutor(llm)
    assert generated(llm) == model.expected
    load = llm.engine.scheduler.load()
    assert (load.num_swaps if swaps else load.num_recomputes) > 0
    assert not (load.num_recomputes if swaps else load.num_swaps)


def test_sequences_go_on_after_a_step_that_failed(
    make_llm: Callable[..., Any], model: Model
) -> None:
    llm = make_llm(model=model.path, block_size=PAGE)
    executor = PoisonedExecutor(llm)
    numbers = faults_at(3, 11)
    dispatch = executor.dispatch

    def failing(plan: StepPlan) -> Any:
        if next(numbers):
            raise RuntimeError("on purpose")
        return dispatch(plan)

    executor.dispatch = failing  # type: ignore[method-assign]
    assert generated(llm) == model.expected
    assert llm.engine.core.recovery.num_recoveries == 2


def faults_at(*steps: int) -> Iterator[bool]:
    step = 0
    while True:
        yield step in steps
        step += 1


def test_a_decoding_sequence_holds_its_window_and_no_more(
    make_llm: Callable[..., Any], model: Model
) -> None:
    llm = make_llm(model=model.path, block_size=PAGE, max_num_seqs=1, num_decode_steps=1)
    scheduler, most, needs = llm.engine.scheduler, 0, llm.engine.limits.needs
    plan_step = scheduler.plan

    def planned(now_s: float) -> Any:
        nonlocal most
        plan = plan_step(now_s)
        for entry in scheduler._unapplied.rows:
            if entry.request.output_token_ids:
                # A page is taken by the plan and given back when it is applied.
                most = max(most, entry.pages.num_held - needs.held(entry.request.num_tokens))
        return plan

    scheduler.plan = planned
    prompt = prompts()[6]
    assert (
        llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids == (model.expected[6])
    )
    assert most <= needs.num_groups


def test_longer_sequences_than_the_pool_fit_where_all_layers_have_windows(
    make_llm: Callable[..., Any], model: Model
) -> None:
    if model.name != "mistral":
        pytest.skip("a layer that sees everything needs every page")
    num_pages = 1 + 8  # 64 tokens; the sequence has 151
    llm = make_llm(
        model=model.path, block_size=PAGE, num_kv_pages=num_pages, max_num_batched_tokens=16,
        max_num_seqs=1,
    )  # fmt: skip
    PoisonedExecutor(llm)
    assert generated(llm) == model.expected
