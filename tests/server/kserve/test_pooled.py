"""Embeddings and scores over the Open Inference Protocol, against those over HTTP."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.server.proto.kserve.v2 import inference_pb2 as pb
from octavo.server.proto.kserve.v2.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.examples import examples

TEXTS = ["abc", "a longer text " * 6, "ü"]
TOLERANCE = 1e-5
"""Of each number of a vector of length 1: texts are batched with others in float32."""


@pytest.fixture(scope="module")
def stub(embeds: Any) -> Iterator[Any]:
    with grpc.insecure_channel(embeds.grpc) as channel:
        yield GRPCInferenceServiceStub(channel)


def request(*outputs: str, is_raw: bool = True, **inputs: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="tiny", id="a")
    for name, given_texts in inputs.items():
        texts = [text.encode() if isinstance(text, str) else text for text in given_texts]
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=[len(texts)])
        if is_raw:
            packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
            message.raw_input_contents.append(packed)
        else:
            tensor.contents.bytes_contents.extend(texts)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def arrays(answer: pb.ModelInferResponse) -> dict[str, np.ndarray]:
    kinds = {"FP32": "<f4", "UINT32": "<u4"}
    return {
        tensor.name: np.frombuffer(raw, kinds[tensor.datatype]).reshape(tensor.shape)
        for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=40), is_raw=st.booleans(),
    options=st.fixed_dictionaries(
        {},
        optional={
            "pooling": st.sampled_from(["last", "mean", "cls"]), "normalize": st.booleans(),
            "dimensions": st.integers(1, 32),
        },
    ),
)  # fmt: skip
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_embeddings_are_those_of_http(stub, embeds, texts, is_raw, options):
    body = {"model": "tiny", "input": texts} | options
    answer = httpx.post(f"{embeds.http}/v1/embeddings", json=body, timeout=60).json()
    want = np.array([item["embedding"] for item in answer["data"]])
    asked = request(
        "embedding", "num_input_tokens", is_raw=is_raw,
        text_input=texts, pooling_parameters=[json.dumps(options)],
    )  # fmt: skip
    found = arrays(stub.ModelInfer(asked))
    assert list(found) == ["embedding", "num_input_tokens"]
    scale = max(1.0, np.abs(want).max())
    np.testing.assert_allclose(found["embedding"], want, rtol=0, atol=scale * TOLERANCE)
    assert found["num_input_tokens"] == [answer["usage"]["prompt_tokens"]]


@pytest.mark.parametrize("first", [["abc"], TEXTS])
def test_scores_are_those_of_http(stub, embeds, first):
    body = {"model": "tiny", "text_1": first, "text_2": TEXTS}
    answer = httpx.post(f"{embeds.http}/v1/score", json=body, timeout=60).json()
    found = arrays(stub.ModelInfer(request("score", text_input=first, text_pair=TEXTS)))
    want = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(found["score"], want, rtol=0, atol=TOLERANCE)


def test_a_stream_answers_both_kinds_beside_one_another(stub):
    asked = [request("embedding", text_input=["abc"]), request(text_input=["abc"])]
    answers = list(stub.ModelStreamInfer(iter(asked)))
    assert not any(answer.error_message for answer in answers)
    names = {answer.infer_response.outputs[0].name for answer in answers}
    assert names == {"embedding", "text_output"}
    for answer in answers:
        if answer.infer_response.outputs[0].name == "embedding":
            assert answer.infer_response.parameters["triton_final_response"].bool_param


def test_the_model_says_which_rows_it_gives(stub):
    facts = stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
    outputs = {tensor.name: list(tensor.shape) for tensor in facts.outputs}
    assert (outputs["embedding"], outputs["score"]) == ([-1, -1], [-1])
    inputs = {tensor.name: list(tensor.shape) for tensor in facts.inputs}
    assert inputs["text_input"] == inputs["text_pair"] == [-1]
    assert inputs["stream"] == [1]
    config = stub.ModelConfig(pb.ModelConfigRequest(name="tiny")).config
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]


def wrong_length() -> pb.ModelInferRequest:
    message = request("embedding", text_input=["abc"])
    message.raw_input_contents[0] = struct.pack("<I", 9) + b"abc"
    return message


def wrong_shape() -> pb.ModelInferRequest:
    message = request("embedding", text_input=["abc"])
    message.inputs[0].shape[:] = [2]
    return message


def sampled() -> pb.ModelInferRequest:
    message = request("embedding", text_input=["abc"])
    message.parameters["top_k"].int64_param = 3
    return message


BAD: dict[str, tuple[Any, str]] = {
    "no text": (request("embedding"), "text_input"),
    "an empty text": (request("embedding", text_input=[""]), "text_input"),
    "too many texts": (request("embedding", text_input=["a"] * 257), "text_input"),
    "a text too long": (request("embedding", text_input=["a" * 600]), "text_input"),
    "no UTF-8": (request("embedding", text_input=[b"\xff"]), "text_input"),
    "a wrong length": (wrong_length(), "text_input"),
    "a wrong shape": (wrong_shape(), "text_input"),
    "another input": (request("embedding", text_input=["a"], stream=["a"]), "inputs"),
    "another output": (request("embedding", "text_output", text_input=["a"]), "outputs"),
    "two kinds": (request("embedding", "score", text_input=["a"]), "outputs"),
    "classes of a model without": (request("probabilities", text_input=["a"]), "outputs"),
    "a score of one": (request("score", text_input=["a"]), "text_pair"),
    "a pair to embed": (request("embedding", text_input=["a"], text_pair=["a"]), "text_pair"),
    "a sampling parameter": (sampled(), "top_k"),
    "no JSON": (
        request("embedding", text_input=["a"], pooling_parameters=["["]), "pooling_parameters"
    ),
    "another parameter": (
        request("embedding", text_input=["a"], pooling_parameters=['{"instruction": "x"}']),
        "pooling_parameters.instruction",
    ),
    "dimensions": (
        request("embedding", text_input=["a"], pooling_parameters=['{"dimensions": 33}']),
        "dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_names_its_field(stub, case):
    message, field = BAD[case]
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field} = ")


def test_a_server_that_generates_says_how_to_start_one_that_embeds(live):
    with grpc.insecure_channel(live.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        GRPCInferenceServiceStub(channel).ModelInfer(request("embedding", text_input=["a"]))
    assert "embed or both" in caught.value.details()


BEFORE = """
import json
import sys
import numpy as np
import tritonclient.grpc as triton
client, model = triton.InferenceServerClient(sys.argv[1]), "tiny"
"""


@pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None,
    reason="tritonclient is not installed: requirements-clients.txt",
)
def test_the_pages_example_gives_tritons_client_rows(embeds):
    [code] = examples("kserve.md", "py")
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + code, embeds.grpc],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "(2, 16)\n", done.stderr
