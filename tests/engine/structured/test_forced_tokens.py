"""Texts are the same, whether the tokens that a grammar forces are appended together or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from octavo.engine.observability.event_log import start_log
from octavo.engine.simulation.replay import arrivals_from_log, replay
from octavo.engine.structured.turn_grammar import TurnGrammar

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "is_alive": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {"postal_code": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["postal_code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "is_alive", "address"],
    "additionalProperties": False,
}
THOUGHT = TurnGrammar(
    root='start: within "</think>" @content\nwithin[stop="!", max_tokens=5]: /(?s:.*)/\n'
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": PERSON, "disable_any_whitespace": True},
    {"json": PERSON},
    {"regex": "[ab]{2}-a long stretch that is forced-[ab]{2}"},
    {"choice": ["positively", "positive", "negative in every way that there is"]},
    {"regex": "(ab|cd) forced to the very end"},
    {"regex": "[ab]c[ab]d[ab]e[ab]"},
    {"regex": "answer: [0-9]{2}", "turn": THOUGHT},
)
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"n": 3},
    {"stop": "for"},
    {"stop": ["postal", "is"], "include_stop_str_in_output": True},
    {"stop_token_ids": [100, 110]},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"frequency_penalty": 1.2, "logit_bias": {100: 5.0, 113: -20.0}},
    {"logprobs": 2},
    {"max_tokens": 1},
    {"max_tokens": 13},
    {"max_tokens": 29, "prompt_logprobs": 1},
)


class Failing:
    """The real executor, but that one of its steps fails.

    Args:
        inner: what computes.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_left = 0
        """Steps until one fails; 0 for none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def result(self, handle: Any) -> Any:
        self.num_left -= self.num_left > 0
        if self.num_left == 1:
            raise RuntimeError("the device is gone")
        return self._inner.result(handle)


def make(tiny_model: Path, **changes: Any) -> LLM:
    llm = LLM(
        str(tiny_model), progress=False, max_num_seqs=8, max_num_batched_tokens=64, block_size=8,
        fail_on_compile=True, warm_up="coarse", watermark=0.0,
        **{"num_kv_pages": 24, "num_decode_steps": 4, **changes},
    )  # fmt: skip
    llm.engine.core.executor = Failing(llm.engine.core.executor)
    return llm


@pytest.fixture(scope="module", params=["roomy", "tight", "swapping", "in_turn"])
def llm(request: Any, tiny_model: Path) -> Iterator[LLM]:
    changes: dict[str, dict[str, Any]] = {
        "roomy": {"num_kv_pages": 64},
        "tight": {"scheduling_policy": "fcfs"},
        "swapping": {"host_kv_memory_bytes": 1 << 20},
        "in_turn": {"overlap": False, "scheduling_policy": "slo"},
    }
    llm = make(tiny_model, **changes[request.param])
    yield llm
    llm.close()
    llm.engine.check_integrity()
    load = llm.engine.load()
    assert load.num_free_pages == load.num_total_pages
    assert llm.engine.masks.num_live == load.compiles_after_ready == 0


def run(llm: LLM, how: str, prompts: list[str], params: list[SamplingParams]) -> Any:
    """Outputs, and how many tokens were appended without a step of their own."""
    appended: list[int] = []
    scheduler = llm.engine.scheduler
    llm.engine.masks.looks_ahead = how != "masked"
    scheduler.appends_all_forced = how == "appended"
    append = scheduler.append_forced

    def counted(offers: Any, now_s: float) -> Any:
        news = append(offers, now_s)
        appended.extend(len(item.new_token_ids) for item in news)
        return news

    scheduler.append_forced = counted
    try:
        return llm.generate(prompts, params, use_tqdm=False), sum(appended)
    finally:
        scheduler.append_forced = append


def told(outputs: list[RequestOutput]) -> list[Any]:
    for output in outputs:
        for each in output.outputs:
            assert each.logprobs is None or len(each.logprobs) == len(each.token_ids)
    return [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason)
        for output in outputs
        for each in output.outputs
    ]


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32), fails_at=st.sampled_from([0, 0, 4, 9]))
def test_texts_are_those_of_the_masks_alone(llm: LLM, seed: int, fails_at: int) -> None:
    rng = random.Random(seed)
    prompts, params = [], []
    for index in range(rng.randint(1, 7)):
        grammar = None if rng.random() < 0.2 else rng.choice(GRAMMARS)
        values = {"temperature": 1.0, "seed": index, "max_tokens": 70, **rng.choice(CHANGES)}
        if values["temperature"] == 0.0:
            del values["seed"]
        prompts.append("shared beginning"[: rng.randint(1, 16)] * rng.randint(1, 3))
        structured = None if grammar is None else StructuredOutputsParams(**grammar)
        params.append(SamplingParams(**values, structured_outputs=structured))
    masked, _ = run(llm, "masked", prompts, params)
    for how in ("appended", "priced"):
        llm.engine.core.executor.num_left = fails_at
        outputs, _ = run(llm, how, prompts, params)
        assert told(outputs) == told(masked), how
    llm.engine.core.executor.num_left = 0


def test_what_is_forced_takes_no_steps_and_the_run_replays(
    make_llm: Callable[..., Any], tmp_path: Path
) -> None:
    llm = make_llm(block_size=8, num_kv_pages=64, num_decode_steps=4)
    params = [
        SamplingParams(structured_outputs={**GRAMMARS[index]}, seed=index, max_tokens=90)
        for index in (0, 2, 3, 4)
    ]
    prompts, found = ["x" * 20] * 4, {}
    for how in ("masked", "appended"):
        path = tmp_path / f"{how}.jsonl"
        before = llm.engine.load().num_steps
        with start_log(llm.engine.core, llm.engine.config, path):
            outputs, num_appended = run(llm, how, prompts, params)
        llm.engine.core.log = None
        found[how] = (told(outputs), llm.engine.load().num_steps - before)
        if how == "masked":
            assert num_appended == 0
            assert replay(path).difference is None
            continue
        # Of each text's tokens more than half are forced: a byte is a token here.
        num_tokens = sum(len(each[0]) for each in found[how][0])
        assert num_appended > num_tokens // 2
        lengths = [arrival.num_output for arrival in arrivals_from_log(path)]
        assert lengths == [len(each[0]) for each in found[how][0]]
    assert found["appended"][0] == found["masked"][0]
    assert found["appended"][1] < found["masked"][1] / 2


def test_a_stream_gets_what_is_forced_in_order_and_once(make_llm: Callable[..., Any]) -> None:
    llm = make_llm(block_size=8, num_kv_pages=64, num_decode_steps=4)
    llm.engine.scheduler.appends_all_forced = True
    params = SamplingParams(structured_outputs=GRAMMARS[2], max_tokens=90, seed=1)
    submission = llm.engine.inputs.process("one", "x", params, now_s=llm.engine.clock.now_s())
    llm.engine.submit(submission)
    token_ids: list[int] = []
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            assert output.outputs[0].token_ids[: len(token_ids)] == token_ids
            token_ids = output.outputs[0].token_ids
    assert "a long stretch that is forced" in llm.tokenizer.decode(token_ids)
    assert output.metrics.first_token_s < output.metrics.last_token_s
