"""Responses that are kept, as OpenAI's client asks for them, of a server of two tenants."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
NOT_FOUND = "previous_response_not_found"


def ask(client: openai.OpenAI, text: Any = "Say something.", **change: Any) -> Any:
    asked = {"model": "tiny", "input": text, "max_output_tokens": 8, **change}
    if not asked.pop("stream", False):
        return client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    return last.response


def listed(client: openai.OpenAI, response_id: str, **query: Any) -> list[Any]:
    """The items, page by page, the first one first."""
    return list(client.responses.input_items.list(response_id, order="asc", **query))


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_response_is_found_as_it_was_told_until_it_is_deleted(tenants, stream):
    client = tenants["a"]
    told = ask(client, stream=stream, metadata={"k": "v"}, instructions="Be short.")
    assert told.model_dump()["store"] is True
    assert client.responses.retrieve(told.id).model_dump() == told.model_dump()
    [item] = listed(client, told.id)
    assert (item.role, item.content[0].text) == ("user", "Say something.")
    client.responses.delete(told.id)
    for call in (
        client.responses.retrieve,
        client.responses.delete,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(told.id)
        assert caught.value.body["param"] == "response_id"
        assert caught.value.body["type"] == "invalid_request_error"


def test_what_is_not_to_be_kept_is_not(tenants):
    told = ask(tenants["a"], store=False)
    assert told.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        tenants["a"].responses.retrieve(told.id)


def test_another_tenants_response_is_unknown(tenants):
    told = ask(tenants["a"])
    other = tenants["b"]
    for call in (
        other.responses.retrieve,
        other.responses.delete,
        other.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            call(told.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tenants["b"], previous_response_id=told.id)
    assert (caught.value.code, caught.value.param) == (NOT_FOUND, "previous_response_id")
    assert tenants["a"].responses.retrieve(told.id).id == told.id


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
def test_a_call_is_answered_by_its_output_alone(tenants, stream):
    client = tenants["a"]
    first = ask(
        client, "Weather?", tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=200, stream=stream,
    )  # fmt: skip
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = ask(client, [result], previous_response_id=first.id, tools=TOOLS, stream=stream)
    assert second.previous_response_id == first.id
    whole = [{"role": "user", "content": "Weather?"}, *first.output, result]
    counted = client.responses.input_tokens.count(model="tiny", input=whole, tools=TOOLS)
    assert second.usage.input_tokens == counted.input_tokens
    kinds = [item.type for item in listed(client, second.id, limit=1)]
    assert kinds == ["message", *[item.type for item in first.output], "function_call_output"]
    chained = client.responses.input_tokens.count(
        model="tiny", input=[result], tools=TOOLS, previous_response_id=first.id
    )
    assert chained.input_tokens == counted.input_tokens


def test_a_call_without_its_output_is_refused(tenants):
    client = tenants["a"]
    first = ask(client, tools=TOOLS, tool_choice="required", max_output_tokens=200)
    assert first.output[-1].type == "function_call"
    output = {"type": "function_call_output", "call_id": "another", "output": "x"}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [output], previous_response_id=first.id)
    assert caught.value.param == "input[0].call_id"


def test_a_stream_that_its_client_leaves_is_kept_as_cancelled(tenants):
    client = tenants["a"]
    with client.responses.create(
        model="tiny", input="Talk.", stream=True, max_output_tokens=3000,
        extra_body={"seed": 5, "top_k": 1},
    ) as stream:  # fmt: skip
        events = iter(stream)
        response_id = next(events).response.id
        for event in events:
            if event.type == "response.output_text.delta":
                break
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        try:
            kept = client.responses.retrieve(response_id)
            break
        except openai.NotFoundError:
            time.sleep(0.05)
    assert kept.status == "cancelled"
    assert kept.output_text
    assert kept.output[-1].status == "incomplete"
    assert ask(client, "Go on.", previous_response_id=response_id).previous_response_id


def test_a_stream_that_fails_is_kept_as_failed(tenants):
    client = tenants["a"]
    events = list(
        client.responses.create(
            model="tiny", input="Talk.", stream=True, max_output_tokens=3500,
            extra_body={"timeout_s": 0.7, "seed": 5, "top_k": 1},
        )
    )  # fmt: skip
    assert events[-1].type in ("response.failed", "response.incomplete", "response.completed")
    told = events[-1].response
    assert client.responses.retrieve(told.id).model_dump() == told.model_dump()


def test_a_conversation_whose_beginning_is_gone_is_refused_by_name(tenants):
    client = tenants["a"]
    first = ask(client)
    second = ask(client, previous_response_id=first.id)
    client.responses.delete(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == (NOT_FOUND, "previous_response_id")
    assert first.id in caught.value.message


@dataclass
class Kept:
    """What a tenant was told, by id, and the conversation up to each: its items, and how many
    responses it has."""

    told: dict[str, Any] = field(default_factory=dict)
    depth: dict[str | None, int] = field(default_factory=dict)
    items: dict[str, list[Any]] = field(default_factory=dict)


STEP = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["a", "b"]), "stream": st.booleans(), "tools": st.booleans(),
        "store": st.sampled_from([None, True, False]), "back": st.integers(0, 3),
        "act": st.sampled_from(["ask", "ask", "ask", "delete"]), "size": st.integers(1, 2000),
    }
)  # fmt: skip


@given(steps=st.lists(STEP, min_size=4, max_size=12))
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_order_of_asking_and_deleting_keeps_conversations_right(tenants, steps):
    known = {tenant: Kept() for tenant in tenants}
    for step in steps:
        client, kept = tenants[step["tenant"]], known[step["tenant"]]
        ids = list(kept.told)
        if step["act"] == "delete" and ids:
            response_id = ids[-1 - step["back"] % len(ids)]
            with contextlib.suppress(openai.NotFoundError):
                client.responses.delete(response_id)
            del kept.told[response_id]
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)
            continue
        previous = ids[-step["back"]] if 0 < step["back"] <= len(ids) else None
        item = {"role": "user", "content": "x" * step["size"]}
        asked: dict[str, Any] = {"stream": step["stream"], "max_output_tokens": 120}
        if step["tools"]:
            asked |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        if step["store"] is not None:
            asked["store"] = step["store"]
        before = kept.items.get(previous, [])
        if before and before[-1].get("type") == "function_call":
            output = {"call_id": before[-1]["call_id"], "output": "done"}
            item = {"type": "function_call_output", **output}
        refused = None
        try:
            told = ask(client, [item], previous_response_id=previous, **asked)
        except openai.BadRequestError as error:
            refused = error
        if refused is not None:
            # What came before was deleted, or had to make room; or it fills the context.
            assert previous is not None
            assert refused.code == NOT_FOUND or "tokens" in refused.message
            continue
        whole = [*before, item]
        counted = client.responses.input_tokens.count(
            model="tiny", input=whole, tools=asked.get("tools", [])
        )
        assert told.usage.input_tokens == counted.input_tokens
        is_kept = step["store"] is not False
        assert told.model_dump()["store"] is is_kept
        if is_kept:
            calls = [each for each in told.output if each.type == "function_call"]
            good = [each for each in told.output if each not in calls or each.status == "completed"]
            kept.told[told.id] = told
            kept.items[told.id] = [*whole, *[each.model_dump() for each in good]]
            assert client.responses.retrieve(told.id).model_dump() == told.model_dump()
            kept.depth[told.id] = 1 + kept.depth.get(previous, 0)
            num_items = len(listed(client, told.id))
            # Beyond half of the store's entries a conversation may push out its own beginning.
            is_whole = num_items == len(whole)
            assert is_whole or (kept.depth[told.id] > 4 and 0 < num_items < len(whole))
    for tenant, others in known.items():
        for response_id in others.told:
            for who, each in tenants.items():
                try:
                    found = each.responses.retrieve(response_id)
                except openai.NotFoundError:
                    continue
                assert who == tenant
                assert found.model_dump() == others.told[response_id].model_dump()


BAD = {
    "an id that nothing has": ("GET", "/resp_1", 404, "response_id"),
    "an id with slashes": ("GET", "/..%2f..%2fetc", 404, None),
    "a stream": ("GET", "/resp_1?stream=true", 400, "stream"),
    "more of it": ("GET", "/resp_1?include=file_search_call.results", 400, "include[0]"),
    "more of its items": ("GET", "/resp_1/input_items?include[]=x", 400, "include[0]"),
    "items of nothing": ("GET", "/resp_1/input_items", 404, "response_id"),
    "no items": ("GET", "/resp_1/input_items?limit=0", 400, "limit"),
    "too many items": ("GET", "/resp_1/input_items?limit=101", 400, "limit"),
    "an order": ("GET", "/resp_1/input_items?order=up", 400, "order"),
    "a method": ("POST", "/resp_1", 405, None),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_found_is_named(keeps_live, tenants, case):
    method, path, status, param = BAD[case]
    headers = {"authorization": f"Bearer {tenants['a'].api_key}"}
    answer = httpx.request(method, f"{keeps_live.http}/v1/responses{path}", headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_pages_follow_one_another_and_an_unknown_item_is_named(tenants):
    client = tenants["b"]
    items = [{"role": "user", "content": str(index)} for index in range(5)]
    told = ask(client, items)
    texts = [item.content[0].text for item in listed(client, told.id, limit=2)]
    assert texts == list("01234")
    newest = client.responses.input_items.list(told.id, limit=2)
    assert [item.content[0].text for item in newest.data] == ["4", "3"]
    assert newest.has_more
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(told.id, after="msg_nothing")
    assert caught.value.param == "after"


def test_a_server_without_a_store_says_how_to_turn_it_on(tools_client):
    told = ask(tools_client, store=True)
    assert told.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError) as unknown:
        tools_client.responses.retrieve(told.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tools_client, previous_response_id=told.id)
    assert refused.value.param == "previous_response_id"
    for error in (unknown.value, refused.value):
        assert "--responses-store-bytes" in error.message


def test_the_pages_example_runs(tenants, capsys):
    [code] = examples("responses.md", "py")
    exec(code, {"client": tenants["a"], "model": "tiny"})
    assert "['message', 'message', 'message']" in capsys.readouterr().out


def test_what_is_kept_is_json(keeps_live, tenants):
    told = ask(tenants["a"], 'ü"\n\u2028')
    headers = {"authorization": f"Bearer {tenants['a'].api_key}"}
    answer = httpx.get(f"{keeps_live.http}/v1/responses/{told.id}", headers=headers)
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.content)["id"] == told.id
    [item] = listed(tenants["a"], told.id)
    assert item.content[0].text == 'ü"\n\u2028'
