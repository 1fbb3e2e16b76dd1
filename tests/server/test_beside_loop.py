"""Long messages are worked on in threads and short ones at once, whatever way they come in."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.server.beside_loop import SHORT_BYTES
from octavo.server.client_requests import chat_request
from octavo.server.http.messages import translation as messages_translation
from octavo.server.http.responses import translation as responses_translation
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.proto.smg import vllm_engine_pb2 as smg_pb
from octavo.server.sampling_message import sampling_params_to_message

HI = [{"role": "user", "content": "hi"}]


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "go", "parameters": schema}}


def responses_tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "name": "go", "parameters": schema}


HTTP: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/chat/completions": lambda schema: {"messages": HI, "tools": [tool(schema)]},
    "/v1/chat/completions ": lambda schema: {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    },
    "/v1/completions": lambda schema: {"prompt": "x", "guided_json": schema},
    "/v1/messages": lambda schema: {
        "messages": HI, "max_tokens": 2, "tools": [{"name": "go", "input_schema": schema}]
    },
    "/v1/messages/count_tokens": lambda schema: {
        "messages": HI, "tools": [{"name": "go", "input_schema": schema}]
    },
    "/v1/responses": lambda schema: {"input": HI, "tools": [responses_tool(schema)]},
    "/v1/responses/input_tokens": lambda schema: {"input": HI, "tools": [responses_tool(schema)]},
    "/tokenize": lambda schema: {"messages": HI, "tools": [tool(schema)]},
}  # fmt: skip


def grpc_asks(schema: Any) -> dict[str, Any]:
    """Method -> a message with the schema."""
    params = SamplingParams(structured_outputs={"json": schema})
    own = "/octavo.v1.OctavoService"
    return {
        f"{own}/Chat": chat_request(HI, tools=[tool(schema)]),
        f"{own}/ChatStream": chat_request(HI, params),
        f"{own}/GenerateStream": pb.GenerateRequest(
            prompt="x",
            sampling_params=sampling_params_to_message(params.replace(max_tokens=3)),
        ),
        "/vllm.grpc.engine.VllmEngine/Generate": smg_pb.GenerateRequest(
            request_id="a",
            text="x",
            sampling_params=smg_pb.SamplingParams(json_schema=json.dumps(schema)),
        ),
    }


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads in which schemas and conversations were read."""
    names: list[str] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            names.append(threading.current_thread().name)
            return call(*args)

        return noted

    init = noting(StructuredOutputsParams.__post_init__)
    monkeypatch.setattr(StructuredOutputsParams, "__post_init__", init)
    for module in (messages_translation, responses_translation):
        monkeypatch.setattr(module, "conversation", noting(module.conversation))
    return names


def where(seen: list[str]) -> set[str]:
    """Kinds of threads since the last call."""
    kinds = {name.rpartition("_")[0] or name for name in seen}
    seen.clear()
    return kinds


@pytest.mark.parametrize(
    ("size", "kind"), [(1, "MainThread"), (SHORT_BYTES, "octavo-messages")], ids=["short", "long"]
)
def test_a_messages_length_says_where_it_is_worked_on(on_stand, seen, size, kind):
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * size]}}}

    async def over_http(stand) -> None:
        async with httpx.AsyncClient(base_url=stand.http, timeout=20) as client:
            for path, body in HTTP.items():
                # What this engine does not serve is refused after it was read.
                assert (await client.post(path.strip(), json=body(schema))).status_code < 500
                assert where(seen) == {kind}, path

    async def over_grpc(stand) -> None:
        asks = grpc_asks(schema)
        where(seen)  # this process is the client, too
        for method, message in asks.items():
            call = stand.channel.unary_stream(method)(message.SerializeToString())
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            assert await call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
            assert where(seen) == {kind}, method

    async def scenario(stand) -> None:
        await over_http(stand)
        await over_grpc(stand)

    on_stand(scenario, http_port=0)
