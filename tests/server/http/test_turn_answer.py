"""Answers over scripted turns: thoughts, words and calls, cut anywhere."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.output.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.reasoning import reasoning_named
from octavo.engine.text.assistant.tool_request import read_tool_use
from octavo.engine.text.assistant.turn_plan import ModelFormats, TurnPlan
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.http.answers import Telling, Usage
from octavo.server.http.turn_answer import TurnAnswer

TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
THOUGHT = "<think>\nWait, ünlike\nthat.\n</think>\n\n"
ONE = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "ä"]}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"x": '
TURNS = {
    "words": "Hello.", "thought": THOUGHT + "Hello.", "call": ONE, "all": THOUGHT + "So:\n" + ONE,
    "two": ONE + "\n" + TWO, "after": ONE + "\nThat is it.", "broken off": BROKEN,
    "no call": "<tool_call>\nnothing</tool_call>", "a thought alone": "<think>\nHm", "empty": "",
    "whole and broken": ONE + "\n" + BROKEN,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_source(tiny_model)


def plan_of(choice: Any = "auto", parallel: bool = True, *, calls: bool = True) -> TurnPlan:
    formats = ModelFormats(format_named("hermes"), reasoning_named("qwen3"))
    plan = formats.plan(read_tool_use(TOOLS, choice, parallel) if calls else None)
    assert plan is not None
    return plan


def answer_of(
    plan: TurnPlan, tokenizer: Tokenizer, *, tells: bool = True, n: int = 1
) -> TurnAnswer:
    params = SamplingParams(n=n, logprobs=0)
    telling = Telling(logprobs=0, token_ids=True)
    return TurnAnswer("id", "tiny", params, tokenizer, telling, plan, tells_reasoning=tells)


def outputs_of(
    pieces: list[str], tokenizer: Tokenizer, *, index: int = 0, reason: str = "stop"
) -> list[RequestOutput]:
    """An output for each piece of a turn, the last one with its end."""
    made = []
    for place, piece in enumerate(pieces):
        token_ids = tokenizer.encode(piece, add_special_tokens=False)
        completion = CompletionOutput(
            index, piece, token_ids, logprobs=[{t: Logprob(-1.0, 1, "x")} for t in token_ids],
            finish_reason=reason if place == len(pieces) - 1 else None,
        )  # fmt: skip
        made.append(
            RequestOutput(
                "id", None, [1, 2], None, [completion], False, RequestMetrics(0.0),
                engine_id="engine-7",
            )
        )  # fmt: skip
    return made


def whole(plan: TurnPlan, text: str, tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    answer = answer_of(plan, tokenizer, tells=more.pop("tells", True))
    return answer.whole([(0, outputs_of([text], tokenizer, **more)[0])])


def said(body: dict[str, Any]) -> tuple[Any, Any, list[tuple[str, Any]], str]:
    [choice] = body["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return message["content"], message.get("reasoning"), calls, choice["finish_reason"]


F, G = ("f", '{"x": [1, "ä"]}'), ("g", "{}")
WAIT = "Wait, ünlike\nthat."


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("words", ("Hello.", None, [], "stop")),
        ("thought", ("Hello.", WAIT, [], "stop")),
        ("call", (None, None, [F], "tool_calls")),
        ("all", ("So:", WAIT, [F], "tool_calls")),
        ("two", (None, None, [F, G], "tool_calls")),
        ("no call", (TURNS["no call"], None, [], "stop")),
        ("a thought alone", (None, "Hm", [], "stop")),
        ("empty", ("", None, [], "stop")),
        ("broken off", (None, None, [("f", '{"x": ')], "stop")),
    ],
)
def test_a_turn_becomes_a_message(tokenizer, turn, expected):
    content, reasoning, calls, reason = said(whole(plan_of(), TURNS[turn], tokenizer))
    wanted = list(expected)
    if turn == "all":
        content = content.strip()
    calls = [(name, arguments.strip()) for name, arguments in calls]
    wanted[2] = [(name, arguments.strip()) for name, arguments in wanted[2]]
    assert (content, reasoning, calls, reason) == tuple(wanted)


def test_a_named_calls_turn_ends_as_openais_does(tokenizer):
    named = plan_of({"type": "function", "function": {"name": "f"}})
    assert said(whole(named, ONE, tokenizer))[2:] == ([F], "stop")


def test_a_length_is_said_to_be_one(tokenizer):
    assert said(whole(plan_of(), ONE, tokenizer, reason="length"))[2:] == ([F], "length")


def test_without_parallel_calls_the_first_alone_is_told(tokenizer):
    assert said(whole(plan_of(parallel=False), TURNS["two"], tokenizer))[2] == [F]


def test_without_tools_a_call_is_words(tokenizer):
    plan = plan_of(calls=False)
    assert said(whole(plan, THOUGHT + ONE, tokenizer)) == (ONE, WAIT, [], "stop")


def test_thoughts_are_left_out_where_they_are_not_wanted_and_counted_all_the_same(tokenizer):
    body = whole(plan_of(), TURNS["thought"], tokenizer, tells=False)
    assert said(body)[:2] == ("Hello.", None)
    num_bytes = len(WAIT.encode())
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_bytes}


def test_ids_come_of_the_request_and_differ(tokenizer):
    def ids(plan: TurnPlan, index: int) -> list[str]:
        body = whole(plan, TURNS["two"], tokenizer, index=index)
        return [call["id"] for call in body["choices"][0]["message"]["tool_calls"]]

    first = ids(plan_of(), 0)
    assert first == ids(plan_of(), 0)
    assert len({*first, *ids(plan_of(), 1)}) == 4
    assert all(each.startswith("call_") and len(each) == 29 for each in first)
    mistral = dataclasses.replace(plan_of(), calls=format_named("mistral"), reasoning=None)
    text = '[TOOL_CALLS]f[ARGS]{"x": 1}'
    body = answer_of(mistral, tokenizer).whole([(0, outputs_of([text], tokenizer)[0])])
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message, tokens and end of a stream's events."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    tokens: list[int] = []
    scores = []
    for place, event in enumerate(events):
        [choice] = event["choices"]
        delta = choice["delta"]
        assert ("role" in delta) == (place == 0)
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(
                    {"id": call["id"], "type": "function", "function": dict(call["function"])}
                )
            else:
                function = message["tool_calls"][call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
        tokens += choice["token_ids"]
        scores += choice["logprobs"]["content"] if choice["logprobs"] else []
        assert (choice["finish_reason"] is None) == (place < len(events) - 1)
    return {"message": message, "tokens": tokens, "scores": scores, "end": choice["finish_reason"]}


@given(
    turn=st.sampled_from(sorted(TURNS)),
    cuts=st.sets(st.integers(1, 150), max_size=8),
    reason=st.sampled_from(["stop", "length"]),
    choice=st.sampled_from(["auto", "none", {"type": "function", "function": {"name": "f"}}]),
    parallel=st.booleans(),
)
def test_a_stream_cut_anywhere_adds_up_to_the_whole(
    tokenizer, turn, cuts, reason, choice, parallel
):
    text, plan = TURNS[turn], plan_of(choice, parallel)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    body = whole(plan, text, tokenizer, reason=reason)
    answer, usage = answer_of(plan, tokenizer), Usage(1)
    events = [
        json.loads(json.dumps(answer.part(choices)))
        for output in outputs_of(pieces, tokenizer, reason=reason)
        for choices in answer.events(0, output, usage)
    ]
    streamed, [told] = joined(events), body["choices"]
    expected = {
        "content": told["message"]["content"] or "",
        "reasoning": told["message"].get("reasoning") or "",
        "tool_calls": told["message"].get("tool_calls", []),
    }
    assert streamed["message"] == expected
    assert streamed["end"] == told["finish_reason"]
    assert streamed["tokens"] == told["token_ids"]
    assert streamed["scores"] == told["logprobs"]["content"]
    assert usage.as_json() == body["usage"]
