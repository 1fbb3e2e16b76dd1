"""Messages of too many parts are refused before they are parsed."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest

from octavo.server.kserve.service import MAX_PARTS
from octavo.server.message_parts import num_parts
from octavo.server.proto.kserve.v2 import inference_pb2 as kserve

INFER = "/inference.GRPCInferenceService/ModelInfer"
KIND = kserve.ModelInferRequest
EMPTY_INPUT = b"\x2a\x00"
GROUP = b"\x9b\x06\x9c\x06"  # begins and ends a field that nobody knows


def infer(**fields: Any) -> kserve.ModelInferRequest:
    return kserve.ModelInferRequest(model_name="m", **fields)


def test_parts_are_those_of_messages_within_messages_too():
    request = infer()
    assert num_parts(request.SerializeToString(), KIND, 99) == 1
    request.parameters["top_k"].int64_param = 300
    assert num_parts(request.SerializeToString(), KIND, 99) == 1 + 4  # entry, key, value, choice
    tensor = request.inputs.add(name="x", shape=[1, 2])
    tensor.contents.fp64_contents.append(0.5)
    tensor.contents.fp32_contents.append(0.5)
    # The tensor, its name, its shape as one, its contents, both lists.
    assert num_parts(request.SerializeToString(), KIND, 99) == 5 + 6


def test_lists_of_numbers_and_long_texts_are_one_part():
    request = infer(id="a" * 1_000_000, raw_input_contents=[b"\x2a\x00" * 100_000])
    request.inputs.add().contents.int64_contents.extend(range(100_000))
    assert num_parts(request.SerializeToString(), KIND, 99) == 6


@pytest.mark.parametrize("before", [b"", GROUP], ids=["plain", "behind a group"])
def test_counting_ends_at_the_most(before):
    assert num_parts(before + EMPTY_INPUT * 2_000_000, KIND, 50) == 51


def test_any_bytes_are_counted():
    rng = random.Random(3)
    for _ in range(2000):
        raw = rng.randbytes(rng.randrange(40))
        assert 0 <= num_parts(raw, KIND, 1000) <= len(raw)


def many_parameters() -> bytes:
    request = infer()
    for number in range(MAX_PARTS // 4 + 1):
        request.parameters[str(number)].bool_param = True
    return request.SerializeToString()


@pytest.mark.parametrize(
    "raw", [many_parameters(), EMPTY_INPUT * (MAX_PARTS + 1)], ids=["parameters", "inputs"]
)
def test_a_message_of_too_many_parts_is_refused_unparsed(on_stand, raw):
    async def scenario(stand: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stand.channel.unary_unary(INFER)(raw)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"at most {MAX_PARTS} fields" in caught.value.details()

    on_stand(scenario)
