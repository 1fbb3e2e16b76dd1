"""Tools as OpenAI's client asks for them, of a live server whose model writes at random."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.tool_schemas import SHORT, an_object

ASK: list[Any] = [{"role": "user", "content": "Do something."}]


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, **more}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": an_object({"city": SHORT, "days": {"type": "integer", "minimum": 1, "maximum": 9}}),
    "nested": an_object({"at": an_object({"x": {"enum": [1, 2]}, "y": {"type": "boolean"}})}),
    "listed": an_object(
        {"ids": {"type": "array", "items": {"enum": ["ä", 'b"', "c\\"]}, "maxItems": 3}}
    ),
    "referred": an_object(
        {"one": {"$ref": "#/$defs/kind"}}, **{"$defs": {"kind": {"enum": ["</tool_call>", "{"]}}}
    ),
    "either": an_object({"v": {"anyOf": [{"type": "null"}, {"type": "boolean"}, SHORT]}}),
    "nothing": an_object({}),
}
TOOLS = [tool(name, schema, description=f"Does {name}.") for name, schema in SCHEMAS.items()]
SIZE = {"max_completion_tokens": 400, "temperature": 1.0}


def checked(message: Any, schemas: dict[str, Any] = SCHEMAS) -> list[tuple[str, Any]]:
    """Names and arguments of a message's calls, each of which matches its schema."""
    calls = []
    for call in message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, schemas[call.function.name])
        calls.append((call.function.name, arguments))
    return calls


def choice_of(client: openai.OpenAI, **ask: Any) -> Any:
    ask = {"model": "tiny", "messages": ASK, "tools": TOOLS, **SIZE, **ask}
    [choice] = client.chat.completions.create(**ask).choices
    return choice


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_match_their_schemas(tools_client, seed):
    choice = choice_of(
        tools_client, tool_choice="required", seed=seed, parallel_tool_calls=seed % 2 == 0
    )
    assert choice.message.content is None
    if choice.finish_reason == "tool_calls":
        assert checked(choice.message)
    else:  # a random model may call for ever, where it may
        assert (choice.finish_reason, seed % 2) == ("length", 0)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_call_is_made_once_and_matches_its_schema(tools_client, name):
    named = {"type": "function", "function": {"name": name}}
    choice = choice_of(tools_client, tool_choice=named, seed=1)
    [(called, _)] = checked(choice.message)
    assert (called, choice.finish_reason) == (name, "stop")


def test_a_strict_tool_has_the_properties_that_it_names_and_no_others(tools_client):
    closed = an_object({"n": {"type": "boolean"}})
    left_open = {key: value for key, value in closed.items() if key != "additionalProperties"}
    choice = choice_of(
        tools_client, tools=[tool("f", left_open, strict=True)], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    assert checked(choice.message, {"f": closed})


def test_allowed_tools_may_be_called_and_no_others(tools_client):
    allowed = {"mode": "required", "tools": [tool("nothing"), tool("either")]}
    choice = choice_of(
        tools_client, seed=2, parallel_tool_calls=False,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )  # fmt: skip
    [(called, _)] = checked(choice.message)
    assert called in ("nothing", "either")
    assert choice.finish_reason == "tool_calls"


def test_content_follows_the_format_that_is_asked_for_beside_tools(tools_client, tools_live):
    """The turn is an answer or calls; a bias against an answer's first character decides."""
    wanted = {"structured_outputs": {"choice": ["yes", "no"]}}
    ask = {"seed": 1, "extra_body": wanted, "parallel_tool_calls": False}
    tokens = {
        c: httpx.post(f"{tools_live.http}/tokenize", json={"prompt": c}).json()["tokens"][0]
        for c in "<yn"
    }
    said = choice_of(tools_client, **ask, logit_bias={str(tokens["<"]): -100})
    assert said.message.content in ("yes", "no")
    assert (said.message.tool_calls, said.finish_reason) == (None, "stop")
    called = choice_of(tools_client, **ask, logit_bias={str(tokens[c]): -100 for c in "yn"})
    assert checked(called.message)
    assert (called.message.content, called.finish_reason) == (None, "tool_calls")


def test_without_a_choice_words_are_content(tools_client):
    choice = choice_of(tools_client, seed=1, max_completion_tokens=20)
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")


def test_what_a_turn_may_not_say_otherwise_leaves_a_free_choice_free(tools_client):
    extra = {"ignore_eos": True, "min_tokens": 5}
    assert choice_of(tools_client, max_completion_tokens=20, extra_body=extra).message.content
    with pytest.raises(openai.BadRequestError) as caught:
        choice_of(tools_client, tool_choice="required", extra_body=extra)
    assert caught.value.param == "min_tokens"


def test_no_choice_leaves_the_tools_in_the_prompt(tools_client, tools_live):
    said = {}
    for tools in (TOOLS, None):
        extra = {} if tools is None else {"tool_choice": "none"}
        answer = tools_client.chat.completions.create(
            model="tiny", messages=ASK, max_completion_tokens=4,
            **({} if tools is None else {"tools": tools}), **extra,
        )  # fmt: skip
        said[tools is None] = answer.usage.prompt_tokens
        assert answer.choices[0].message.tool_calls is None
    assert said[False] > said[True] + 500
    rendered = httpx.post(
        f"{tools_live.http}/tokenize", json={"messages": ASK, "tools": TOOLS}
    ).json()
    assert rendered["count"] == said[False]


def joined(parts: list[Any]) -> dict[int, dict[str, Any]]:
    """What a stream's events say, put together for each choice."""
    whole: dict[int, dict[str, Any]] = {}
    for part in parts:
        for choice in part.choices:
            said = whole.setdefault(
                choice.index, {"content": "", "calls": [], "end": None, "scores": [], "role": []}
            )
            delta = choice.delta
            said["content"] += delta.content or ""
            said["role"] += [delta.role] if delta.role else []
            assert said["end"] is None
            said["end"] = choice.finish_reason
            said["scores"] += choice.logprobs.content if choice.logprobs else []
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(said["calls"])
                    assert (call.type, call.function.arguments) == ("function", "")
                    said["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.function.name is None
                    said["calls"][call.index][2] += call.function.arguments
    return whole


def as_streamed(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "content": message.content or "",
        "calls": [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls or []],
        "end": choice.finish_reason,
        "scores": choice.logprobs.content if choice.logprobs else [],
        "role": ["assistant"],
    }


NAMED = {"type": "function", "function": {"name": "weather"}}


@given(
    n=st.integers(1, 3),
    choice=st.sampled_from(["auto", "required", "none", NAMED]),
    strict=st.booleans(), parallel=st.booleans(), scores=st.booleans(),
    stop=st.sampled_from([None, ["}"], ["e", '": "'], ["never seen"]]),
    format=st.sampled_from([None, {"structured_outputs": {"regex": "[a-z]{2,8}"}}]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stream_adds_up_to_the_whole(
    tools_client, n, choice, strict, parallel, scores, stop, format, seed
):
    tools = [tool(name, SCHEMAS[name], strict=strict) for name in ("weather", "listed")]
    ask: dict[str, Any] = {
        "model": "tiny", "messages": ASK, "tools": tools, "n": n, "tool_choice": choice,
        "seed": seed, "parallel_tool_calls": parallel, "max_completion_tokens": 120,
        "temperature": 1.0, "extra_body": format or {},
    }  # fmt: skip
    ask |= {} if stop is None else {"stop": stop}
    ask |= {"logprobs": True, "top_logprobs": 1} if scores else {}
    whole = tools_client.chat.completions.create(**ask)
    options = {"include_usage": True}
    parts = list(tools_client.chat.completions.create(**ask, stream=True, stream_options=options))
    said = joined(parts)
    usage = parts[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    ids = []
    for each in whole.choices:
        expected, streamed = as_streamed(each), said[each.index]
        for calls in (expected["calls"], streamed["calls"]):
            ids += [call.pop(0) for call in calls]
        assert streamed == expected
        if scores:
            assert each.logprobs.content
    assert len(set(ids)) == len(ids)
    if scores and n == 1:
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CALLED = [
    *ASK,
    {
        "role": "assistant", "content": None,
        "tool_calls": [called("a", "weather", '{"city": "Ōsaka"}'), called("b", "nothing", "")],
    },
    {"role": "tool", "tool_call_id": "b", "content": "done"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
]  # fmt: skip


def test_calls_and_their_results_are_rendered_by_the_models_template(tools_client, tools_live):
    tokens = httpx.post(
        f"{tools_live.http}/tokenize", json={"messages": CALLED, "tools": TOOLS}
    ).json()["tokens"]
    text = httpx.post(f"{tools_live.http}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ōsaka"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert choice_of(tools_client, messages=CALLED, max_completion_tokens=4).message.content


def test_a_conversation_goes_on_with_the_message_that_was_answered(tools_client):
    """As agents do: the answered message, dumped with all its nulls, and a result for each call."""
    messages = list(ASK)
    for seed in range(2):
        message = choice_of(
            tools_client, messages=messages, tool_choice="required", seed=seed,
            parallel_tool_calls=False,
        ).message  # fmt: skip
        messages.append(message.model_dump())
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "done"}
            for call in message.tool_calls
        ]
    assert len(messages) == 5


def call(**change: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}} | change
        ],
    }


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"tools": {"type": "function"}}, "tools"),
    "no object": ({"tools": ["f"]}, "tools[0]"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "another type": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "a long name": ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
    "a name with a dot": ({"tools": [tool("a.b")]}, "tools[0].function.name"),
    "the same name": ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
    "a description": ({"tools": [tool("f", description=1)]}, "tools[0].function.description"),
    "strictness": ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict"),
    "parameters": ({"tools": [tool("f", "x")]}, "tools[0].function.parameters"),  # type: ignore[arg-type]
    "a list for arguments": (
        {"tools": [tool("f", {"type": "array"})]}, "tools[0].function.parameters.type"
    ),
    "too many": ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
    "too long": (
        {"tools": [tool(f"f{i}", description="x" * 70_000) for i in range(2)]}, "tools"
    ),
    "too deep": (
        {"tools": [tool("f", json.loads('{"not":' * 60 + "{}" + "}" * 60))]},
        "tools[0].function.parameters",
    ),
    "a type that is none": (
        {"tools": [tool("g"), tool("f", an_object({"x": {"type": "text"}}))]},
        "tools[1].function.parameters",
    ),
    "a keyword, where it counts": (
        {"tools": [tool("f", an_object({"x": {"not": {}}}), strict=True)]},
        "tools[0].function.parameters",
    ),
    "a choice of nothing": ({"tool_choice": "any"}, "tool_choice"),
    "a choice without a tool": ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    "a choice that names no tool": (
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    "a choice in another API's words": (
        {"tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"
    ),
    "allowed tools without a mode": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": TOOLS}}},
        "tool_choice.allowed_tools.mode",
    ),
    "allowed tools that are none": (
        {
            "tool_choice": {
                "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("x")]}
            }
        },
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    "parallel": ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "a function call": ({"function_call": {"name": "f"}}, "function_call"),
    "tools for the template": ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    "a result without a call": (
        {"messages": [*ASK, {"role": "tool", "tool_call_id": "a", "content": "x"}]},
        "messages[1].role",
    ),
    "a result of another call": (
        {"messages": [*ASK, call(), {"role": "tool", "tool_call_id": "b", "content": "x"}]},
        "messages[2].tool_call_id",
    ),
    "a result of no call": (
        {"messages": [*ASK, call(), {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"
    ),
    "a result after the user": (
        {"messages": [call(), *ASK, {"role": "tool", "tool_call_id": "a", "content": "x"}]},
        "messages[2].role",
    ),
    "a call of the user": ({"messages": [call() | {"role": "user"}]}, "messages[0].tool_calls"),
    "a call without a function": (
        {"messages": [call(function=None)]}, "messages[0].tool_calls[0].function"
    ),
    "arguments that are no JSON": (
        {"messages": [call(function={"name": "f", "arguments": "{"})]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "arguments that are no object": (
        {"messages": [call(function={"name": "f", "arguments": "[1]"})]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "an old call": (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[0].function_call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_bad_input_names_its_field(tools_client, case, stream):
    change, field = BAD[case]
    body = {"tools": TOOLS} | change
    with pytest.raises(openai.BadRequestError) as caught:
        tools_client.chat.completions.create(
            model="tiny", messages=body.pop("messages", ASK), max_tokens=2, stream=stream,
            extra_body=body,
        )  # fmt: skip
    assert caught.value.param == field
    assert caught.value.code == "invalid_request"
    assert "is not allowed" in caught.value.message


def test_a_template_that_knows_of_no_tools_is_said_to(live):
    with openai.OpenAI(base_url=f"{live.http}/v1", api_key="unused", max_retries=0) as client:
        for extra in ({}, {"tool_choice": "none"}, {"tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError, match="tools") as caught:
                client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, **extra)
            assert caught.value.param == "tools"


KEYS = (
    *("type", "function", "name", "parameters", "strict", "properties", "id", "arguments", "$ref"),
    *("tool_calls", "allowed_tools", "mode", "tools", "required", "items", "anyOf", "description"),
)
WORDS = ("", "f", "function", "auto", "object")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)
NEARLY = st.builds(
    lambda name, parameters, more: tool(name, parameters, **more),
    st.sampled_from(["f", "g", "", "a b"]),
    PLAIN,
    st.dictionaries(st.sampled_from(["strict", "description"]), PLAIN),
)


@given(
    tools=PLAIN | st.lists(NEARLY, max_size=3),
    choice=PLAIN | st.sampled_from(["auto", "required", "none"]),
    parallel=PLAIN,
    message=PLAIN | st.builds(lambda calls: {"role": "assistant", "tool_calls": calls}, PLAIN),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_shape_of_a_request_is_an_error_of_the_server(
    tools_live, tools, choice, parallel, message
):
    body = {
        "messages": [*ASK, *([message] if isinstance(message, dict) else []), *ASK],
        "tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 2,
    }  # fmt: skip
    answer = httpx.post(f"{tools_live.http}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"]


def test_a_client_that_leaves_in_a_call_gives_its_pages_back(tools_client, tools_live):
    def idle() -> bool:
        now = httpx.get(f"{tools_live.http}/v1/load").json()
        return now["num_inflight"] == now["num_running"] == 0 and (
            now["num_free_pages"] == now["num_total_pages"]
        )

    schema = an_object({"text": {"type": "string"}})
    stream = tools_client.chat.completions.create(
        model="tiny", messages=ASK, tools=[tool("f", schema)], tool_choice="required", stream=True,
        max_tokens=2000, temperature=1.0,
    )  # fmt: skip
    for part in stream:
        calls = part.choices[0].delta.tool_calls
        if calls and calls[0].function.arguments:
            break
    stream.close()
    for _ in range(3000):
        if idle():
            return
        httpx.get(f"{tools_live.http}/health")
    pytest.fail("its pages are held")
