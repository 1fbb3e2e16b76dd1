"""Turns of an assistant made at random, and what a parser's events say."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.text.assistant.events import (
    ArgumentsDelta,
    AssistantEvent,
    AssistantParser,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.tool import FunctionTool

TOOLS = (
    FunctionTool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    ),
    FunctionTool(
        "search_docs",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "filters": {"type": "object"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "exact": {"type": "boolean"},
                "score": {"type": "number"},
                "after": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["query"],
        },
    ),
    FunctionTool(
        "write_file", {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
    ),
    FunctionTool("ping", {"type": "object", "properties": {}}),
)

_WORDS = (
    "Paris", "München", "東京", "🙂", "a b", "", "it's", 'say "hi"', "back\\slash", "C:\\temp\\new",
    "line\nbreak", "\ttab", "{", "}", "[", "]", "{}", "[1, 2]", "<", "</", "</tool", "<tool_cal",
    "<|", "|>", "```", "true", "null", "12", "a, b", "key: value", "x=1", "(", ")", "é\u0301",
    "end\n", "\n\nstart", "\\n", "\\u0041", "\u2028", "\x7f", "$%&", "ends with \\", "'", '"',
    "def f(x):\n    return x  # ok\n",
)  # fmt: skip
_SAID = (
    "Let me check.", "I'll look that up:", "Sure, one moment…", "Zwei Dinge 🙂", "a < b and b > c",
    "Use {x} or [y]", "First line.\n\nSecond line.", "see <b>bold</b>", "f(x) = [1, 2]", "`code`",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call of a turn."""

    name: str
    arguments: dict[str, Any]


@dataclass
class Said:
    """What a turn's events say.

    Attributes:
        parts: contents, thoughts, and calls with their arguments' text, in their order.
        num_ended: calls that came to their end.
        ids: of the calls, as far as the text has them.
    """

    parts: list[tuple[str, str, str]] = field(default_factory=list)
    num_ended: int = 0
    ids: list[str | None] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        """The calls, their arguments read."""
        return [Call(name, json.loads(text)) for kind, name, text in self.parts if kind == "call"]

    @property
    def content(self) -> str:
        """All words for the user."""
        return "".join(text for kind, _, text in self.parts if kind == "content")

    @property
    def reasoning(self) -> str:
        """All thoughts."""
        return "".join(text for kind, _, text in self.parts if kind == "reasoning")


def said(parser: AssistantParser, pieces: Sequence[str]) -> Said:
    """What a turn in pieces says, the protocol of events checked."""
    events: list[AssistantEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    made = Said()
    num_calls = 0
    is_open = False
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == num_calls
            assert event.name
            made.parts.append(("call", event.name, ""))
            made.ids.append(event.id)
            num_calls += 1
            is_open = True
        elif isinstance(event, CallEnd):
            assert is_open
            assert event.index == num_calls - 1
            assert isinstance(json.loads(made.parts[-1][2]), dict)
            made.num_ended += 1
            is_open = False
        elif isinstance(event, ArgumentsDelta):
            assert is_open
            assert event.text
            assert event.index == num_calls - 1
            kind, name, text = made.parts[-1]
            made.parts[-1] = kind, name, text + event.text
        else:
            assert isinstance(event, ContentDelta | ReasoningDelta)
            assert event.text
            is_open = False
            kind = "content" if isinstance(event, ContentDelta) else "reasoning"
            if made.parts and made.parts[-1][0] == kind:
                made.parts[-1] = kind, "", made.parts[-1][2] + event.text
            else:
                made.parts.append((kind, "", event.text))
    return made


def random_words(rng: random.Random) -> str:
    """Words for the user, without white space around them."""
    return " ".join(rng.choice(_SAID) for _ in range(rng.randint(1, 3)))


def random_string(rng: random.Random) -> str:
    """A string as arguments may have it."""
    return rng.choice(["", " "]).join(rng.choice(_WORDS) for _ in range(rng.randint(0, 4)))


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(5 if depth > 2 else 7)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind == 1:
        return rng.choice([0, 1, -1, 7, 10**18, -(2**31)])
    if kind == 2:
        return rng.choice([0.5, -1.25, 1e-7, 3.0, 6.02e23])
    if kind < 5:
        return random_string(rng)
    size = rng.randint(0, 3)
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(size)]
    return {f"k{i}": random_value(rng, depth + 1) for i in range(size)}


def random_call(rng: random.Random) -> Call:
    """A call of one of the tools, with arguments of its schema."""
    tool = rng.choice(TOOLS)
    properties = (tool.parameters or {}).get("properties", {})
    required = (tool.parameters or {}).get("required", ())
    names = [name for name in properties if name in required or rng.random() < 0.6]
    return Call(tool.name, {name: _of(properties[name], rng) for name in names})


def _of(schema: dict[str, Any], rng: random.Random) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return _of(rng.choice(schema["anyOf"]), rng)
    kind = schema["type"]
    if kind == "object":
        return {f"k{i}": random_value(rng) for i in range(rng.randint(0, 3))}
    makers: dict[str, Any] = {
        "string": lambda: random_string(rng),
        "integer": lambda: rng.randint(-99, 99),
        "number": lambda: rng.choice([0.5, -3, 2.25e9]),
        "boolean": lambda: rng.random() < 0.5,
        "null": lambda: None,
        "array": lambda: [random_string(rng) for _ in range(rng.randint(0, 3))],
    }
    return makers[kind]()
