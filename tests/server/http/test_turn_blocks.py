"""Turns as blocks, and what Messages tells of them, from outputs made by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.output.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.reasoning import reasoning_named
from octavo.engine.text.assistant.tool_request import read_tool_use
from octavo.engine.text.assistant.turn_plan import ModelFormats
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.http.messages.answer import MessagesAnswer, call_input
from octavo.server.http.responses.answer import ResponsesAnswer
from octavo.server.http.responses.protocol import ResponsesRequest

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "%s"}}\n</tool_call>'
TEXTS = (
    "", "Hello", "<think>Hm.</think>Yes.", CALL % "ä", f"Well: {CALL % 1}{CALL % 2}",
    f"<think>So</think>\n{CALL % 'y'} done", "<think>cut off", '<tool_call>\n{"name": "f", "argum',
    '<tool_call>\n{"name": "f", "arguments": {"x": "cut of',
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_source(tiny_model)


def chat(tokenizer: Tokenizer | None, formats: ModelFormats | None = None) -> Any:
    plan = None if formats is None else formats.plan(read_tool_use(TOOLS))
    engine = SimpleNamespace(model_name="m", tokenizer=tokenizer)
    return SimpleNamespace(
        plan=plan, engine=engine, ask=SimpleNamespace(params=SamplingParams()), request_id="r"
    )


def output(
    tokenizer: Tokenizer, text: str, end: str | None = None, reason: Any = None
) -> RequestOutput:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    completion = CompletionOutput(0, text, token_ids, finish_reason=end, stop_reason=reason)
    return RequestOutput(
        "r", None, [1, 2, 3], None, [completion], end is not None, RequestMetrics(0.0),
        engine_id="e", num_cached_tokens=2,
    )  # fmt: skip


def formats() -> ModelFormats:
    return ModelFormats(format_named("hermes"), reasoning_named("qwen3"))


def events(data: bytes) -> list[Any]:
    """The events of a stream, each under the name of its type."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, content = block.partition("\n")
        found.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(found: list[Any]) -> dict[str, Any]:
    """The message that a stream's events add up to; blocks follow one another."""
    message = found[0]["message"]
    pieces: list[str] = []
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                pieces = []
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                delta = event["delta"]
                [piece] = [value for name, value in delta.items() if name != "type"]
                assert piece
                pieces.append(piece)
            case "content_block_stop":
                block = message["content"][event["index"]]
                text = "".join(pieces)
                if block["type"] == "tool_use":
                    block["input"] = call_input(text)
                else:
                    block[block["type"]] = text
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert found[-1] == {"type": "message_stop"}
    return message


@given(
    text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 90), max_size=8),
    end=st.sampled_from([("stop", None), ("length", None), ("stop", "x")]),
    is_read=st.booleans(), tells=st.booleans(),
)  # fmt: skip
def test_a_stream_adds_up_to_the_whole_however_it_is_cut(
    tokenizer, text, cuts, end, is_read, tells
):
    found = formats() if is_read else None
    whole = MessagesAnswer("msg_1", chat(tokenizer, found), tells_reasoning=tells).whole(
        output(tokenizer, text, *end)
    )
    answer = MessagesAnswer("msg_1", chat(tokenizer, found), tells_reasoning=tells)
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    data = b"".join(answer.news(output(tokenizer, part)) for part in parts)
    data += answer.news(output(tokenizer, "", *end))
    assert joined(events(data)) == whole


def test_a_turn_ends_for_its_reason(tokenizer):
    def reason(text: str, end: str, stop: Any = None) -> Any:
        made = MessagesAnswer("m", chat(tokenizer, formats()), tells_reasoning=True)
        message = made.whole(output(tokenizer, text, end, stop))
        return message["stop_reason"], message["stop_sequence"]

    assert reason("Hello", "stop") == ("end_turn", None)
    assert reason("Hello", "stop", 7) == ("end_turn", None)
    assert reason("Hello", "stop", "x") == ("stop_sequence", "x")
    assert reason(CALL % "a", "stop") == ("tool_use", None)
    assert reason(CALL % "a", "length") == ("max_tokens", None)
    assert reason(TEXTS[-1], "stop", "x") == ("stop_sequence", "x")


def test_blocks_tell_thoughts_words_and_calls(tokenizer):
    made = MessagesAnswer("m", chat(tokenizer, formats()), tells_reasoning=True)
    message = made.whole(output(tokenizer, TEXTS[5], "stop"))
    kinds = [block["type"] for block in message["content"]]
    assert kinds[0] == "thinking"
    assert "tool_use" in kinds
    assert message["content"][0]["thinking"] == "So"
    [call] = [block for block in message["content"] if block["type"] == "tool_use"]
    assert (call["name"], call["input"]) == ("f", {"x": "y"})
    assert message["usage"]["input_tokens"] == 1
    assert message["usage"]["cache_read_input_tokens"] == 2


def test_an_error_in_a_stream_has_anthropics_shape():
    made = MessagesAnswer("m", chat(None), tells_reasoning=True)
    content = {"error": {"message": "x", "type": "internal_error", "param": None, "code": None}}
    assert events(made.failed(500, content)) == [
        {"type": "error", "error": {"type": "api_error", "message": "x"}}
    ]


def test_a_response_that_fails_tells_what_there_was_and_why(tokenizer):
    body = ResponsesRequest(input="x", stream=True)
    made = ResponsesAnswer("0", body, chat(tokenizer, formats()))
    data = made.news(output(tokenizer, "<think>So</think>Well: "))
    content = {"error": {"message": "x", "type": "internal_error", "param": None, "code": None}}
    found = events(data + made.failed(500, content))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.failed"
    response = found[-1]["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", "x")
    thought, words = response["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "So")
    assert words["content"][0]["text"].startswith("Well:")


@given(
    text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 90), max_size=8),
    end=st.sampled_from(["stop", "length"]), is_read=st.booleans(),
)  # fmt: skip
def test_a_responses_stream_ends_with_the_whole_however_it_is_cut(
    tokenizer, text, cuts, end, is_read
):
    found = formats() if is_read else None
    body = ResponsesRequest(input="x")
    whole = ResponsesAnswer("0", body, chat(tokenizer, found)).whole(output(tokenizer, text, end))
    answer = ResponsesAnswer("0", body, chat(tokenizer, found))
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(at)]
    data = b"".join(answer.news(output(tokenizer, part)) for part in parts)
    told = events(data + answer.news(output(tokenizer, "", end)))
    last = told[-1]["response"]
    assert last | {"created_at": 0} == whole | {"created_at": 0}
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    kept = [item | {"status": ""} for item in done]
    assert kept == [item | {"status": ""} for item in whole["output"]]


@given(st.text() | st.builds(json.dumps, st.recursive(st.floats() | st.text(), st.lists)))
def test_arguments_are_an_object_whatever_the_text(text):
    assert isinstance(json.loads(json.dumps(call_input(text), allow_nan=False)), dict)


def test_numbers_that_json_cannot_write_are_no_arguments():
    for value in ("1e999", "NaN", "9" * 5000):
        assert call_input(f'{{"x": {value}}}') == {}
