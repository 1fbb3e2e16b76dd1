"""OpenAI's Responses as its client asks for them, of a server whose model writes at random."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples, run_example
from tests.server.tool_schemas import SCHEMAS, an_object

TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": f"Does {name}.", "parameters": schema}
    for name, schema in SCHEMAS.items()
]


def ask(client: openai.OpenAI, **change: Any) -> Any:
    asked = {"model": "tiny", "input": "Do something.", "max_output_tokens": 300, **change}
    return client.responses.create(**asked)


def checked(response: Any) -> list[Any]:
    """The calls of a response, each of which matches its schema."""
    calls = [item for item in response.output if item.type == "function_call"]
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return calls


def test_words_are_a_message_and_the_chats_own(tools_client):
    response = ask(
        tools_client, max_output_tokens=24, instructions="Be short.", metadata={"a": "b"},
        extra_body={"seed": 3},
    )  # fmt: skip
    chat = tools_client.chat.completions.create(
        model="tiny", max_tokens=24, seed=3,
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Do something."},
        ],
    )  # fmt: skip
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert (response.usage.output_tokens, response.metadata) == (24, {"a": "b"})


def test_the_prompt_is_the_chats_own(tools_client, tools_live):
    functions = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in TOOLS
    ]
    call = {"name": "weather", "arguments": '{"city": "Ōsaka"}'}
    chat = [
        {"role": "user", "content": "Do something."},
        {
            "role": "assistant", "content": "Well:", "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Do something."}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {
            "type": "message", "id": "m", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Well:", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", **call},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    rendered = httpx.post(
        f"{tools_live.http}/tokenize", json={"messages": chat, "tools": functions}
    ).json()
    counted = tools_client.responses.input_tokens.count(model="tiny", input=items, tools=TOOLS)
    assert counted.input_tokens == rendered["count"]
    usage = ask(tools_client, input=items, tools=TOOLS, max_output_tokens=1).usage
    assert usage.input_tokens == rendered["count"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_call_is_made_once(tools_client, name):
    response = ask(
        tools_client, tools=TOOLS, tool_choice={"type": "function", "name": name},
        extra_body={"seed": 1},
    )  # fmt: skip
    [call] = checked(response)
    assert (call.name, call.status, response.status) == (name, "completed", "completed")


def test_a_conversation_goes_on_with_the_items_that_were_answered(tools_client):
    conversation: list[Any] = [{"role": "user", "content": "Do something."}]
    for seed in range(2):
        response = ask(
            tools_client, input=conversation, tools=TOOLS, tool_choice="required",
            parallel_tool_calls=False, extra_body={"seed": seed},
        )  # fmt: skip
        [call] = checked(response)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        conversation += [*response.output, output]
    response = ask(tools_client, input=conversation, tools=TOOLS, max_output_tokens=4)
    assert response.output_text


def test_a_format_binds_the_words(tools_client):
    wanted: Any = {
        "format": {
            "type": "json_schema", "name": "colour", "strict": True,
            "schema": an_object({"colour": {"enum": ["red", "blue"]}}),
        }
    }  # fmt: skip
    response = ask(tools_client, text=wanted, reasoning={"effort": "low"})
    assert json.loads(response.output_text)["colour"] in ("red", "blue")


NAMED = {"type": "function", "name": "listed"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}


@given(
    choice=st.sampled_from(["auto", "required", "none", NAMED, ALLOWED]),
    strict=st.booleans(), parallel=st.booleans(), size=st.sampled_from([1, 17, 60, 150]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stream_adds_up_to_the_whole(tools_client, choice, strict, parallel, size, seed):
    asked: dict[str, Any] = {
        "model": "tiny", "input": "Do something.", "tool_choice": choice,
        "tools": [{**tool, "strict": strict} for tool in TOOLS], "max_output_tokens": size,
        "parallel_tool_calls": parallel, "extra_body": {"seed": seed},
    }  # fmt: skip
    whole = tools_client.responses.create(**asked)
    events = list(tools_client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"

    def plain(item: Any) -> Any:
        return item.model_dump(exclude={"id", "call_id"})

    streamed = events[-1].response
    assert [plain(item) for item in streamed.output] == [plain(item) for item in whole.output]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == streamed.output
    for index, item in enumerate(streamed.output):
        pieces = [
            event.delta for event in events
            if event.type.endswith(".delta") and event.output_index == index
        ]  # fmt: skip
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(pieces) == text
        assert all(pieces)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    with tools_client.responses.stream(**asked) as stream:  # the client's own joining
        for _ in stream:
            pass


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
GOOD: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "an empty conversation": ({"input": []}, "input"),
    "an item that is none": ({"input": ["x"]}, "input[0]"),
    "a kind": ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    "a role": ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    "no text": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    "an output without a call": ({"input": [OUTPUT]}, "input[0].call_id"),
    "an output of another call": (
        {"input": [CALL, {**OUTPUT, "call_id": "b"}]}, "input[1].call_id"
    ),
    "a call without an output": ({"input": [CALL]}, "input[0]"),
    "arguments": ({"input": [{**CALL, "arguments": "["}, OUTPUT]}, "input[0].arguments"),
    "a call without a name": ({"input": [{**CALL, "name": ""}, OUTPUT]}, "input[0].name"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "too many tokens": ({"max_output_tokens": 10**6}, "max_output_tokens"),
    "a hot answer": ({"temperature": 3}, "temperature"),
    "an answer before": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "background": ({"background": True}, "background"),
    "scores": ({"top_logprobs": 2}, "top_logprobs"),
    "more": ({"include": ["file_search_call.results"]}, "include[0]"),
    "an unknown field": ({"max_tokens": 3}, "max_tokens"),
    "a server's tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "two of a name": ({"tools": [GOOD, GOOD]}, "tools[1].name"),
    "a schema of text": (
        {"tools": [{**GOOD, "parameters": {"type": "string"}}]}, "tools[0].parameters.type"
    ),
    "a choice of no tool": (
        {"tools": [GOOD], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"
    ),
    "a server's choice": (
        {"tools": [GOOD], "tool_choice": {"type": "web_search"}}, "tool_choice.type"
    ),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "allowed tools": (
        {"tools": [GOOD], "tool_choice": {**ALLOWED, "tools": [NAMED]}},
        "tool_choice.tools[0].name",
    ),
    "an effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "a format": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "text"}}}},
        "text.format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_bad_input_names_its_field(tools_live, case, stream):
    change, field = BAD[case]
    body = {"model": "tiny", "input": "x", "max_output_tokens": 2, "stream": stream, **change}
    answer = httpx.post(f"{tools_live.http}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    wrong = answer.json()["error"]
    assert (wrong["param"], wrong["code"]) == (field, "invalid_request")
    assert wrong["message"].startswith(f"{field} = ")
    assert "is not allowed" in wrong["message"]


def test_another_model_is_not_found(tools_client):
    with pytest.raises(openai.NotFoundError) as caught:
        ask(tools_client, model="another")
    assert caught.value.code == "model_not_found"


def test_the_example_runs(tools_live):
    [code] = examples("responses.md")
    shown = run_example(code, tools_live)
    assert shown.startswith("completed get_weather {'city': '")
    assert shown.split()[-1].isdigit()


KEYS = (
    *("type", "text", "name", "parameters", "call_id", "arguments", "content", "role", "output"),
    *("effort", "format", "schema", "mode", "tools", "summary", "id", "strict"),
)
WORDS = ("", "a", "message", "function", "function_call", "function_call_output", "reasoning")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer", ""]), "call_id": st.just("a"),
        "name": st.sampled_from(["f", "a b"]), "arguments": st.sampled_from(["", "{}", "{", "[]"]),
        "content": PLAIN, "output": PLAIN, "summary": PLAIN,
    },
)  # fmt: skip
OTHERS = (
    *("instructions", "tools", "tool_choice", "reasoning", "text", "metadata", "stream"),
    *("include", "temperature", "top_k", "store", "chat_template_kwargs", "parallel_tool_calls"),
)
FIELDS = st.fixed_dictionaries(
    {"input": st.lists(ITEM, max_size=4) | PLAIN}, optional=dict.fromkeys(OTHERS, PLAIN)
)


@given(body=FIELDS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_shape_of_a_request_is_an_error_of_the_server(tools_live, body):
    for path, more in (("", {"max_output_tokens": 2}), ("/input_tokens", {})):
        url = f"{tools_live.http}/v1/responses{path}"
        answer = httpx.post(url, json=body | more, timeout=60)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"]
