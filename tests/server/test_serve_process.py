"""A real server process over the packaged model, and real clients of it."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    UnknownModelError,
)
from octavo.engine.sampling_params import SamplingParams
from octavo.models.packaged import PACKAGED_MODELS
from octavo.server.client import OctavoClient
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from tests.waiting import until

MODEL = "smollm2-135m"
CONTEXT = 512
NUM_PAGES = 96
ARGV = [
    *("--model", MODEL, "--grpc-port", "0", "--quiet", "--drain-s", "60", "--fail-on-compile"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--block-size", "16"),
    *("--max-model-len", str(CONTEXT), "--num-kv-pages", str(NUM_PAGES), "--warm-up", "coarse"),
]
START_S = 400
WAIT_S = 60
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
SHORT = SamplingParams(max_tokens=8, temperature=0)
PROMPT = "The capital of France is"

pytestmark = pytest.mark.skipif(
    not PACKAGED_MODELS[MODEL].is_installed(), reason="the packaged model is not installed"
)


@dataclass
class Served:
    process: subprocess.Popen[str]
    address: str
    client: OctavoClient
    channel: grpc.Channel


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    command = [sys.executable, "-m", "octavo.server.cli.main", "serve", *ARGV]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = first_line(process, START_S)
        assert line.startswith(f"octavo: serving {MODEL} over gRPC on 127.0.0.1:"), line
        address = line.split()[-1]
        with OctavoClient(address) as client, grpc.insecure_channel(address) as channel:
            yield Served(process, address, client, channel)
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True).start()
    return lines.get(timeout=timeout_s)


def idle(served: Served) -> bool:
    load = served.client.load()
    return load.num_running == load.num_waiting == 0 and load.num_free_pages == load.num_total_pages


def test_a_ready_server_is_healthy_and_describes_itself(served):
    health = health_pb2_grpc.HealthStub(served.channel)
    for service in ("", "octavo.v1.OctavoService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    reflect = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo
    ask = reflection_pb2.ServerReflectionRequest
    questions = [ask(list_services=""), ask(file_containing_symbol="octavo.v1.OctavoService")]
    services, file = reflect(iter(questions))
    assert {"octavo.v1.OctavoService", "grpc.health.v1.Health"} <= {
        service.name for service in services.list_services_response.service
    }
    assert file.file_descriptor_response.file_descriptor_proto

    info = served.client.model_info()
    assert (info.model, info.max_model_len) == (MODEL, CONTEXT)
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (30, 3, 64)
    assert served.client.server_info().engine_args["max_num_seqs"] == "8"


def test_a_stream_adds_up_to_the_unary_answer(served):
    whole = served.client.generate(PROMPT, SHORT)
    parts = list(served.client.stream(PROMPT, SHORT))
    assert "Paris" in whole.outputs[0].text
    assert "".join(part.outputs[0].text for part in parts) == whole.outputs[0].text
    token_ids = [token_id for part in parts for token_id in part.outputs[0].token_ids]
    assert token_ids == whole.outputs[0].token_ids
    assert whole.prompt_token_ids == served.client.tokenize(PROMPT)
    assert served.client.detokenize(token_ids) == whole.outputs[0].text
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].metrics.ttft_s > 0


def test_text_and_its_token_ids_are_the_same_prompt(served):
    token_ids = served.client.tokenize(PROMPT)
    by_ids = served.client.generate(token_ids, SHORT)
    assert by_ids.outputs[0].text == served.client.generate(PROMPT, SHORT).outputs[0].text


def test_logprobs_seeds_and_several_completions_come_through(served):
    params = SamplingParams(
        n=2, temperature=1.0, seed=3, max_tokens=4, logprobs=2, prompt_logprobs=1
    )
    first, again = (served.client.generate(PROMPT, params) for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    for output in first.outputs:
        assert len(output.logprobs) == len(output.token_ids)
        for token_id, scores in zip(output.token_ids, output.logprobs, strict=True):
            assert token_id in scores
            assert 2 <= len(scores) <= 3
            assert min(score.rank for score in scores.values()) == 1
        chosen = zip(output.token_ids, output.logprobs, strict=True)
        total = sum(scores[token_id].logprob for token_id, scores in chosen)
        assert output.cumulative_logprob == pytest.approx(total)
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)


def test_a_dropped_stream_gives_its_pages_back(served):
    stream = served.client.stream(PROMPT, LONG)
    for _ in range(3):
        next(stream)
    load = served.client.load()
    assert load.num_running == 1
    assert load.num_free_pages < load.num_total_pages
    stream.close()
    until(lambda: idle(served))


def test_an_aborted_request_ends_as_cancelled(served):
    stream = served.client.stream(PROMPT, LONG, request_id="to-abort")
    next(stream)
    assert served.client.abort("to-abort")
    last = list(stream)[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "cancelled"
    until(lambda: idle(served))
    assert not served.client.abort("to-abort")


def test_a_deadline_ends_the_request_and_gives_its_pages_back(served):
    with pytest.raises(DeadlineExceededError, match="timeout_s"):
        served.client.generate(PROMPT, LONG, timeout_s=0.5)
    until(lambda: idle(served))


def test_a_deadline_in_the_message_is_as_good_as_the_calls(served):
    for timeout_s in (0.5, 0.0, -1.0):
        request = pb.GenerateRequest(prompt=PROMPT, timeout_s=timeout_s)
        request.sampling_params.max_tokens = 400
        request.sampling_params.ignore_eos = True
        assert status(served, request).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: idle(served))


def test_an_id_in_flight_may_be_given_again(served):
    alone = served.client.generate(PROMPT, SHORT)
    stream = served.client.stream(PROMPT, LONG, request_id="mine")
    next(stream)
    beside = served.client.generate(PROMPT, SHORT, request_id="mine")
    assert beside.request_id == "mine"
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    stream.close()
    until(lambda: idle(served))


def status(served: Served, request: pb.GenerateRequest | bytes) -> grpc.RpcError:
    raw = request if isinstance(request, bytes) else request.SerializeToString()
    with pytest.raises(grpc.RpcError) as caught:
        served.channel.unary_unary("/octavo.v1.OctavoService/Generate")(raw, timeout=WAIT_S)
    return caught.value


def with_params(**params: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="x", sampling_params=pb.SamplingParams(**params))


BAD_INPUT = {
    "an empty prompt": (pb.GenerateRequest(prompt=""), "prompt"),
    "no tokens": (pb.GenerateRequest(prompt_token_ids=pb.TokenIds()), "prompt"),
    "neither text nor tokens": (pb.GenerateRequest(), "prompt"),
    "text and tokens": (
        pb.GenerateRequest(prompt="x", prompt_token_ids=pb.TokenIds(ids=[1])),
        "prompt",
    ),
    "a token id beyond the vocabulary": (
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 49152])),
        "prompt",
    ),
    "a negative token id": (
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[-1])),
        "prompt",
    ),
    "a prompt beyond the context": (
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * CONTEXT)),
        "prompt",
    ),
    "prompt and output beyond the context": (with_params(max_tokens=CONTEXT), "max_tokens"),
    "a temperature that is no number": (with_params(temperature=math.nan), "temperature"),
    "an infinite penalty": (with_params(presence_penalty=math.inf), "presence_penalty"),
    "a temperature out of range": (with_params(temperature=2.5), "temperature"),
    "a top_p out of range": (with_params(top_p=0.0), "top_p"),
    "several greedy completions": (with_params(temperature=0.0, n=2), "n"),
    "too many completions": (with_params(n=65), "n"),
    "too many logprobs": (with_params(logprobs=21), "logprobs"),
    "an empty stop string": (with_params(stop=[""]), "stop"),
    "a stop token beyond the vocabulary": (with_params(stop_token_ids=[49152]), "stop_token_ids"),
    "an allowed token beyond the vocabulary": (
        with_params(allowed_token_ids=pb.TokenIds(ids=[49152])),
        "allowed_token_ids",
    ),
    "a bias of a token beyond the vocabulary": (
        with_params(logit_bias={49152: 1.0}),
        "logit_bias",
    ),
    "an empty request id": (pb.GenerateRequest(prompt="x", request_id=""), "request_id"),
    "a string that is not UTF-8": (b"\x1a\x02\xff\xfe", "UTF-8"),
    "bytes that are no message": (b"\xff" * 9, "GenerateRequest"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_and_the_engine_serves_on(served, case):
    request, named = BAD_INPUT[case]
    error = status(served, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in error.details()
    assert "is not allowed" in error.details()
    assert served.process.poll() is None
    until(lambda: idle(served))


def test_another_models_name_is_not_found(served):
    with pytest.raises(UnknownModelError, match=MODEL):
        served.client.generate(PROMPT, SHORT, model="another")
    assert served.client.generate(PROMPT, SHORT, model=MODEL).finished


def test_a_message_over_the_limit_is_refused(served):
    error = status(served, pb.GenerateRequest(prompt="x" * (5 << 20)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(InvalidRequestError, match="message"):
        served.client.generate("x" * (5 << 20), SHORT)


def test_many_streams_at_once_each_get_their_own_text(served):
    alone = served.client.generate(PROMPT, SHORT).outputs[0].text
    texts: dict[int, str] = {}

    def read(number: int) -> None:
        prompt = PROMPT if number % 2 else "Water boils at"
        parts = served.client.stream(prompt, SHORT)
        texts[number] = "".join(part.outputs[0].text for part in parts)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[number] for number in range(1, 12, 2)] == [alone] * 6
    assert len({texts[number] for number in range(0, 12, 2)}) == 1
    until(lambda: idle(served))


def test_a_second_server_on_the_port_says_so_in_one_line(served):
    port = served.address.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "octavo.server.cli.main", "serve", *ARGV, "--grpc-port", port]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("octavo: error: ")]
    assert f"grpc_port = '127.0.0.1:{port}'" in line
    assert "Traceback" not in done.stderr


# The last test: it ends the module's server.
def test_sigterm_finishes_what_is_in_flight_and_exits_cleanly(served):
    params = LONG.replace(max_tokens=24)
    stream = served.client.stream(PROMPT, params)
    parts = [next(stream)]
    served.process.send_signal(signal.SIGTERM)
    with contextlib.closing(stream):
        parts += list(stream)
    assert sum(len(part.outputs[0].token_ids) for part in parts) == 24
    assert parts[-1].outputs[0].finish_reason == "length"
    assert served.process.wait(timeout=WAIT_S) == os.EX_OK
