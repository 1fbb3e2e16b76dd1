"""Chats with tools over gRPC, against the same chats over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.client import AsyncOctavoClient, InvalidRequestError, OctavoClient, SamplingParams
from octavo.server.client_requests import chat_request
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.proto.octavo.v1.octavo_pb2_grpc import OctavoServiceStub
from tests.examples import examples
from tests.server.tool_schemas import SCHEMAS

ASK = [{"role": "user", "content": "Do something."}]


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name, "description": f"Does {name}.", "parameters": schema, "strict": strict
            },
        }
        for name, schema in SCHEMAS.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def client(tools_live: Any) -> Iterator[OctavoClient]:
    with OctavoClient(tools_live.grpc, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def stub(tools_live: Any) -> Iterator[Any]:
    with grpc.insecure_channel(tools_live.grpc) as channel:
        yield OctavoServiceStub(channel)


NAMED = {"type": "function", "function": {"name": "listed"}}


@given(
    choice=st.sampled_from(["auto", "required", "none", NAMED]), strict=st.booleans(),
    parallel=st.sampled_from([None, True, False]), size=st.sampled_from([1, 17, 60, 150]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_turn_is_that_of_http_and_its_stream_adds_up(
    client, stub, tools_live, choice, strict, parallel, size, seed
):
    offered = tools(strict=strict)
    body = {
        "messages": ASK, "tools": offered, "tool_choice": choice, "max_tokens": size, "seed": seed
    } | ({} if parallel is None else {"parallel_tool_calls": parallel})  # fmt: skip
    answer = httpx.post(f"{tools_live.http}/v1/chat/completions", json=body, timeout=60).json()
    want = answer["choices"][0]["message"]
    params = SamplingParams(max_tokens=size, seed=seed)
    options = {"tools": offered, "tool_choice": choice, "parallel_tool_calls": parallel}
    turn = client.chat(ASK, params, **options).outputs[0]
    assert (turn.message.content or None) == (want["content"] or None)
    calls = [(call.name, call.arguments) for call in turn.message.tool_calls]
    wanted = [each["function"] for each in want.get("tool_calls", [])]
    assert calls == [(each["name"], each["arguments"]) for each in wanted]
    if turn.finish_reason == "tool_calls":
        for name, arguments in calls:
            if strict or choice not in ("auto",):
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])

    pieces = list(stub.ChatStream(chat_request(ASK, params, **options)))
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.content for piece in pieces) == (turn.message.content or "")
    assert "".join(piece.reasoning for piece in pieces) == (turn.message.reasoning or "")
    joined: dict[int, list[str]] = {}
    for piece in pieces:
        for call in piece.tool_calls:
            if call.id:
                assert call.index not in joined
                joined[call.index] = [call.name, call.arguments]
            else:
                joined[call.index][1] += call.arguments
    assert [tuple(call) for _, call in sorted(joined.items())] == calls
    usage = answer["usage"]
    last = pieces[-1].usage
    assert (last.prompt_tokens, last.completion_tokens) == (
        usage["prompt_tokens"], usage["completion_tokens"],
    )  # fmt: skip


def test_a_call_and_its_result_go_back_into_the_conversation(client, tools_live):
    params = SamplingParams(max_tokens=300, seed=1)
    options = {"tools": tools(), "tool_choice": "required", "parallel_tool_calls": False}
    turn = client.chat(ASK, params, **options).outputs[0]
    [call] = turn.message.tool_calls
    function = {"name": call.name, "arguments": call.arguments}
    whole = [
        *ASK,
        {
            "role": "assistant", "content": "Well:", "reasoning_content": "Hm.",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]  # fmt: skip
    rendered = httpx.post(
        f"{tools_live.http}/tokenize", json={"messages": whole, "tools": tools()}
    ).json()

    async def ask() -> Any:
        async with AsyncOctavoClient(tools_live.grpc, timeout_s=60) as other:
            return await other.chat(
                whole, SamplingParams(max_tokens=4), tools=tools(), request_id="mine",
                priority="high", chat_template_kwargs={"enable_thinking": False},
            )  # fmt: skip

    output = asyncio.run(ask())
    assert output.request_id == "mine"
    message = chat_request(whole, SamplingParams(max_tokens=1), tools=tools())
    with grpc.insecure_channel(tools_live.grpc) as channel:
        answer = OctavoServiceStub(channel).Chat(message)
    assert answer.usage.prompt_tokens == rendered["count"]


def test_without_max_tokens_a_chat_may_fill_the_context(client, tools_live, tools_args):
    context = int(tools_args[tools_args.index("--max-model-len") + 1])

    def num_prompt_tokens(messages: list[dict[str, Any]]) -> int:
        asked = {"messages": messages, "tools": tools()}
        return httpx.post(f"{tools_live.http}/tokenize", json=asked).json()["count"]

    # A letter is a token: about 100 are left to generate.
    num_letters = context - 100 - num_prompt_tokens(ASK)
    full = [{"role": "user", "content": ASK[0]["content"] + "x" * num_letters}]
    assert num_prompt_tokens(full) == context - 100
    output = client.chat(full, tools=tools(), tool_choice="none", chat_template_kwargs=None)
    assert output.outputs[0].finish_reason in ("stop", "length")
    assert output.finished


def chat(**change: Any) -> pb.ChatRequest:
    messages = [pb.ChatMessage(role="user", content="x")]
    values = {"messages": messages, "sampling_params": pb.SamplingParams(max_tokens=2)}
    return pb.ChatRequest(**(values | change))


TOOL = pb.Tool(name="f")
CALL = pb.ToolCall(id="a", name="f", arguments="{}")
BAD: dict[str, tuple[pb.ChatRequest, str]] = {
    "no messages": (chat(messages=[]), "messages"),
    "no role": (chat(messages=[pb.ChatMessage(content="x")]), "messages[0].role"),
    "a result without its call": (
        chat(messages=[pb.ChatMessage(role="tool", tool_call_id="a", content="x")]),
        "messages[0].role",
    ),
    "arguments": (
        chat(
            messages=[
                pb.ChatMessage(
                    role="assistant", tool_calls=[pb.ToolCall(id="a", name="f", arguments="[")]
                ),
            ]
        ),
        "messages[0].tool_calls[0].arguments",
    ),
    "a tool without a name": (chat(tools=[pb.Tool()]), "tools[0].name"),
    "two of a name": (chat(tools=[TOOL, TOOL]), "tools[1].name"),
    "a schema that is no JSON": (
        chat(tools=[pb.Tool(name="f", parameters="{")]), "tools[0].parameters"
    ),
    "a schema of text": (
        chat(tools=[pb.Tool(name="f", parameters='{"type": "string"}')]), "tools[0].parameters.type"
    ),
    "a choice": (chat(tools=[TOOL], tool_choice="f"), "tool_choice"),
    "a choice of no tool": (chat(tools=[TOOL], tool_choice_name="g"), "tool_choice_name"),
    "two choices": (chat(tools=[TOOL], tool_choice="auto", tool_choice_name="f"), "tool_choice"),
    "a choice without tools": (chat(tool_choice="required"), "tool_choice"),
    "several answers": (chat(sampling_params=pb.SamplingParams(n=2)), "n"),
    "scores": (chat(sampling_params=pb.SamplingParams(logprobs=1)), "logprobs"),
    "a budget": (chat(thinking_token_budget=-2), "thinking_token_budget"),
    "names that are no object": (chat(chat_template_kwargs="[]"), "chat_template_kwargs"),
    "names of values that are deep": (
        chat(chat_template_kwargs='{"a": ' + "[" * 3_000 + "]" * 3_000 + "}"),
        "chat_template_kwargs",
    ),
    "the messages as a name": (
        chat(chat_template_kwargs='{"messages": []}'), "chat_template_kwargs"
    ),
    "a long name": (chat(tenant="x" * 257), "tenant"),
    "many messages": (chat(messages=[pb.ChatMessage(role="user")] * 8193), "messages"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("method", ["Chat", "ChatStream"])
def test_bad_input_names_its_field(stub, method, case):
    message, field = BAD[case]

    def ask() -> list[pb.ChatResponse]:
        answer = getattr(stub, method)(message)
        return list(answer if method == "ChatStream" else [answer])

    with pytest.raises(grpc.RpcError) as caught:
        ask()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field} = "), caught.value.details()


def test_what_no_message_can_carry_is_named(client):
    with pytest.raises(InvalidRequestError):
        client.chat([{"content": "x"}])
    with pytest.raises(InvalidRequestError):
        client.chat(ASK, tools=[{"function": {}}])
    with pytest.raises(InvalidRequestError) as caught:
        client.chat(ASK, tools=tools(), tool_choice={"type": "function"})
    assert caught.value.field == "tool_choice"


def test_the_pages_example_runs(tools_live, capsys):
    [code] = examples("tools.md", "py")
    exec(code, {"address": tools_live.grpc, "messages": ASK, "tools": tools()})
    assert capsys.readouterr().out.startswith("tool_calls [('")
