"""Models with recurrent layers, served as any other: their states lie in rows, and must follow
their sequences through everything that befalls a row."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.state import recurrent_bytes
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.step_plan import StepPlan
from octavo.models.blocks import state_rows
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.gated_delta import GatedDelta
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mamba2 import Mamba2
from octavo.models.blocks.mixers import Mixer, ParallelMixers, Recurrent
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.blocks.router import Router
from octavo.models.blocks.short_conv import ShortConv
from octavo.models.config import ModelConfig
from octavo.models.config_dict import config_from_dict, config_to_dict
from octavo.models.rope import Rope
from tests.engine.alone import (
    ALONE,
    check_variety,
    draw_weights,
    one_by_one,
    save_model,
    tokens_of,
)

VOCAB, HIDDEN, NUM_TOKENS = 272, 32, 24
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
MIXERS: dict[str, Recurrent] = {
    "short_conv": ShortConv(size=HIDDEN, width=4, bias=True),
    "gated_delta": GatedDelta(
        num_key_heads=4,
        num_value_heads=8,
        key_size=8,
        value_size=12,
        width=4,
        eps=1e-6,
        by_key_head=False,
    ),
    "mamba2": Mamba2(
        num_heads=8,
        num_groups=1,
        head_size=8,
        state_size=12,
        width=4,
        eps=1e-5,
        scales=(0.8, 1.2, 0.9, 1.1, 0.7),
    ),
}
EXPERTS = Experts(
    router=Router(num_experts=8, num_chosen=2),
    intermediate_size=24,
    activation="relu2",
    gated=False,
    shared_size=24,
)
FORM = "ab[0-9]{4}cdef[0-9]{5}z"
"""Forces tokens at its beginning, between tokens that are chosen, and at its end."""
DIGITS = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs={"regex": FORM})


def config_of(kind: str) -> ModelConfig:
    norms, mlp = Norms(norm=RMSNorm(eps=1e-5)), MLP(intermediate_size=64)
    attention = Attention(
        num_heads=8, num_kv_heads=4, head_dim=8, rope=Rope(fraction=0.5), output_gate=True
    )
    mixer = MIXERS[kind]
    # Two caches in the last layer, as in each of Falcon-H1's.
    both = ParallelMixers(
        attention=dataclasses.replace(attention, output_gate=False),
        recurrent=mixer,
        attention_scale=0.9,
        recurrent_scale=0.7,
    )
    mixers: tuple[Mixer, ...] = (mixer, attention, both)
    layers = [LayerSpec(mixer=each, feed_forward=mlp, norms=norms) for each in mixers]
    if kind == "mamba2":  # as in Nemotron-H: parts of the first layer by themselves, and no gates
        plain = MLP(intermediate_size=64, activation="relu2", gated=False)
        first = [
            LayerSpec(mixer=mixer, feed_forward=None, norms=norms),
            LayerSpec(mixer=None, feed_forward=plain, norms=norms),
        ]
        layers = [*first, *layers[1:], LayerSpec(mixer=None, feed_forward=EXPERTS, norms=norms)]
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=tuple(layers),
        final_norm=norms.norm,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_ids=(1,),
    )


def make_weights(config: ModelConfig) -> Any:
    """Random weights whose greedy tokens neither repeat at once nor come near a tie."""
    weights = draw_weights(config)
    return {**weights, "embed": weights["embed"] * 10, "lm_head": weights["lm_head"] * 4}


# Each takes a minute of compiling and more: all of them are `make models`.
TRIED = MIXERS if os.environ.get("OCTAVO_MODELS") == "1" else ["gated_delta"]


@pytest.fixture(scope="module", params=TRIED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    path, config = tmp_path_factory.mktemp("recurrent") / kind, config_of(kind)
    return save_model(path, config, make_weights(config), tiny_model)


def prompts() -> list[list[int]]:
    """Prompts of 1 to 160 tokens; half of them share a beginning, of which a snapshot holds 64."""
    rng = random.Random(11)
    shared = [rng.randrange(16, VOCAB) for _ in range(70)]
    made = [[20]]
    for index in range(13):
        own = [rng.randrange(16, VOCAB) for _ in range(rng.randrange(1, 90))]
        made.append((shared if index % 2 else []) + own)
    return made


def generated(llm: Any) -> list[list[int]]:
    return tokens_of(llm, prompts(), PARAMS)


def new_llm(checkpoint: Path, **changes: Any) -> Any:
    from octavo import LLM

    return LLM(str(checkpoint), progress=False, **ALONE | changes)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    found = one_by_one(checkpoint, prompts(), PARAMS)
    check_variety(found)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {"warm_up": "full"},
    "chunks of 16": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
    "not overlapped": {"overlap": False},
    "one snapshot": {"max_num_seqs": 4, "num_state_snapshots": 1},
    "eight steps a dispatch": {"num_decode_steps": 8},
    "two devices": {"tensor_parallel_size": 2},
    "four devices": {"tensor_parallel_size": 4},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_the_request_alone(
    setting: str, make_llm: Callable[..., Any], checkpoint: Path, alone: list[list[int]]
) -> None:
    changes = {"num_state_snapshots": 32} | SETTINGS[setting]
    llm = make_llm(model=str(checkpoint), **changes)
    assert generated(llm) == alone
    assert generated(llm) == alone  # in rows that others have left, and from snapshots
    assert setting == "one snapshot" or llm.engine.load().prefix_cache_hits > 0
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_tokens_survive_preemption(
    num_decode_steps: int, make_llm: Callable[..., Any], checkpoint: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(
        model=str(checkpoint),
        num_kv_pages=16,
        block_size=16,
        watermark=0.0,
        num_state_snapshots=32,
        num_decode_steps=num_decode_steps,
        max_model_len=192,
    )
    assert generated(llm) == alone
    assert llm.engine.load().num_preemptions > 0
    assert llm.engine.load().prefix_cache_hits > 0


def test_a_conversation_goes_on_from_the_place_that_it_writes(
    make_llm: Callable[..., Any], checkpoint: Path
) -> None:
    llm = make_llm(model=str(checkpoint), **SETTINGS["one snapshot"])
    plain = new_llm(checkpoint)
    prompt = max(prompts(), key=len)
    for turn in range(4):
        answers = [
            each.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
            for each in (llm, plain)
        ]
        assert answers[0] == answers[1]
        prompt = [*prompt, *answers[0], *range(20, 60 + turn)]
    plain.close()
    # Each turn but the first found all but the last turn's answer and question.
    assert llm.engine.load().prefix_cache_hits >= 128 + 192 + 256


def test_a_row_that_begins_finds_nothing_of_the_one_before(
    checkpoint: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests hold because of it: without, they fail."""
    monkeypatch.setattr(state_rows, "begins", lambda start: jnp.zeros(start.shape, bool))
    llm = new_llm(checkpoint, max_num_batched_tokens=192)  # programs of its own
    found = [
        llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts()
    ]
    llm.close()
    assert found[0] == alone[0]
    assert found != alone


def test_aborted_rows_leave_nothing_behind(
    make_llm: Callable[..., Any], checkpoint: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(model=str(checkpoint), max_num_seqs=4, num_decode_steps=2)
    engine = llm.engine

    def submit(name: str, prompt: list[int]) -> None:
        engine.submit(engine.inputs.process(name, prompt, PARAMS, now_s=engine.clock.now_s()))

    rng, last = random.Random(2), {}
    for index, prompt in enumerate(prompts()):
        submit(f"gone{index}", prompts()[-index])
        for output in engine.step():
            last[output.request_id] = output
        submit(f"kept{index}", prompt)
        for _ in range(rng.randrange(1, 6)):
            for output in engine.step():
                last[output.request_id] = output
        engine.abort(f"gone{index}")
    while engine.has_unfinished:
        for output in engine.step():
            last[output.request_id] = output
    found = [last[f"kept{index}"].outputs[0].token_ids for index in range(len(prompts()))]
    assert found == alone


def test_a_grammar_s_rows_keep_their_states_while_they_sit_out(
    make_llm: Callable[..., Any], checkpoint: Path, alone: list[list[int]]
) -> None:
    """Beside rows without a grammar; forced tokens go on from the state as a short prompt does."""
    given = prompts()[1:7]
    texts = []
    for how in ("masked", "appended"):
        llm = make_llm(model=str(checkpoint), num_decode_steps=2)
        llm.engine.masks.looks_ahead = how == "appended"
        llm.engine.scheduler.appends_all_forced = how == "appended"
        params = [DIGITS if index % 2 else PARAMS for index in range(len(given))]
        outputs = llm.generate(given, params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
        assert texts[-1][::2] == alone[1:7:2]
        assert not llm.engine.core.recovery.num_recoveries
    assert texts[0] == texts[1]
    plain = new_llm(checkpoint)
    for index in range(1, len(given), 2):
        output = plain.generate(given[index], DIGITS, use_tqdm=False)[0].outputs[0]
        assert re.fullmatch(FORM, output.text)
        assert output.token_ids == texts[0][index]
    plain.close()


def test_a_failed_step_s_requests_go_on_from_their_tokens(
    make_llm: Callable[..., Any], checkpoint: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(model=str(checkpoint))
    executor, num_steps = llm.engine.core.executor, 0
    dispatch = executor.dispatch

    def failing(plan: StepPlan) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 9:
            raise RuntimeError("a step that was made to fail")
        return dispatch(plan)

    executor.dispatch = failing
    assert generated(llm) == alone
    assert num_steps > 9


def test_several_answers_each_compute_their_prompt(
    make_llm: Callable[..., Any], checkpoint: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(model=str(checkpoint))
    prompt = prompts()[4]
    params = SamplingParams(n=3, temperature=0.7, seed=5, max_tokens=16, ignore_eos=True)
    together = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    plain = new_llm(checkpoint)
    apart = plain.generate(prompt, params, use_tqdm=False)[0].outputs
    plain.close()
    assert [each.token_ids for each in together] == [each.token_ids for each in apart]
    assert len({tuple(each.token_ids) for each in together}) == 3


def test_weights_of_eight_bits(make_llm: Callable[..., Any], checkpoint: Path) -> None:
    expected = one_by_one(checkpoint, prompts(), PARAMS, quantization="int8")
    llm = make_llm(model=str(checkpoint), quantization="int8")
    same = [a == b for a, b in zip(generated(llm), expected, strict=True)]
    # Rounded weights bring ties nearer, and other programs sum in another order.
    assert sum(same) >= len(same) - 1


def test_what_pages_alone_cannot_do_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"host_kv_memory_bytes.*recurrent layers"):
        new_llm(checkpoint, host_kv_memory_bytes=1 << 20)


@pytest.mark.parametrize(
    ("changes", "num_slots"),
    [
        ({}, 5),
        ({"enable_prefix_caching": True}, 9),
        ({"enable_prefix_caching": True, "num_state_snapshots": 3}, 8),
    ],
)
def test_states_take_their_room_before_pages(
    changes: dict[str, Any], num_slots: int, kind: str, checkpoint: Path
) -> None:
    config, budget = config_of(kind), 1 << 20
    wanted = {"max_num_seqs": 4, "kv_cache_memory_bytes": budget, "max_model_len": 512}
    llm = new_llm(checkpoint, **wanted, **changes)
    state = llm.engine.executor._state
    taken = sum(each.nbytes for arrays in state.recurrent for each in arrays)
    assert (
        taken
        == recurrent_bytes(config, num_slots)
        == num_slots * sum(one.num_bytes for one in config.cache_layout().states)
    )
    assert taken + sum(each.nbytes for each in jax.tree.leaves(state.kv)) <= budget
    llm.close()


def test_snapshots_are_of_recurrent_layers_alone(tiny_model: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"num_state_snapshots = 3.*recurrent layers"):
        new_llm(tiny_model, num_state_snapshots=3)
    with pytest.raises(InvalidConfigError, match=r"num_state_snapshots = -1"):
        new_llm(tiny_model, num_state_snapshots=-1)


def test_a_stored_configuration_means_the_same_model(kind: str) -> None:
    config = dataclasses.replace(config_of(kind), final_norm_stored="model.embedding_norm")
    assert config_from_dict(config_to_dict(config)) == config
