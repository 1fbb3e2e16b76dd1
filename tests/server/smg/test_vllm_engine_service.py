"""vLLM's service as smg calls it: what comes is what Octavo's own service gives."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from octavo.client import OctavoClient, SamplingParams
from octavo.engine.errors import StepFailedError
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.proto.smg import common_pb2
from octavo.server.proto.smg import vllm_engine_pb2 as pb
from octavo.server.proto.smg.vllm_engine_pb2_grpc import VllmEngineStub
from octavo.server.smg import tokenizer_archive
from octavo.server.smg.service import ASK_THE_SERVER

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def stub(live: Any) -> Iterator[VllmEngineStub]:
    with grpc.insecure_channel(live.grpc) as channel:
        yield VllmEngineStub(channel)


@pytest.fixture(scope="module")
def client(live: Any) -> Iterator[OctavoClient]:
    with OctavoClient(live.grpc) as client:
        yield client


def ask(ids: list[int], *, stream: bool = False, **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="mine",
        tokenized=pb.TokenizedInput(original_text="", input_ids=ids),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 24},
        {**GREEDY, "repetition_penalty": 1.3, "logit_bias": {40: 5.0}},
        {**GREEDY, "regex": "[a-c]{5}"},
    ],
    ids=["greedy", "sampled", "penalized", "constrained"],
)
def test_tokens_are_those_of_the_own_service(stub, client, params):
    ids = client.tokenize("abc")
    own = {name: value for name, value in params.items() if name != "regex"}
    if "regex" in params:
        own["structured_outputs"] = {"regex": params["regex"]}
    want = client.generate(ids, SamplingParams(**own)).outputs[0]
    [whole] = stub.Generate(ask(ids, **params))
    assert list(whole.complete.output_ids) == want.token_ids
    assert whole.complete.finish_reason == want.finish_reason
    assert whole.complete.prompt_tokens == len(ids)
    assert whole.complete.completion_tokens == len(want.token_ids)
    *chunks, last = stub.Generate(ask(ids, stream=True, **params))
    assert [each.WhichOneof("response") for each in chunks] == ["chunk"] * len(chunks)
    assert [t for each in chunks for t in each.chunk.token_ids] == want.token_ids
    assert sum(each.chunk.completion_tokens for each in chunks) == len(want.token_ids)
    assert last.complete.finish_reason == want.finish_reason
    # As vLLM's: of a stream, the last message repeats the last chunk.
    assert last.complete.output_ids == chunks[-1].chunk.token_ids


def test_a_text_is_a_prompt_too(stub, client):
    want = client.generate("abc", SamplingParams(**GREEDY)).outputs[0].token_ids
    message = ask([], **GREEDY)
    message.text = "abc"
    [answer] = stub.Generate(message)
    assert list(answer.complete.output_ids) == want


def test_what_is_not_given_is_vllms_default(stub):
    [answer] = stub.Generate(ask([5] * 500, ignore_eos=True))
    assert (answer.complete.completion_tokens, answer.complete.finish_reason) == (12, "length")


def test_a_prompt_is_cut_where_that_is_asked_for(stub, client):
    ids = list(range(4, 104)) * 6
    want = client.generate(ids[-20:], SamplingParams(**GREEDY)).outputs[0].token_ids
    [answer] = stub.Generate(ask(ids, truncate_prompt_tokens=20, **GREEDY))
    assert list(answer.complete.output_ids) == want
    assert answer.complete.prompt_tokens == 20


def test_each_of_several_completions_ends_once(stub):
    params = {"temperature": 0.9, "seed": 1, "n": 3, "max_tokens": 9}
    ends = [each.complete for each in stub.Generate(ask([9, 8], **params))]
    assert [end.index for end in ends] == [0, 1, 2]
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    streamed_ends = []
    for each in stub.Generate(ask([9, 8], stream=True, **params)):
        if each.HasField("complete"):
            streamed_ends.append(each.complete.index)
        else:
            tokens[each.chunk.index] += each.chunk.token_ids
    assert sorted(streamed_ends) == [0, 1, 2]
    assert [tokens[end.index] for end in ends] == [list(end.output_ids) for end in ends]


def test_the_end_says_what_matched(stub, client):
    ids = client.tokenize("abc")
    params = SamplingParams(**GREEDY)
    plain = client.generate(ids, params).outputs[0]
    [by_token] = stub.Generate(ask(ids, stop_token_ids=[plain.token_ids[3]], **GREEDY))
    assert by_token.complete.matched_token_id == plain.token_ids[3]
    stop = next(c for c in plain.text[2:] if c.isascii())
    [by_text] = stub.Generate(ask(ids, stop=[stop], **GREEDY))
    assert by_text.complete.matched_stop_str == stop
    assert by_text.complete.finish_reason == by_token.complete.finish_reason == "stop"
    assert by_text.complete.completion_tokens < len(plain.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_own_services(stub, client, stream):
    ids = client.tokenize("abcd")
    want = client.generate(ids, SamplingParams(logprobs=2, prompt_logprobs=1, **GREEDY))
    answers = list(stub.Generate(ask(ids, stream=stream, logprobs=2, prompt_logprobs=1, **GREEDY)))
    parts = [each.chunk for each in answers[:-1]] if stream else [answers[0].complete]
    prompt = parts[0].input_logprobs
    assert list(prompt.token_ids) == ids
    assert not prompt.token_logprobs[0].HasField("value")
    assert want.prompt_logprobs is not None
    for token_id, found, entry in zip(
        ids[1:], prompt.token_logprobs[1:], want.prompt_logprobs[1:], strict=True
    ):
        assert math.isclose(found.value, entry[token_id].logprob, abs_tol=1e-4)
    entries = want.outputs[0].logprobs
    logprobs = [value for part in parts for value in part.output_logprobs.token_logprobs]
    top = [each for part in parts for each in part.output_logprobs.top_logprobs]
    assert len(logprobs) == len(top) == len(entries) == 24
    for token_id, value, best, entry in zip(
        want.outputs[0].token_ids, logprobs, top, entries, strict=True
    ):
        assert math.isclose(value, entry[token_id].logprob, abs_tol=1e-4)
        assert list(best.values) == sorted(best.values, reverse=True)
        assert set(best.token_ids) <= set(entry)
        assert len(best.token_ids) == 2
    assert all(not part.input_logprobs.token_ids for part in parts[1:])


def test_a_vector_is_the_own_services(embeds):
    with grpc.insecure_channel(embeds.grpc) as channel, OctavoClient(embeds.grpc) as client:
        ids = client.tokenize("abc")
        tokenized = pb.TokenizedInput(input_ids=ids)
        answer = VllmEngineStub(channel).Embed(pb.EmbedRequest(tokenized=tokenized))
        want = client.embed(ids).outputs.data
        with pytest.raises(grpc.RpcError, match="tokenized"):
            VllmEngineStub(channel).Embed(pb.EmbedRequest())
    np.testing.assert_allclose(answer.embedding, want, rtol=0, atol=1e-5)
    assert (answer.prompt_tokens, answer.embedding_dim) == (len(ids), len(want))


def test_the_tokenizer_comes_whole(stub, tiny_model, tmp_path, monkeypatch):
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
    own, sent = Tokenizer.from_source(tiny_model), Tokenizer.from_source(tmp_path)
    for text in ("abc", "äöü 1 2", "<s>x</s>"):
        assert sent.encode(text) == own.encode(text)
    assert (sent.chat_template, sent.named_tokens) == (own.chat_template, own.named_tokens)
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == list(own.eos_token_ids)
    monkeypatch.setattr(tokenizer_archive, "CHUNK_BYTES", 100)
    small = list(tokenizer_archive.chunks_of(data))
    assert b"".join(chunk.data for chunk in small) == data
    assert max(len(chunk.data) for chunk in small) == 100
    assert [bool(chunk.sha256) for chunk in small] == [False] * (len(small) - 1) + [True]


def test_the_server_tells_what_it_is(stub, tiny_model):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    config = json.loads((tiny_model / "config.json").read_text())
    assert (info.served_model_name, info.model_path) == ("tiny", str(tiny_model))
    assert (info.vocab_size, info.max_context_length) == (config["vocab_size"], 512)
    assert (info.is_generation, info.model_type) == (True, config["model_type"])
    assert list(info.eos_token_ids) == [config["eos_token_id"]]
    # smg reads a tokenizer that it finds at this path: there must be none, on any host.
    assert info.tokenizer_path == ASK_THE_SERVER
    assert not Path(ASK_THE_SERVER).is_dir()
    assert not Path(ASK_THE_SERVER).read_bytes()
    about = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (about.max_num_seqs, about.data_parallel_size) == (8, 1)
    assert about.model_dtype == "float32"
    loads = stub.GetLoads(pb.GetLoadsRequest())
    [load] = loads.loads
    assert load.max_running_requests == 8
    assert 0 <= load.num_used_tokens <= load.max_total_num_tokens
    assert load.max_total_num_tokens > 1000


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"tokenized": None}, "tokenized"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"tokenized": pb.TokenizedInput(input_ids=[1] * 64)}, "tokenized.input_ids"),
        ({"sampling_params": pb.SamplingParams(temperature=9)}, "temperature"),
        ({"sampling_params": pb.SamplingParams(top_p=-1)}, "top_p"),
        ({"sampling_params": pb.SamplingParams(logprobs=-1)}, "logprobs"),
        ({"sampling_params": pb.SamplingParams(structural_tag="{}")}, "structural_tag"),
        ({"sampling_params": pb.SamplingParams(choice=pb.ChoiceConstraint())}, "choice"),
        ({"sampling_params": pb.SamplingParams(json_schema="{")}, "json_schema"),
        ({"sampling_params": pb.SamplingParams(stop=["a"] * 99)}, "stop"),
        ({"sampling_params": pb.SamplingParams(truncate_prompt_tokens=-3)}, "truncate_prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_names_its_field(on_stand, change, field):
    fields = {"tokenized": pb.TokenizedInput(input_ids=[1]), "request_id": "a"} | change

    async def scenario(stand):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in VllmEngineStub(stand.channel).Generate(pb.GenerateRequest(**fields)):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith(field)
        assert not stand.engine.seen

    on_stand(scenario)


def test_a_failed_request_ends_its_call(on_stand):
    async def scenario(stand):
        stand.engine.failure = StepFailedError("it broke")
        call = VllmEngineStub(stand.channel).Generate(ask([1], stream=True, max_tokens=9))
        with pytest.raises(grpc.aio.AioRpcError, match="it broke"):
            async for _ in call:
                pass

    on_stand(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(on_stand, stream):
    async def scenario(stand):
        stand.engine.gate.clear()
        call = VllmEngineStub(stand.channel).Generate(ask([1], stream=stream, max_tokens=9))
        reader = asyncio.ensure_future(call.read())
        await stand.until(lambda: len(stand.engine.live) == 1)
        reader.cancel()
        call.cancel()
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario)


def test_requests_are_aborted_by_their_ids(live, stub):
    message = ask([5] * 8, stream=True, max_tokens=480, ignore_eos=True, temperature=0.0)
    answers = stub.Generate(message)
    assert next(answers).chunk.token_ids
    stub.Abort(pb.AbortRequest(request_ids=["unknown", "", "mine"]))
    *_, last = answers
    assert last.complete.finish_reason == "abort"
    with pytest.raises(grpc.RpcError, match="request_ids"):
        stub.Abort(pb.AbortRequest(request_ids=["a"] * 2000))


def test_health_needs_no_token_and_tells_of_draining(on_stand, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("x" * 40 + "\n")
    tokens.chmod(0o600)

    async def scenario(stand):
        stub = VllmEngineStub(stand.channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoads(pb.GetLoadsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stand.server.front.draining = True
        answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "draining")

    on_stand(scenario, token_file=str(tokens))


def test_targets_in_metadata_count(on_stand):
    async def scenario(stand):
        call = VllmEngineStub(stand.channel).Generate(
            ask([1], max_tokens=2), metadata=(("x-slo-ttft-ms", "250"),), timeout=30
        )
        [answer] = [each async for each in call]
        assert list(answer.complete.output_ids) == [1, 2]
        [seen] = stand.engine.seen
        assert seen["targets"].ttft_target_s == 0.25
        # gRPC rounds a deadline up for the wire; the server counts it by a clock that others set.
        assert 0 < seen["timeout_s"] <= 31
        assert seen["id"] == "mine"
        assert not seen["params"].detokenize

    on_stand(scenario)


def test_a_router_can_follow_the_prefix_cache(server_process, tiny_model, tiny_args, tmp_path):
    args = ("--model", str(tiny_model), *tiny_args, "--kv-events", "--num-kv-pages", "40")
    with (
        server_process(*args, log=tmp_path / "log") as process,
        grpc.insecure_channel(process.grpc) as channel,
        OctavoClient(process.grpc) as client,
    ):
        stub = VllmEngineStub(channel)

        def follow(last: int = 0) -> Any:
            request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=last)
            return stub.SubscribeKvEvents(request, timeout=60)

        ids = list(range(5, 90))
        params = SamplingParams(max_tokens=1, temperature=0)
        stream = follow()
        whole = next(stream)
        assert (whole.snapshot.index, whole.snapshot.count, whole.snapshot.blocks) == (0, 1, 0)
        client.generate(ids, params)
        blocks: list[Any] = []
        while len(blocks) < 5:
            batch = next(stream)
            blocks += [block for event in batch.events for block in event.stored.blocks]
        assert [t for block in blocks for t in block.token_ids] == ids[:80]
        assert {block.block_size for block in blocks} == {16}
        first = batch.events[0].stored
        assert batch.sequence_number == whole.sequence_number + 1 or first.parent_block_hash
        # Who comes now is told the same; who was there goes on.
        late = next(follow())
        assert late.snapshot.blocks == 5
        assert [event.WhichOneof("data") for event in late.events] == ["cleared"] + ["stored"] * 5
        parents = [e.stored.parent_block_hash for e in late.events[2:]]
        assert parents == [block.block_hash for block in blocks[:4]]
        # Others' prompts take the pages.
        for number in range(8):
            client.generate([100 + number] * 200, params)
        removed: set[int] = set()
        while not removed.issuperset(block.block_hash for block in blocks):
            for event in next(stream).events:
                removed |= set(event.removed.block_hashes)
        stream.cancel()
        process.popen.terminate()  # an open stream does not hold the server
        assert process.ended(30) == 0


def test_without_the_setting_there_is_nothing_to_follow(stub):
    with pytest.raises(grpc.RpcError, match="kv_events") as caught:
        next(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--quiet", "--warm-up", "few", "--data-parallel-size", "2"),
        ("serve", "--quiet", "--warm-up", "few", "--no-enable-prefix-caching"),
        ("route", "--backend", "127.0.0.1:1"),
    ],
    ids=["replicas", "no cache", "front"],
)
def test_a_cache_that_cannot_be_followed_is_said_at_the_start(tiny_model, arguments):
    command = [sys.executable, "-m", "octavo.server.cli.main", *arguments]
    done = subprocess.run(
        [*command, "--model", str(tiny_model), "--grpc-port", "0", "--kv-events"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "kv_events = True is not allowed" in done.stderr
