"""A library's panic, which is no `Exception`, ends the call that met it, and that call alone."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from octavo.engine.errors import OctavoError
from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto.kserve.v2 import inference_pb2 as kserve

KSERVE = "/inference.GRPCInferenceService"


class PanicError(BaseException):
    """As pyo3's PanicException."""


def _ask(text: str) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name="counting", id="k")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    return request


def _panics(*_: Any, **__: Any) -> list[int]:
    raise PanicError("index out of bounds")


def test_grpc_calls_end(on_stand) -> None:
    async def scenario(stand: Any) -> None:
        stand.engine.gate.clear()
        stand.engine.failure = PanicError("index out of bounds")
        stand.engine.gate.set()
        params = SamplingParams(max_tokens=3)
        with pytest.raises(OctavoError, match="incident"):
            await stand.client.generate("a", params)
        with pytest.raises(OctavoError, match="incident"):
            async for _ in stand.client.stream("a", params):
                pass
        stand.engine.tokenizer.encode = _panics
        with pytest.raises(OctavoError, match="incident"):
            await stand.client.tokenize("a")
        stand.engine.failure = None
        assert (await stand.client.generate("a", params)).outputs[0].token_ids == [1, 2, 3]
        assert not stand.engine.live

    on_stand(scenario)


def test_kserve_calls_end(on_stand) -> None:
    async def scenario(stand: Any) -> None:
        stand.engine.failure = PanicError("index out of bounds")
        infer = stand.channel.unary_unary(
            f"{KSERVE}/ModelInfer", kserve.ModelInferRequest.SerializeToString
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await infer(_ask("a"))
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        stream = stand.channel.stream_stream(
            f"{KSERVE}/ModelStreamInfer", kserve.ModelInferRequest.SerializeToString
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stream(iter([_ask("a")])):
                pass
        assert failure.value.code() is grpc.StatusCode.INTERNAL

    on_stand(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
def test_http_calls_end(on_stand, stream: bool, prompts: str | list[str]) -> None:
    async def scenario(stand: Any) -> None:
        stand.engine.failure = PanicError("index out of bounds")
        async with httpx.AsyncClient(base_url=stand.http, timeout=30) as client:
            body = {"prompt": prompts, "max_tokens": 3, "stream": stream}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == (200 if stream else 500)
            assert "internal error, incident" in answer.text
            assert (await client.get("/health")).status_code == 200

    on_stand(scenario, http_port=0)
