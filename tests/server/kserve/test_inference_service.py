"""The Open Inference Protocol: Triton's own client, and messages it would never send."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.engine.request import Priority
from octavo.engine.sampling_params import SamplingParams
from octavo.server.client import OctavoClient
from octavo.server.proto.kserve.v2 import inference_pb2 as pb
from octavo.server.proto.kserve.v2.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.examples import examples, run_example

CLIENT = Path(__file__).with_name("triton_client.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None,
    reason="tritonclient is not installed: requirements-clients.txt",
)


@needs_triton
def test_tritons_client_gets_what_the_model_says(live):
    done = subprocess.run(
        [sys.executable, str(CLIENT), live.grpc, "tiny"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["live"], found["ready"], found["model_ready"]) == (True, True, True)
    assert found["server"]["name"] == "octavo"
    names = [tensor["name"] for tensor in found["model"]["inputs"]]
    assert names[:3] == ["text_input", "stream", "sampling_parameters"]
    assert found["server"]["extensions"] == ["model_configuration", "statistics"]
    config = found["config"]
    assert [tensor["name"] for tensor in config["input"]] == names
    assert [bool(tensor.get("optional")) for tensor in config["input"]] == [False] + [True] * 7
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    assert config["model_transaction_policy"]["decoupled"] is True
    assert config["parameters"]["max_num_seqs"]["string_value"] == "8"
    assert config["parameters"]["max_model_len"]["string_value"] == "512"
    assert config["parameters"]["dtype"]["string_value"] == "float32"
    with OctavoClient(live.grpc) as client:
        greedy = SamplingParams(temperature=0, max_tokens=64)
        expected = client.generate("abc", greedy).outputs[0]
    unary = found["unary"]
    assert unary["id"] == "one"
    assert unary["text"] == "abc" + expected.text
    assert unary["finish_reason"] == expected.finish_reason
    assert unary["counts"] == [3, len(expected.token_ids)]
    assert unary["cumulative_logprob"] < 0
    assert found["several"] == 3
    assert found["grammar"] == "left"
    [range_error, stream_error, model_error, length_error] = found["errors"]
    assert "max_model_len" in length_error[1]
    assert "INVALID_ARGUMENT" in range_error[0]
    assert "temperature" in range_error[1]
    assert "ModelStreamInfer" in stream_error[1]
    assert "NOT_FOUND" in model_error[0]
    assert "".join(found["stream"]["streamed"]) == expected.text
    # So long a text is more than one piece, however late it is read; eight tokens may be one.
    assert len(found["stream"]["streamed"]) > 1
    assert found["stream"]["whole"] == ["abc" + expected.text]
    assert "top_p" in found["stream"]["bad"][0]
    [before], [after] = found["before"], found["after"]
    assert (after["name"], after["version"]) == ("tiny", "1")
    # Five answers: one alone, one of three completions, one with a grammar, two in the stream.
    assert grown(before, after, "inference_count") == 5
    assert grown(before, after, "execution_count") >= 8
    assert int(after["last_inference"]) > 1e12
    for name, count in (("success", 5), ("queue", 5), ("compute_infer", 5), ("fail", 1)):
        old, new = (stats["inference_stats"].get(name, {}) for stats in (before, after))
        assert (name, grown(old, new, "count")) == (name, count)
        assert (grown(old, new, "ns") > 0) == (name != "fail")


def grown(before: dict[str, Any], after: dict[str, Any], name: str) -> int:
    """What a counter gained; JSON leaves zeros out and writes long numbers as text."""
    return int(after.get(name, 0)) - int(before.get(name, 0))


@needs_triton
def test_the_example_of_the_docs_runs(live):
    [code] = examples("kserve.md")
    shown = run_example(code.replace("smollm2-135m", "tiny"), live)
    assert shown.startswith("The capital of France is")


def request(**changes: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="counting", id="a")
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"hello")
    message.parameters["max_tokens"].int64_param = 3
    for name, value in changes.items():
        if isinstance(value, dict):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    return message


def raw(*buffers: bytes) -> pb.ModelInferRequest:
    message = request()
    message.inputs[0].ClearField("contents")
    message.raw_input_contents.extend(buffers)
    return message


def flagged(name: str, datatype: str = "BOOL", shape: tuple[int, ...] = (1,)) -> Any:
    message = request()
    tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
    tensor.contents.bool_contents.append(True)
    return message


def parameter(name: str, **value: Any) -> pb.ModelInferRequest:
    message = request()
    message.parameters[name].CopyFrom(pb.InferParameter(**value))
    return message


def asking(text: bytes) -> pb.ModelInferRequest:
    message = request()
    tensor = message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ModelInferRequest(model_name="counting"), "text_input"),
        (flagged("text_input"), "inputs"),
        (flagged("images"), "inputs"),
        (flagged("stream", datatype="INT32"), "stream"),
        (flagged("stream", shape=(2,)), "stream"),
        (flagged("stream"), "stream"),
        (raw(b"a", b"b"), "raw_input_contents"),
        (raw(b"abc"), "text_input"),
        (raw(struct.pack("<I", 9) + b"abc"), "text_input"),
        (raw(struct.pack("<I", 2) + b"\xff\xfe"), "text_input"),
        (asking(b"[1]"), "sampling_parameters"),
        (asking(b"{"), "sampling_parameters"),
        (asking(b'{"temprature": 1}'), "sampling_parameters"),
        (asking(b'{"temperature": "hot"}'), "temperature"),
        (asking(b'{"output_kind": 1}'), "sampling_parameters"),
        (parameter("priority", int64_param=9), "priority"),
        (parameter("timeout", string_param="soon"), "timeout"),
        (parameter("top_p", double_param=2.0), "top_p"),
        (request(id="x" * 300), "id"),
        (request(model_name="other"), "model_name"),
        (request(model_version="2"), "model_version"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_names_its_field_and_a_stream_outlives_it(on_stand, message, field):
    async def scenario(stand):
        stub = GRPCInferenceServiceStub(stand.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(message)
        assert caught.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
        )
        assert caught.value.details().startswith(f"{field} = ")
        call = stub.ModelStreamInfer(iter([message, request(id="good")]))
        ends = {}
        async for answer in call:
            if answer.infer_response.parameters["triton_final_response"].bool_param:
                ends[answer.infer_response.id] = answer.error_message
        assert ends["good"] == ""

    on_stand(scenario)


def test_parameters_of_a_call_are_options_or_sampling_parameters(on_stand):
    async def scenario(stand):
        stub = GRPCInferenceServiceStub(stand.channel)
        message = request()
        message.parameters["priority"].uint64_param = 1
        message.parameters["timeout"].int64_param = 30_000_000
        message.parameters["top_k"].string_param = "7"
        message.parameters["sequence_id"].int64_param = 5
        answer = await stub.ModelInfer(message)
        assert answer.id == "a"
        [text] = answer.raw_output_contents
        assert text == struct.pack("<I", 11) + b"hello1 2 3 "
        [seen] = stand.engine.seen
        assert seen["priority"] is Priority.REALTIME
        assert 0 < seen["timeout_s"] <= 30
        assert seen["params"].top_k == 7

    on_stand(scenario)


def test_facts_of_another_model_are_not_there(on_stand):
    async def scenario(stand):
        stub = GRPCInferenceServiceStub(stand.channel)
        for method, kind in (
            (stub.ModelConfig, pb.ModelConfigRequest),
            (stub.ModelStatistics, pb.ModelStatisticsRequest),
        ):
            for asked in (kind(name="other"), kind(name="counting", version="2")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(asked)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        [nothing] = (await stub.ModelStatistics(pb.ModelStatisticsRequest())).model_stats
        assert (nothing.inference_count, nothing.last_inference) == (0, 0)

    on_stand(scenario)


def test_a_cancelled_stream_ends_all_its_requests(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()
        stub = GRPCInferenceServiceStub(stand.channel)
        call = stub.ModelStreamInfer()
        for number in range(3):
            await call.write(request(id=str(number)))
        await stand.until(lambda: len(stand.engine.live) == 3)
        call.cancel()
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario)


def test_health_tells_of_draining_and_needs_no_token(on_stand, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("x" * 40 + "\n")
    tokens.chmod(0o600)

    async def scenario(stand):
        stub = GRPCInferenceServiceStub(stand.channel)
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stand.server.front.draining = True
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        await asyncio.sleep(0)

    on_stand(scenario, token_file=str(tokens))
