"""Calls and thoughts are read the same however their text is cut."""

from __future__ import annotations

import itertools

import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.assistant.events import (
    ArgumentsDelta,
    AssistantEvent,
    AssistantParser,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.formats import format_for, format_named
from octavo.engine.text.assistant.reasoning import reasoning_named
from octavo.engine.text.assistant.tool import FunctionTool
from octavo.engine.text.assistant.turn import joined

TOOLS = [FunctionTool("f"), FunctionTool("get_weather")]
F1 = [CallStart(0, "f"), ArgumentsDelta(0, '{"x": 1}'), CallEnd(0)]

CASES: tuple[tuple[str, str, list[AssistantEvent]], ...] = (
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', F1),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}', F1),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', F1),
    ("hermes", "a <tool_ <tool_call> b ", [ContentDelta("a <tool_ <tool_call> b ")]),
    (
        "hermes",
        'a\n<tool_call>{"name": "f", "arguments": {"x": 01}}',
        [
            ContentDelta("a"),
            CallStart(0, "f"),
            ArgumentsDelta(0, '{"x": 0'),
            ContentDelta("1}}"),
        ],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "a\n\\u00',
        [CallStart(0, "f"), ArgumentsDelta(0, '{"x": "a\\n\\u00')],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', F1),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}', F1),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "get_weather", "parameters": {}}',
        [*F1, CallStart(1, "get_weather"), ArgumentsDelta(1, "{}"), CallEnd(1)],
    ),
    ("llama3_json", '{"name": "Ann", "age": 3} ', [ContentDelta('{"name": "Ann", "age": 3} ')]),
    ("json", 'So:\n{"name": "f", "arguments": {"x": 1}}', [ContentDelta("So:"), *F1]),
)


def parsed(parser: AssistantParser, *pieces: str) -> list[AssistantEvent]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


@pytest.mark.parametrize(("name", "text", "events"), CASES)
def test_a_turn_says_the_same_for_every_cut(name, text, events):
    assert parsed(format_named(name).parser(TOOLS), text) == events
    assert parsed(format_named(name).parser(TOOLS), *text) == events
    for first, second in itertools.combinations(range(len(text)), 2):
        pieces = text[:first], text[first:second], text[second:]
        assert parsed(format_named(name).parser(TOOLS), *pieces) == events


@pytest.mark.parametrize(
    ("text", "is_open", "events"),
    [
        ("<think>\nhm\n</think>\n\nHi", False, [ReasoningDelta("hm"), ContentDelta("Hi")]),
        ("hm\n</think>\n\nHi", True, [ReasoningDelta("hm"), ContentDelta("Hi")]),
        ("<think>\nhm", True, [ReasoningDelta("hm")]),
        (" <thin", False, [ContentDelta(" <thin")]),
        ("Hi </think>", False, [ContentDelta("Hi </think>")]),
        ("a\n\nb</think></think>", True, [ReasoningDelta("a\n\nb"), ContentDelta("</think>")]),
        (
            'hm</think>\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
            True,
            [ReasoningDelta("hm"), *F1],
        ),
    ],
)
def test_a_thought_says_the_same_for_every_cut(text, is_open, events):
    def parser() -> AssistantParser:
        calls = format_named("hermes").parser(TOOLS)
        return reasoning_named("qwen3").parser(calls, is_open=is_open)

    assert parsed(parser(), text) == events
    for first, second in itertools.combinations(range(len(text)), 2):
        assert parsed(parser(), text[:first], text[first:second], text[second:]) == events


def test_a_format_is_chosen_by_the_template():
    qwen = "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    assert format_for(qwen, "qwen3") == format_named("hermes")
    assert format_for("{{ tools | tojson }}", "") == format_named("json")
    assert format_for("<tool_call> tools {{ messages }}", "qwen3") is None
    with pytest.raises(InvalidRequestError, match=r"auto or one of cohere_command, .*, hermes, "):
        format_named("nothing")
