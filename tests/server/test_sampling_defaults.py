"""Requests at every door of a server, and of a front over it, take a model's own parameters."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from octavo.client import OctavoClient
from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto.kserve.v2 import inference_pb2 as kserve
from octavo.server.proto.kserve.v2 import inference_pb2_grpc as kserve_grpc
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.proto.octavo.v1 import octavo_pb2_grpc as octavo_grpc
from tests.server.conftest import TINY_ARGS, Process, listening

PROMPT = "abcdef"
OWN_TOKENS = 5
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def greedy_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("greedy") / "model"
    shutil.copytree(tiny_model, folder)
    own = {"temperature": 0.0, "top_k": 7, "max_new_tokens": OWN_TOKENS}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


@pytest.fixture(scope="module")
def server(
    greedy_model: Path,
    server_process: Callable[..., contextlib.AbstractContextManager[Process]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("server") / "log"
    with server_process("--model", str(greedy_model), *TINY_ARGS, log=log) as process:
        yield process


@pytest.fixture(scope="module", params=["server", "replicas", "front"])
def door(
    request: pytest.FixtureRequest,
    server: Process,
    greedy_model: Path,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Process]:
    """The server; one of two replicas; a front over it, whose own folder has no such file."""
    if request.param == "server":
        yield server
        return
    log = tmp_path_factory.mktemp(request.param) / "log"
    arguments = ("route", "--model", str(tiny_model), "--backend", server.grpc)
    if request.param == "replicas":
        replicas = (*TINY_ARGS, "--data-parallel-size", "2")
        arguments = ("serve", "--quiet", "--model", str(greedy_model), *replicas)
    with listening(*arguments, log=log) as process:
        yield process


def post(door: Process, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{door.http}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def completion(door: Process, **body: Any) -> tuple[str, int]:
    answer = post(door, "/v1/completions", prompt=PROMPT, **body)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def chat(door: Process, **body: Any) -> tuple[str, int]:
    answer = post(door, "/v1/chat/completions", messages=MESSAGES, **body)
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("ask", [completion, chat])
def test_what_a_body_leaves_out_is_the_models_own(door: Process, ask: Any) -> None:
    greedy = ask(door, temperature=0, max_tokens=9)
    assert ask(door, max_tokens=9) == ask(door, temperature=None, max_tokens=9) == greedy
    drawn = {ask(door, temperature=2, seed=k, top_k=0, max_tokens=9) for k in range(4)}
    assert len(drawn) > 1


def test_only_chats_take_its_limit(door: Process) -> None:
    assert chat(door)[1] == chat(door, max_tokens=None)[1] == OWN_TOKENS
    assert chat(door, max_tokens=7)[1] == chat(door, max_completion_tokens=7)[1] == 7
    assert completion(door)[1] == 16  # as OpenAI's API says


def test_responses_and_messages_take_them(door: Process) -> None:
    response = post(door, "/v1/responses", input="hello")
    assert (response["temperature"], response["top_p"]) == (0.0, 1.0)
    assert response["usage"]["output_tokens"] == OWN_TOKENS
    assert post(door, "/v1/responses", input="hello", temperature=0.5)["temperature"] == 0.5
    first, second = (
        post(door, "/v1/messages", messages=MESSAGES, max_tokens=9, model="tiny")["content"]
        for _ in range(2)
    )
    assert first == second


def test_grpc_takes_them(door: Process) -> None:
    with grpc.insecure_channel(door.grpc) as channel:
        stub = octavo_grpc.OctavoServiceStub(channel)  # type: ignore[no-untyped-call]
        info = stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.sampling_defaults == pb.SamplingParams(
            temperature=0.0, top_k=7, max_tokens=OWN_TOKENS
        )
        message = pb.ChatMessage(role="user", content="hello")
        answer = stub.Chat(pb.ChatRequest(messages=[message]))
        assert answer.usage.completion_tokens == OWN_TOKENS
        unlimited = pb.SamplingParams(unlimited_tokens=True, n=1)
        answer = stub.Chat(pb.ChatRequest(messages=[message], sampling_params=unlimited))
        assert answer.usage.completion_tokens > OWN_TOKENS


def test_a_client_that_is_given_no_parameters_leaves_them_to_the_server(door: Process) -> None:
    with OctavoClient(door.grpc) as client:
        [own] = client.generate(PROMPT).outputs
        [greedy] = client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=5)).outputs
        assert own.token_ids == greedy.token_ids
        streamed = [
            token for output in client.stream(PROMPT) for token in output.outputs[0].token_ids
        ]
        assert streamed == greedy.token_ids
        first, second = (client.generate(PROMPT, SamplingParams(seed=k)) for k in range(2))
        assert len(first.outputs[0].token_ids) == 16  # parameters say all that they do not name
        assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_kserve_takes_them(door: Process) -> None:
    request = kserve.ModelInferRequest(model_name="tiny", id="1")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(PROMPT.encode())
    excluded = request.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    excluded.contents.bool_contents.append(True)
    with grpc.insecure_channel(door.grpc) as channel:
        stub = kserve_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        outputs = [stub.ModelInfer(request).outputs[0] for _ in range(2)]
    assert outputs[0].contents.bytes_contents == outputs[1].contents.bytes_contents
