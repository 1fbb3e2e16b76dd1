"""Any combination of sampling parameters, in every weight variant: never a recovery, device and
host agree on every stop, and each request ends once, as its own parameters say."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from octavo.engine.errors import InvalidRequestError, NothingAllowedError
from octavo.engine.input.input_processor import Submission
from octavo.engine.request import Request
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import multiplies_bfloat16
from tests.engine.conftest import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    write_tiny_model,
)  # fmt: skip

EOS = 1
A = 16 + ord("A") - ord("!")
FEW = (0, EOS, A, A + 1, A + 2)
"""Few tokens, so that what allows, bans and stops meets."""
NUM_EXAMPLES = 8
"""With the profile of CI; others take a share of their own number."""
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None

ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"num_kv_pages": 100}),
    "plain, preempting by priority": (
        {}, {"scheduling_policy": "priority", "num_kv_pages": 18, "watermark": 0.0},
    ),
    "plain, swapping, one step at a time": (
        {},
        {"overlap": False, "num_decode_steps": 1, "num_kv_pages": 18, "watermark": 0.0,
         "host_kv_memory_bytes": 1 << 20},
    ),
    "int8": ({}, {"quantization": "int8", "kv_cache_dtype": "int8", "num_decode_steps": 2}),
    "int8-split": ({"int8_split": [1, 32]}, {"sliced_weights": True, "warm_up": "full"}),
    "bounded argmax": ({"bounded_argmax": [1, 32]}, {"screened_argmax": True, "warm_up": "full"}),
    "block-quantized": ({"block_quantized": 4}, {"packed_weights": True, "warm_up": "full"}),
}  # fmt: skip
"""By name: what a tuning table says, and engine arguments."""


def write_tiny_gguf(directory: Path, checkpoint: Path) -> Path:
    """The tiny model with its matrices in blocks of 32."""
    gguf = pytest.importorskip("gguf")
    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS)
    writer.add_token_list([f"<{token}>" for token in range(VOCAB)])
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    blocks = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            stem = f"blk.{layer}.{names[part]}"
        else:
            stem = names[stem]
        if tensor.ndim == 1:
            writer.add_tensor(f"{stem}.weight", tensor)
        else:
            data = gguf.quants.quantize(tensor, blocks)
            writer.add_tensor(f"{stem}.weight", data, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine
    from octavo.engine.execution.platform import kv_memory

    entry, changes = ENGINES[request.param]
    if entry and jax.default_backend() != "cpu":
        pytest.skip("products of few rows have these forms on a CPU alone")
    folder = tmp_path_factory.mktemp("variant")
    model = tiny_model
    if "bounded_argmax" in entry:
        if not multiplies_bfloat16():
            pytest.skip("this JAX multiplies bfloat16 slowly: no engine screens")
        model = write_tiny_model(tmp_path_factory.mktemp("tied"), is_tied=True)
    elif "block_quantized" in entry:
        model = write_tiny_gguf(folder, tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_TUNING_DIR", str(folder))
        patch.setattr(kv_memory, "available_memory_bytes", lambda: kv_memory.CPU_KV_BYTES * 8)
        row = {"dtype": "float32", "num_cores": tuning.num_cores(), "library": "ynnpack", **entry}
        tuning.write_table(folder / "mine.json", {"device": tuning.tuning_device()}, [], [row])
        tuning.forget_tables()
        plain = {"packed_weights": False, "sliced_weights": False, "screened_argmax": False}
        arguments: dict[str, Any] = {
            "model": str(model), "tokenizer": str(tiny_model), "max_num_seqs": 4, "block_size": 8,
            "max_num_batched_tokens": 32, "max_model_len": 96, "fail_on_compile": True,
            "warm_up": "coarse", "num_kv_pages": 64,
        }  # fmt: skip
        engine = Engine(EngineConfig(**arguments | plain | changes))
    executor = engine.executor
    shapes = executor.lattice.full
    assert any(executor.weights.variants.reads_bounds(s) for s in shapes) == (
        "bounded_argmax" in entry
    )
    assert any(executor.weights.variants.of(s) == "int8_split" for s in shapes) == (
        "int8_split" in entry
    )
    assert any(s.block_quantized for s in shapes) == ("block_quantized" in entry)
    yield engine
    engine.close()
    tuning.forget_tables()


def some(values: st.SearchStrategy[Any], default: Any) -> st.SearchStrategy[Any]:
    """The default in most requests."""
    return st.one_of(st.just(default), st.just(default), values)


few_ids = st.lists(st.sampled_from(FEW), min_size=1, max_size=4)
structured = st.sampled_from(
    [{"choice": ["yes", "no", "A"]}, {"regex": "[AB]{2,9}"}, {"json_object": True}]
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": some(st.integers(1, 3), 1),
    "presence_penalty": some(st.floats(-2, 2), 0.0),
    "frequency_penalty": some(st.floats(-2, 2), 0.0),
    "repetition_penalty": some(st.sampled_from((1e-4, 0.5, 1.3, 5.0, 1e4)), 1.0),
    "temperature": st.sampled_from((0.0, 0.0, 1e-3, 0.7, 1.0, 2.0)),
    "top_p": some(st.sampled_from((1e-6, 0.3, 0.9)), 1.0),
    "top_k": some(st.sampled_from((-1, 1, 3, 50, 2**31 - 1)), 0),
    "min_p": some(st.sampled_from((0.05, 0.5, 1.0)), 0.0),
    "seed": some(st.integers(0, 2**63 - 1), None),
    "stop": some(st.lists(st.sampled_from(["A", "AB", "BA", "\n", "AAAA"]), max_size=3), ()),
    "stop_token_ids": some(few_ids, ()),
    "ignore_eos": st.booleans(),
    "max_tokens": some(st.sampled_from((1, 2, 30, None)), 9),
    "min_tokens": some(st.sampled_from((1, 3, 9)), 0),
    "logprobs": some(st.sampled_from((0, 1, 5)), None),
    "prompt_logprobs": some(st.sampled_from((0, 2)), None),
    "logit_bias": some(
        st.dictionaries(st.sampled_from(FEW), st.sampled_from((-100.0, 5.0, 100.0))), None
    ),
    "allowed_token_ids": some(few_ids, None),
    "bad_words": some(
        st.lists(st.sampled_from(["A", "AA", "B", "AB", "ABA", "CCC"]), max_size=3), ()
    ),
    "structured_outputs": some(structured, None) if HAS_GRAMMARS else st.none(),
    "detokenize": some(st.just(False), True),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "output_kind": st.sampled_from(list(RequestOutputKind)),
}
requests = st.lists(
    st.tuples(
        st.lists(st.sampled_from((*FEW, 40, 90, 200)), min_size=1, max_size=45),
        st.fixed_dictionaries(FIELDS),
        st.sampled_from((0, 2, 3)),
        st.integers(0, 6),
    ),
    min_size=2,
    max_size=6,
)


def test_every_field_is_drawn() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == FIELDS.keys()


def run(
    engine: Any, drawn: list[tuple[list[int], dict[str, Any], int, int]]
) -> list[tuple[Submission, Any, list[list[int]]]]:
    """Submissions that were not refused, their last outputs, and the tokens they were told."""
    waiting = []
    for index, (prompt, fields, priority, turn) in enumerate(drawn):
        try:
            params = SamplingParams(**fields)
            submission = engine.inputs.process(
                f"r{index}", prompt, params, now_s=engine.clock.now_s(), priority=priority
            )
        except InvalidRequestError:
            continue
        waiting.append((turn, submission))
    given_in, num_turns = [submission for _, submission in waiting], 0
    last: dict[str, Any] = {}
    told: dict[str, list[list[int]]] = {}
    while waiting or engine.has_unfinished:
        for item in [item for item in waiting if item[0] <= num_turns]:
            waiting.remove(item)
            engine.submit(item[1])
        num_turns += 1
        assert num_turns < 5000, "no end"
        for output in engine.step():
            name = output.request_id
            assert name not in last or not last[name].finished, "an output after the last"
            last[name] = output
            so_far = told.setdefault(name, [[] for _ in output.outputs])
            is_delta = fields_of(output, given_in).output_kind is RequestOutputKind.DELTA
            for tokens, completion in zip(so_far, output.outputs, strict=True):
                tokens[:] = (tokens if is_delta else []) + list(completion.token_ids)
    assert len(last) == len(given_in)
    by_name = {f"r{index}": index for index in range(len(drawn))}
    found = sorted(last.items(), key=lambda item: by_name[item[0]])
    return [
        (submission, output, told[name])
        for submission, (name, output) in zip(given_in, found, strict=True)
    ]


def fields_of(output: Any, submissions: list[Submission]) -> SamplingParams:
    """The parameters of an output's request."""
    return next(s.params for s in submissions if s.request_id == output.engine_id)


def may_come(request: Request, so_far: list[int]) -> Callable[[int], bool]:
    """Which tokens a request's own parameters allow next; of a grammar this knows nothing."""
    params = request.sampling_params
    stops = set(request.stop_token_ids) if len(so_far) < params.min_tokens else set()
    allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
    banned = {
        word[-1]
        for word in request.bad_word_token_ids
        if len(word) == 1 or so_far[-len(word) + 1 :] == list(word[:-1])
    }
    return lambda token: token not in stops | banned and (allowed is None or token in allowed)


def check_sequence(submission: Submission, request: Request, output: Any, index: int) -> str:
    """Holds one completion to its parameters; how it ended."""
    params, completion = submission.params, output.outputs[index]
    tokens = list(request.output_token_ids)
    for place, token in enumerate(tokens):
        assert may_come(request, tokens[:place])(token), (place, tokens)
    stops = set(request.stop_token_ids)
    ending = [place for place, token in enumerate(tokens) if token in stops]
    ending = [place for place in ending if place >= params.min_tokens]
    reason = completion.finish_reason
    assert len(tokens) <= request.max_tokens
    if isinstance(request.error, NothingAllowedError):
        assert reason == "failed"
        if params.structured_outputs is None:
            assert not any(map(may_come(request, tokens), range(VOCAB))), tokens
        return "barred"
    assert request.error is None
    if reason == "length":
        assert len(tokens) == request.max_tokens
        assert not ending
    else:
        assert reason == "stop"
        if isinstance(completion.stop_reason, str):
            assert completion.stop_reason in params.stop
            assert len(tokens) > params.min_tokens
        else:
            assert ending == [len(tokens) - 1]
            own = tokens[-1] not in request.eos_token_ids
            assert completion.stop_reason == (tokens[-1] if own else None)
    return str(reason)


def check(engine: Any, drawn: list[tuple[list[int], dict[str, Any], int, int]]) -> None:
    """Runs requests and holds them, and the engine, to what they must be."""
    ends: Counter[str] = Counter()
    for submission, output, told in run(engine, drawn):
        params = submission.params
        assert output.finished
        for index, (request, tokens) in enumerate(zip(submission.sequences, told, strict=True)):
            ends[check_sequence(submission, request, output, index)] += 1
            completion = output.outputs[index]
            # Several steps a dispatch may compute tokens beyond a stop string: nobody hears them.
            assert tokens == list(request.output_token_ids)[: len(tokens)]
            by_string = isinstance(completion.stop_reason, str)
            assert by_string or len(tokens) == len(request.output_token_ids)
            assert params.detokenize or not completion.text
            assert (completion.logprobs is None) == (params.logprobs is None)
            if completion.logprobs is not None:
                assert len(completion.logprobs) == len(completion.token_ids)
        if params.prompt_logprobs is not None and output.error is None:
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    note(str(dict(ends)))
    core, load = engine.core, engine.load()
    assert (core.recovery.num_recoveries, core.num_bugs, core.recovery.num_quarantined) == (0, 0, 0)
    engine.check_integrity()
    assert load.num_free_pages == load.num_total_pages
    assert load.num_running == load.num_waiting == load.compiles_after_ready == 0
    assert not engine.masks.num_live


@given(drawn=requests)
@settings(
    max_examples=max(NUM_EXAMPLES, settings().max_examples // 8),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_combination_resets_the_engine_or_breaks_its_own_rules(
    engine: Any, drawn: list[tuple[list[int], dict[str, Any], int, int]]
) -> None:
    check(engine, drawn)


@pytest.mark.parametrize("min_tokens", [0, 3, 5])
def test_a_stop_string_ends_no_text_before_min_tokens(engine: Any, min_tokens: int) -> None:
    fields = {
        "temperature": 0.0, "allowed_token_ids": [A], "stop": ["A"], "min_tokens": min_tokens,
        "max_tokens": 9,
    }  # fmt: skip
    [(_, output, _)] = run(engine, [([A, 40], fields, 2, 0)])
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "A")
    assert completion.text == "A" * min_tokens
    assert list(completion.token_ids) == [A] * (min_tokens + 1)


TIGHT = {
    **FIELDS,
    "allowed_token_ids": few_ids,
    "stop_token_ids": few_ids,
    "min_tokens": st.integers(0, 9),
    "bad_words": st.lists(st.sampled_from(["A", "AA", "AB", "BBB"]), max_size=3),
    "structured_outputs": st.none(),
    "stop": st.just(()),
}


@given(
    drawn=st.lists(
        st.tuples(
            st.lists(st.sampled_from(FEW), min_size=1, max_size=20),
            st.fixed_dictionaries(TIGHT),
            st.sampled_from((0, 3)),
            st.integers(0, 3),
        ),
        min_size=3,
        max_size=6,
    )
)
@settings(
    max_examples=max(NUM_EXAMPLES, settings().max_examples // 8),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_allows_bans_and_stops_the_same_few_tokens(
    engine: Any, drawn: list[tuple[list[int], dict[str, Any], int, int]]
) -> None:
    check(engine, drawn)
