"""`LLM`: results as users expect them, and bad input refused without harm."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.engine_arguments import engine_config
from octavo.engine.errors import (
    EngineDeadError,
    InvalidConfigError,
    InvalidRequestError,
    QuarantinedError,
)
from octavo.engine.execution.sampling.logits import set_masks, set_row
from octavo.engine.input.input_processor import apart_from_salt
from octavo.engine.process.held_interrupts import held_interrupts
from octavo.engine.sampling_defaults import NO_DEFAULTS
from octavo.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Any) -> Any:
    from octavo import LLM

    llm = LLM(
        str(tiny_model),
        progress=False,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        fail_on_compile=True,
    )
    yield llm
    llm.engine.check_integrity()
    assert llm.engine.load().num_running == 0


def test_results_come_in_input_order(llm: Any) -> None:
    params = [GREEDY.replace(max_tokens=n) for n in (30, 1, 12, 5)]
    outputs = llm.generate(["a", "bb", "ccc", [40, 41]], params, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["a", "bb", "ccc", None]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [30, 1, 12, 5]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert [o.outputs[0].text for o in outputs[:3]] == [
        llm.tokenizer.decode(o.outputs[0].token_ids) for o in outputs[:3]
    ]


def test_the_end_of_a_with_statement_closes_it(tiny_model: Any, monkeypatch: Any) -> None:
    from octavo import LLM

    closed = []
    with LLM(str(tiny_model), progress=False, max_num_seqs=2, warm_up="coarse") as llm:
        close = llm.engine.close
        monkeypatch.setattr(llm.engine, "close", lambda: closed.append(close()))
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished
        assert not closed
    assert closed == [None]


def test_one_list_of_ids_is_one_prompt(llm: Any) -> None:
    outputs = llm.generate([30, 31, 32], GREEDY, use_tqdm=False)
    assert len(outputs) == 1
    assert outputs[0].prompt_token_ids == [30, 31, 32]


def test_prompts_may_be_a_generator_or_arrays(llm: Any) -> None:
    ids = np.array([[30, 31], [32, 33]])
    listed = llm.generate(["bb", [30, 31], [32, 33]], GREEDY, use_tqdm=False)
    texts = [output.outputs[0].text for output in listed]
    lazy = llm.generate((each for each in ["bb", ids[0], ids[1]]), GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in lazy] == texts
    named = {"prompt_token_ids": ids[0]}
    numbers = ([*ids[0]], [30, ids[0, 1]], [[30, ids[0, 1]]], [[ids[0, 0], 31]])
    alike = [(each, texts[1:2]) for each in (ids[0], jnp.asarray(ids[0]), named, *numbers)]
    for given, wanted in ((ids, texts[1:]), *alike):
        outputs = llm.generate(given, GREEDY, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == wanted


def test_parameters_may_be_numbers_of_numpys_and_jaxs() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=jnp.int32(4), seed=np.uint8(5),
        stop_token_ids=np.array([6]), allowed_token_ids=[np.int32(7), 8],
        logit_bias={np.int64(9): np.float32(1.5)},
    )  # fmt: skip
    assert given == SamplingParams(
        temperature=0.5, top_k=3, max_tokens=4, seed=5, stop_token_ids=(6,),
        allowed_token_ids=(7, 8), logit_bias={9: 1.5},
    )  # fmt: skip
    with pytest.raises(InvalidRequestError, match=r"top_k = 1[.]5 is not allowed: an integer"):
        SamplingParams(top_k=np.float32(1.5))
    with pytest.raises(InvalidRequestError, match="temperature = nan is not"):
        SamplingParams(temperature=np.float64("nan"))


def test_calls_of_several_threads_take_turns(llm: Any) -> None:
    params = GREEDY.replace(max_tokens=40)
    prompts = [f"thread {index}" for index in range(8)]

    def generate(prompt: str) -> str:
        text: str = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
        return text

    alone, before = [generate(prompt) for prompt in prompts], llm.engine.load()
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert [*threads.map(generate, prompts)] == alone
    assert llm.engine.load().num_step_failures == before.num_step_failures


def test_prompts_may_come_by_name(llm: Any) -> None:
    named = [{"prompt": "bb"}, {"prompt_token_ids": [30, 31, 32]}]
    by_name = llm.generate(named, GREEDY, use_tqdm=False)
    plain = llm.generate(["bb", [30, 31, 32]], GREEDY, use_tqdm=False)
    alone = llm.generate(named[0], GREEDY, use_tqdm=False)
    said = [[(o.prompt, o.outputs[0].token_ids) for o in each] for each in (by_name, plain, alone)]
    assert said[0] == said[1]
    assert said[0][:1] == said[2]


def test_ids_go_before_the_text_that_they_are_of(llm: Any) -> None:
    both = {"prompt": "bb", "prompt_token_ids": [30, 31, 32], "multi_modal_data": None}
    (output,) = llm.generate(both, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [30, 31, 32]
    for named in ({}, {"prompt_token_ids": "bb"}, {"prompt": [3]}, {"prompt": "b", "text": "c"}):
        with pytest.raises(InvalidRequestError, match="prompt"):
            llm.generate(named, GREEDY, use_tqdm=False)


def test_a_prompt_may_have_a_salt_of_its_own(llm: Any) -> None:
    ids = [40 + k % 7 for k in range(100)]

    def num_cached(salt: str | None) -> int:
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        return int(output.num_cached_tokens)

    salts = ["mine", "mine", "yours", None, None]
    assert [num_cached(salt) > 0 for salt in salts] == [False, True, False, False, True]
    for call in (llm.generate, llm.encode):
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            call([{"prompt": "b", "cache_salt": 3}])
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        apart_from_salt({"prompt": "b", "cache_salt": "mine"}, "yours")


def test_a_closed_llm_says_so(make_llm: Callable[..., Any]) -> None:
    with make_llm() as llm:
        assert llm.generate("a", GREEDY, use_tqdm=False)
    for call in (lambda: llm.generate("a"), lambda: llm.sleep(), lambda: llm.reset_prefix_cache()):
        with pytest.raises(EngineDeadError, match="was closed"):
            call()
    llm.close()


def test_an_llm_from_before_a_fork_says_so(llm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(EngineDeadError, match="before a fork"):
        llm.generate("a")


@pytest.fixture
def python_interrupts() -> Iterator[None]:
    """Ctrl-C means what it means in Python: what a shell begins in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
def test_an_interrupt_in_a_step_waits_for_its_end(llm: Any, monkeypatch: Any) -> None:
    executor, core = llm.engine.executor, llm.engine.core
    num_recoveries = core.recovery.num_recoveries
    want = llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    run_step = executor.run_step

    def interrupted(*args: Any) -> Any:
        output = run_step(*args)
        signal.raise_signal(signal.SIGINT)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(executor, "run_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY.replace(max_tokens=1), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == want
    assert core.recovery.num_recoveries == num_recoveries


@pytest.mark.usefixtures("python_interrupts")
def test_a_second_interrupt_is_not_held_back() -> None:
    def interrupt_twice() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # the step may never end
            raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_parameters_may_be_written_as_for_vllm() -> None:
    params = SamplingParams(seed=-1, top_k=-1)
    assert (params.seed, params.top_k) == (None, 0)
    assert params.clone() == params
    with pytest.raises(InvalidRequestError, match="seed = -2"):
        SamplingParams(seed=-2)


def test_n_completions_differ_and_share_the_prompt(llm: Any) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=16, ignore_eos=True)
    (output,) = llm.generate("x" * 40, params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    alone = llm.generate("x" * 40, params.replace(n=1, seed=5), use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == output.outputs[2].token_ids


def test_n_completions_compute_their_prompt_once(llm: Any) -> None:
    prompt = [40 + index % 50 for index in range(100)]
    params = SamplingParams(n=4, seed=3, max_tokens=8, ignore_eos=True)
    scheduler, page_size = llm.engine.scheduler, llm.engine.scheduler.limits.page_size
    before = scheduler.load().num_planned_prefill_tokens
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    computed = scheduler.load().num_planned_prefill_tokens - before
    num_shared = (len(prompt) - 1) // page_size * page_size
    assert computed == len(prompt) + 3 * (len(prompt) - num_shared)
    for index, completion in enumerate(output.outputs):
        scheduler.flush_prefixes()  # the same, all of it computed
        one = params.replace(n=1, seed=3 + index)
        (alone,) = llm.generate(prompt, one, use_tqdm=False)
        assert alone.num_cached_tokens == 0
        assert alone.outputs[0].token_ids == completion.token_ids


def test_a_stop_token_ends_the_sequence_and_is_its_last(llm: Any) -> None:
    free = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    ended = llm.generate("hello", GREEDY.replace(stop_token_ids=[stop]), use_tqdm=False)[0]
    assert ended.outputs[0].token_ids == free.token_ids[: first + 1]
    assert ended.outputs[0].finish_reason == "stop"
    assert ended.outputs[0].stop_reason == stop
    assert ended.outputs[0].text == llm.tokenizer.decode(free.token_ids[:first])


def test_min_tokens_puts_a_stop_off(llm: Any) -> None:
    free = llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0]
    params = GREEDY.replace(stop_token_ids=[free.token_ids[0]], min_tokens=5)
    late = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert len(late.token_ids) >= 5
    assert free.token_ids[0] not in late.token_ids[:5]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(llm: Any, include: bool) -> None:
    free = llm.generate("stop me", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = free.text[3:5]
    cut = free.text.index(stop)
    params = GREEDY.replace(stop=stop, include_stop_str_in_output=include)
    output = llm.generate("stop me", params, use_tqdm=False)[0].outputs[0]
    assert output.text == free.text[: cut + len(stop) if include else cut]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == free.token_ids[: len(output.token_ids)]


def test_logprobs_of_the_chosen_and_the_likeliest(llm: Any) -> None:
    params = GREEDY.replace(logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("some text", params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) == 3
        assert entry[token_id].rank == 1
        assert entry[token_id].logprob == max(item.logprob for item in entry.values())
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    total = sum(entry[token_id].logprob for token_id, entry in pairs)
    assert completion.cumulative_logprob == pytest.approx(total)
    prompt = output.prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert len(prompt) == len(output.prompt_token_ids)
    # What the prompt's last scored token would cost is what generating it would have cost.
    shorter = output.prompt_token_ids[:-1]
    again = llm.generate(shorter, GREEDY.replace(max_tokens=1, logprobs=20), use_tqdm=False)[
        0
    ].outputs[0]
    last = output.prompt_token_ids[-1]
    if last in again.logprobs[0]:
        assert prompt[-1][last].logprob == pytest.approx(again.logprobs[0][last].logprob, abs=1e-4)


def test_a_bias_forces_and_an_allow_list_confines(llm: Any) -> None:
    forced = llm.generate("a", GREEDY.replace(logit_bias={77: 100.0}), use_tqdm=False)[0]
    assert set(forced.outputs[0].token_ids) == {77}
    allowed = llm.generate("a", GREEDY.replace(allowed_token_ids=[50, 60]), use_tqdm=False)[0]
    assert set(allowed.outputs[0].token_ids) <= {50, 60}


def test_rows_with_values_of_their_own_are_set_without_compiling(llm: Any) -> None:
    before = set_row._cache_size(), set_masks._cache_size()
    biased = GREEDY.replace(logit_bias={77: 100.0}, presence_penalty=1.0)
    limited = GREEDY.replace(ignore_eos=False, structured_outputs={"choice": ["yes", "no"]})
    llm.generate(["a", "b", "c"], [biased, limited, biased], use_tqdm=False)
    assert (set_row._cache_size(), set_masks._cache_size()) == before


def test_bad_words_never_appear(llm: Any) -> None:
    free = llm.generate("words", GREEDY, use_tqdm=False)[0].outputs[0].text
    banned = free[2:4]
    text = llm.generate("words", GREEDY.replace(bad_words=[banned]), use_tqdm=False)[0]
    assert banned not in text.outputs[0].text


def test_a_presence_penalty_keeps_tokens_from_coming_back(llm: Any) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=50.0
    )
    free = llm.generate("r", GREEDY.replace(max_tokens=40), use_tqdm=False)[0].outputs[0]
    penalized = llm.generate("r", params, use_tqdm=False)[0].outputs[0]
    assert len(set(penalized.token_ids)) > len(set(free.token_ids))


def test_chat_uses_the_models_template(llm: Any) -> None:
    outputs = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    assert llm.tokenizer.decode(outputs[0].prompt_token_ids) == "[user]hi[assistant]"
    two = llm.chat([[{"role": "user", "content": w}] for w in ("a", "b")], GREEDY, use_tqdm=False)
    assert len(two) == 2


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty prompt": ("", {}, "prompt"),
    "no ids": ([[]], {}, "prompt_token_ids"),
    "an id beyond the vocabulary": ([[5, 272]], {}, "prompt_token_ids"),
    "a negative id": ([[-1]], {}, "prompt_token_ids"),
    "a prompt beyond the context": ([[20] * 512], {}, "prompt"),
    "prompt and output beyond the context": ([[20] * 500], {"max_tokens": 13}, "max_tokens"),
    "half a surrogate pair": ("\ud800", {}, "prompt"),
    "bytes": (b"abc", {}, "prompt"),
    "a set, which has no order": ({5, 6}, {}, "prompts"),
    "an unknown name": ({"text": "a"}, {}, "prompt"),
    "ids under the text's name": ({"prompt": [30]}, {}, "prompt"),
    "text under the ids' name": ([{"prompt_token_ids": "a"}], {}, "prompt_token_ids"),
    "a stop id beyond the vocabulary": ("a", {"stop_token_ids": [300]}, "stop_token_ids"),
    "a biased id beyond the vocabulary": ("a", {"logit_bias": {300: 1.0}}, "logit_bias"),
    "an allowed id beyond the vocabulary": ("a", {"allowed_token_ids": [300]}, "allowed_token_ids"),
    "a bad word of too many tokens": ("a", {"bad_words": ["qzx7" * 60]}, "bad_words"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name_and_the_engine_serves_on(llm: Any, case: str) -> None:
    prompt, changes, field = REFUSED[case]
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt, GREEDY.replace(**changes), use_tqdm=False)
    assert caught.value.field.startswith(field)
    assert str(caught.value.allowed)
    assert len(llm.generate("still here", GREEDY, use_tqdm=False)) == 1


def test_arguments_of_vllm_that_ask_for_nothing_are_taken(llm: Any) -> None:
    plain = llm.generate("bb", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    nothing = {"lora_request": None, "prompt_adapter_request": None, "tokenization_kwargs": {}}
    for prompt in ("bb", {"prompt": "bb", "multi_modal_data": None}):
        output = llm.generate(prompt, GREEDY, use_tqdm=False, **nothing)[0]
        assert output.outputs[0].token_ids == plain
    message = [{"role": "user", "content": "x"}]
    llm.chat(message, GREEDY, use_tqdm=False, **nothing, tools=None)
    for method, prompt in ((llm.generate, "bb"), (llm.chat, message)):
        with pytest.raises(InvalidRequestError, match="lora_request"):
            method(prompt, GREEDY, lora_request=object())
        with pytest.raises(TypeError, match="'use_tdqm'"):
            method(prompt, GREEDY, use_tdqm=False)


def test_one_bad_prompt_of_a_batch_begins_nothing(llm: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", ""], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_a_failed_step_is_tried_again_and_nobody_notices(llm: Any, monkeypatch: Any) -> None:
    want = llm.generate("survivor", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    executor, calls = llm.engine.executor, []
    dispatch = executor.dispatch

    def fail_once(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 2:
            raise RuntimeError("the device fell over")
        return dispatch(plan)

    monkeypatch.setattr(executor, "dispatch", fail_once)
    (output,) = llm.generate("survivor", GREEDY, use_tqdm=False)
    assert output.error is None
    assert output.outputs[0].token_ids == want


def test_a_step_that_always_fails_ends_its_requests_as_failed(llm: Any, monkeypatch: Any) -> None:
    def fail(plan: Any) -> Any:
        raise RuntimeError("the device fell over")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "dispatch", fail)
        (output,) = llm.generate("victim", GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "failed"
    assert isinstance(output.error, QuarantinedError)
    assert llm.generate("survivor", GREEDY, use_tqdm=False)[0].error is None


def test_an_unknown_engine_argument_is_refused_by_name(tiny_model: Any) -> None:
    from octavo import LLM

    with pytest.raises(InvalidConfigError, match="max_num_sequences"):
        LLM(str(tiny_model), max_num_sequences=4)
    with pytest.raises(InvalidConfigError, match="trust_remote_code"):
        LLM(str(tiny_model), trust_remote_code=True)
    with pytest.raises(InvalidConfigError, match="tensor_parallel_size = 64"):
        LLM(str(tiny_model), tensor_parallel_size=64)
    with pytest.raises(InvalidConfigError, match="max_model_len = 513"):
        LLM(str(tiny_model), max_model_len=513)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("packed_weights", "yes", "true or false"),
        ("overlap", 1, "true or false"),
        ("num_decode_steps", "4", "an integer"),
        ("max_num_seqs", True, "an integer"),
        ("max_model_len", 64.0, "an integer or None"),
        ("watermark", "1%", "a number"),
        ("scheduling_policy", None, "text"),
        ("warm_up", 3, "text"),
    ],
)
def test_an_engine_argument_of_another_type_is_refused_by_name(
    tiny_model: Any, name: str, value: object, allowed: str
) -> None:
    from octavo import LLM

    with pytest.raises(InvalidConfigError) as refused:
        LLM(tiny_model, **{name: value})
    assert str(refused.value).startswith(f"{name} = {value!r} is not allowed")
    assert str(refused.value).endswith(allowed)


def test_a_model_may_be_given_as_a_path(tiny_model: Any) -> None:
    config = engine_config(Path(tiny_model), {"tokenizer": Path(tiny_model), "watermark": 0})
    assert config.model == config.tokenizer == str(tiny_model)


def test_a_request_that_can_never_fit_the_pool_is_refused(make_llm: Callable[..., Any]) -> None:
    llm = make_llm(num_kv_pages=4, block_size=16, max_num_seqs=2)
    with pytest.raises(InvalidRequestError):
        llm.generate([[20] * 60], GREEDY, use_tqdm=False)
    assert len(llm.generate([[20] * 20], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize("params", [{"max_tokens": 3}, {}, "greedy", 3, [{"max_tokens": 3}]])
def test_what_is_no_sampling_params_is_refused_by_name(llm: Any, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"sampling_params = .*: a SamplingParams, or"):
        llm.generate("a", params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"sampling_params = .*: a SamplingParams, or"):
        llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"sampling_params = .*: a SamplingParams"):
        NO_DEFAULTS.of(params)  # as AsyncEngine.generate takes them


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidConfigError, match=r"max_model_length.*did you mean max_model_len"):
        engine_config(None, {"max_model_length": 3})
