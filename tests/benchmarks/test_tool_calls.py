"""The agents' tools can be served, are asked for in every way, and faults of calls are found."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.tool_grammar import tool_grammar
from octavo.engine.text.assistant.tool_request import read_tool_use

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool_calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.tool_calls.__main__")


def test_every_tool_has_a_grammar(tool_calls: Any) -> None:
    tools = tool_calls.read_tools()
    assert len({tool["name"] for tool in tools}) == len(tools) > 50
    for tool in tools:
        Draft202012Validator.check_schema(tool.get("parameters", {}))
        use = read_tool_use([{"type": "function", "function": tool}], "required")
        assert use is not None
        assert tool_grammar(format_named("hermes"), use.callable, use.choice)


def test_formats_together_ask_for_every_tool_in_every_way(tool_calls: Any) -> None:
    tools = tool_calls.read_tools()
    asks = [ask for first in range(26) for ask in tool_calls.asks_of(tools, first, 3)]
    assert {ask.tools[0]["name"] for ask in asks} == {tool["name"] for tool in tools}
    ways = {(ask.api, ask.choice) for ask in asks}
    assert len(ways) == len(tool_calls.PATHS) * len(tool_calls.CHOICES)
    assert all(ask.body()["tools"] for ask in asks)


@pytest.mark.parametrize(
    ("calls", "content", "is_cut", "fault"),
    [
        ((("f", '{"a": 1}'),), "", False, None),
        ((("f", '{"a": "1"}'),), "", False, "not of type 'integer'"),
        ((("f", '{"a": '),), "", False, "Expecting value"),
        ((("f", '{"a": '),), "", True, None),
        ((("g", "{}"),), "", False, "'g'"),
        ((), "", False, "no call"),
        ((("f", "{}"),), "Yes.", False, "words beside calls"),
        ((("f", "{}"), ("f", "{}")), "", False, "2 calls"),
    ],
)
def test_a_call_at_fault_is_named(
    tool_calls: Any, calls: Any, content: str, is_cut: bool, fault: str | None
) -> None:
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    ask = tool_calls.Ask("chats", "named", [tool, {"name": "g"}], 0, thinks=False)
    found = tool_calls.faults_of(tool_calls.Turn(calls, content, is_cut), ask)
    assert ([fault in each for each in found] == [True]) if fault else not found
