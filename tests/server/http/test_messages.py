"""Anthropic's Messages as its client asks for them, of a server whose model writes at random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples, run_example
from tests.server.tool_schemas import SCHEMAS, an_object

ASK: list[Any] = [{"role": "user", "content": "Do something."}]
TOOLS: list[Any] = [
    {"name": name, "description": f"Does {name}.", "input_schema": schema}
    for name, schema in SCHEMAS.items()
]
ONE = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(tools_live: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=tools_live.http, api_key="unused", auth_token=None, max_retries=0
    ) as made:
        yield made


def ask(client: anthropic.Anthropic, **change: Any) -> Any:
    asked = {"model": "tiny", "messages": ASK, "max_tokens": 300, **change}
    return client.messages.create(**asked)


def checked(message: Any) -> list[Any]:
    """The calls of a message, each of which matches its schema."""
    calls = [block for block in message.content if block.type == "tool_use"]
    for call in calls:
        jsonschema.validate(call.input, SCHEMAS[call.name])
    return calls


def test_words_are_a_block_of_text(client):
    message = ask(client, max_tokens=8, extra_body={"seed": 1}, system="Be short.")
    [block] = message.content
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert block.type == "text"
    assert block.text
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8
    assert message.id.startswith("msg_")
    assert message._request_id


def test_the_prompt_is_the_chats_own(client, tools_live):
    """Both APIs render one conversation: text, calls, results, tools and the system's words."""
    functions = [
        {
            "type": "function",
            "function": {
                "name": tool["name"], "description": tool["description"],
                "parameters": tool["input_schema"],
            },
        }
        for tool in TOOLS
    ]  # fmt: skip
    call = {"name": "weather", "arguments": '{"city": "Ōsaka"}'}
    chat = [
        {"role": "system", "content": "Be short."}, *ASK,
        {
            "role": "assistant", "content": "Well:", "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    messages: list[Any] = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Well:"},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ōsaka"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    rendered = httpx.post(
        f"{tools_live.http}/tokenize", json={"messages": chat, "tools": functions}
    ).json()
    counted = client.messages.count_tokens(
        model="tiny", system=[{"type": "text", "text": "Be short."}], messages=messages,
        tools=TOOLS,
    )  # fmt: skip
    assert counted.input_tokens == rendered["count"]
    usage = ask(
        client, system="Be short.", messages=messages, tools=TOOLS, max_tokens=1
    ).usage  # fmt: skip
    assert usage.input_tokens + usage.cache_read_input_tokens == rendered["count"]
    again = ask(client, system="Be short.", messages=messages, tools=TOOLS, max_tokens=1).usage
    assert again.cache_read_input_tokens > 0
    assert again.input_tokens + again.cache_read_input_tokens == rendered["count"]


def test_an_answer_is_the_chats_own(client, tools_client):
    """One seed gives one text, whichever API asks for it."""
    said = ask(client, max_tokens=24, extra_body={"seed": 3}).content[0].text
    chat = tools_client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=24, temperature=1.0, seed=3
    )
    assert said == chat.choices[0].message.content


def test_the_answer_goes_on_with_the_assistants_last_words(client, tools_client):
    messages = [*ASK, {"role": "assistant", "content": "The best is ("}]
    said = ask(client, messages=messages, max_tokens=12, extra_body={"seed": 3}).content[0].text
    chat = tools_client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=1.0, seed=3,
        extra_body={"continue_final_message": True},
    )  # fmt: skip
    assert said == chat.choices[0].message.content


def test_a_stop_sequence_is_named(client):
    text = ask(client, max_tokens=30, extra_body={"seed": 5}).content[0].text
    stop = text[10:12]
    message = ask(client, max_tokens=30, extra_body={"seed": 5}, stop_sequences=["§§", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_call_is_made_once(client, name):
    choice = {"type": "tool", "name": name}
    message = ask(client, tools=TOOLS, tool_choice=choice, extra_body={"seed": 1})
    [call] = checked(message)
    assert (call.name, message.stop_reason) == (name, "tool_use")


def test_a_conversation_goes_on_with_the_blocks_that_were_answered(client):
    messages = list(ASK)
    for seed in range(2):
        message = ask(
            client, messages=messages, tools=TOOLS, tool_choice=ONE, extra_body={"seed": seed}
        )
        [call] = checked(message)
        messages.append({"role": "assistant", "content": message.content})
        result = {
            "type": "tool_result", "tool_use_id": call.id, "is_error": seed == 1,
            "content": [{"type": "text", "text": "done"}],
        }  # fmt: skip
        messages.append({"role": "user", "content": [result]})
    assert ask(client, messages=messages, tools=TOOLS, max_tokens=4).content


def test_no_choice_makes_no_calls(client):
    message = ask(client, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=20)
    assert [block.type for block in message.content] == ["text"]


def test_a_format_binds_the_words(client):
    schema = an_object({"colour": {"enum": ["red", "blue"]}})
    config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    text = ask(client, output_config=config).content[0].text
    assert text.replace(" ", "").replace("\n", "") in ('{"colour":"red"}', '{"colour":"blue"}')


LISTED = {"type": "tool", "name": "listed"}
CHOICES = [{"type": "auto"}, {"type": "any"}, ONE, {"type": "none"}, LISTED]


@given(
    choice=st.sampled_from(CHOICES),
    strict=st.booleans(),
    stop=st.sampled_from([[], ["}"], ["e", '": "'], ["never seen"]]),
    size=st.sampled_from([1, 17, 60, 150]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stream_adds_up_to_the_whole(client, choice, strict, stop, size, seed):
    asked: dict[str, Any] = {
        "model": "tiny", "messages": ASK, "tools": [{**tool, "strict": strict} for tool in TOOLS],
        "tool_choice": choice, "stop_sequences": stop, "max_tokens": size,
        "extra_body": {"seed": seed},
    }  # fmt: skip
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_message()

    def plain(message: Any) -> Any:
        made = message.model_dump(exclude={"id"})
        for name in ("cache_read_input_tokens", "input_tokens"):
            made["usage"].pop(name)
        for block in made["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
        return made

    assert plain(streamed) == plain(whole)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    begun = [event.index for event in events if event.type == "content_block_start"]
    ended = [event.index for event in events if event.type == "content_block_stop"]
    assert begun == ended == list(range(len(whole.content)))
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def called(*results: dict[str, Any], **call: Any) -> dict[str, Any]:
    block = {"type": "tool_use", "id": "a", "name": "f", "input": {}, **call}
    return {
        "messages": [
            *ASK,
            {"role": "assistant", "content": [block]},
            *([{"role": "user", "content": list(results)}] if results else []),
        ]
    }


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
GOOD: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"max_tokens": None}, "max_tokens"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "too many tokens": ({"max_tokens": 10**6}, "max_tokens"),
    "no messages": ({"messages": None}, "messages"),
    "an empty conversation": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "an image": (said({"type": "image", "source": {}}), "messages[0].content[0].type"),
    "a document": (
        said({"type": "text", "text": "x"}, {"type": "document"}), "messages[0].content[1].type"
    ),
    "a block without a type": (said({"text": "x"}), "messages[0].content[0]"),
    "a text that is none": (said({"type": "text", "text": 1}), "messages[0].content[0].text"),
    "a system's image": ({"system": [{"type": "image"}]}, "system[0].type"),
    "a system's number": ({"system": 1}, "system"),
    "a hot answer": ({"temperature": 3}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "top_k": ({"top_k": -7}, "top_k"),
    "too many stops": ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences"),
    "an unknown field": ({"max_token": 3}, "max_token"),
    "a container": ({"container": "x"}, "container"),
    "servers of tools": ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    "a tool that is none": ({"tools": ["f"]}, "tools[0]"),
    "a server's tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"
    ),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "a schema that is none": (
        {"tools": [GOOD, {"name": "g", "input_schema": {"type": "object", "properties": 1}}]},
        "tools[1].input_schema",
    ),
    "a schema of text": (
        {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
        "tools[0].input_schema.type",
    ),
    "two of a name": ({"tools": [GOOD, GOOD]}, "tools[1].name"),
    "a tool to be loaded later": (
        {"tools": [{**GOOD, "defer_loading": True}]}, "tools[0].defer_loading"
    ),
    "a choice of no tool": (
        {"tools": [GOOD], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"
    ),
    "a choice in OpenAI's words": (
        {"tools": [GOOD], "tool_choice": {"type": "required"}}, "tool_choice.type"
    ),
    "a choice that is text": ({"tools": [GOOD], "tool_choice": "auto"}, "tool_choice"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "parallel": (
        {"tools": [GOOD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
    ),
    "a result without a call": (said(RESULT), "messages[0].content[0].tool_use_id"),
    "a result of another call": (
        called({**RESULT, "tool_use_id": "b"}), "messages[2].content[0].tool_use_id"
    ),
    "a result after words": (
        called({"type": "text", "text": "x"}, RESULT), "messages[2].content[1].type"
    ),
    "a result of an image": (
        called({**RESULT, "content": [{"type": "image"}]}),
        "messages[2].content[0].content[0].type",
    ),
    "a call without a result": (called(), "messages[1]"),
    "a call without a name": (called(RESULT, name=None), "messages[1].content[0].name"),
    "a call with text": (called(RESULT, input="{}"), "messages[1].content[0].input"),
    "a thought kept from us": (
        {"messages": [*ASK, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        "messages[1].content[0].type",
    ),
    "thinking": ({"thinking": {"type": "on"}}, "thinking.type"),
    "a budget": (
        {"thinking": {"type": "enabled", "budget_tokens": 3}, "max_tokens": 8},
        "thinking.budget_tokens",
    ),
    "an effort": ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    "a format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "a priority": ({"priority": "vip"}, "priority"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_bad_input_names_its_field(tools_live, case, stream):
    change, field = BAD[case]
    body = {"model": "tiny", "messages": ASK, "max_tokens": 2, "stream": stream, **change}
    body = {name: value for name, value in body.items() if value is not None}
    answer = httpx.post(f"{tools_live.http}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    wrong = answer.json()
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "invalid_request_error")
    assert wrong["error"]["message"].startswith(f"{field} = "), wrong["error"]["message"]
    assert "is not allowed" in wrong["error"]["message"]


def test_errors_are_anthropics(client, tools_live):
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, tools=[{"name": "f"}])
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="another")
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="another", messages=ASK)
    for path, body in (("/v1/messages/nowhere", b"{}"), ("/v1/messages", b"{")):
        answer = httpx.post(f"{tools_live.http}{path}", content=body)
        assert answer.status_code in (400, 404)
        assert answer.json()["type"] == "error"
    with pytest.raises(anthropic.APIStatusError) as late:
        ask(client, max_tokens=200, extra_body={"timeout_s": 0.001})
    assert (late.value.status_code, late.value.type) == (504, "timeout_error")


def test_its_own_loop_over_tools_goes_on_without_a_kept_conversation(client):
    """It asks for a thread, and sends the whole conversation once it is told that there is none."""
    asked = []

    @anthropic.beta_tool
    def get_days(days: int) -> str:
        """Weather of the next days."""
        asked.append(days)
        return "Sunny."

    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=400, messages=ASK, tools=[get_days], max_iterations=1,
        tool_choice={"type": "tool", "name": "get_days"},
        extra_body={"temperature": 0.0},
    )  # fmt: skip
    [first] = list(runner)
    assert first.stop_reason == "tool_use"
    assert len(asked) == 1


def test_the_example_runs(tools_live):
    [code] = examples("messages.md")
    shown = run_example(code, tools_live)
    assert shown.startswith("tool_use get_weather {'city': '")
    assert shown.split()[-1].isdigit()


def test_a_template_that_knows_of_no_tools_is_said_to(live):
    body = {"messages": ASK, "max_tokens": 2, "tools": TOOLS}
    answer = httpx.post(f"{live.http}/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("tools = ")


KEYS = (
    *(
        "type",
        "text",
        "name",
        "input_schema",
        "id",
        "input",
        "content",
        "tool_use_id",
        "properties",
    ),
    *("thinking", "signature", "is_error", "budget_tokens", "format", "schema", "effort", "source"),
)
WORDS = ("", "a", "text", "tool_use", "tool_result", "thinking", "object", "auto", "any", "tool")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)},
    optional={
        "text": st.sampled_from(["a", "b"]), "id": st.just("a"), "tool_use_id": st.just("a"),
        "name": st.sampled_from(["f", "a b"]), "input": PLAIN, "content": PLAIN, "thinking": PLAIN,
    },
)  # fmt: skip
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", ""]),
        "content": PLAIN | st.lists(BLOCK, max_size=3),
    }
)
OTHERS = (
    *("system", "tools", "tool_choice", "thinking", "output_config", "metadata", "stream"),
    *("stop_sequences", "temperature", "top_k", "cache_control", "chat_template_kwargs"),
)
FIELDS = st.fixed_dictionaries(
    {"messages": st.lists(TURN, max_size=4) | PLAIN}, optional=dict.fromkeys(OTHERS, PLAIN)
)


@given(body=FIELDS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_shape_of_a_request_is_an_error_of_the_server(tools_live, body):
    for path, more in (("/v1/messages", {"max_tokens": 2}), ("/v1/messages/count_tokens", {})):
        answer = httpx.post(f"{tools_live.http}{path}", json=body | more, timeout=60)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["type"] == "invalid_request_error"
