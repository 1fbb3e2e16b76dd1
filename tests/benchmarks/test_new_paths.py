"""The schemas that calls are measured with are drawn, closed, and each can be met."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator

from octavo.engine.text.assistant.tool_request import read_tools

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def new_paths(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("schemas", "calls", "__main__")
    found = {name: importlib.import_module(f"benchmarks.new_paths.{name}") for name in names}
    return SimpleNamespace(**found)


def test_schemas_are_drawn_from_a_seed(new_paths: SimpleNamespace) -> None:
    drawn = new_paths.schemas.draw_schemas(50, 0)
    assert drawn == new_paths.schemas.draw_schemas(50, 0)
    assert len({json.dumps(schema) for schema in drawn}) > 45
    for number, schema in enumerate(drawn):
        Draft202012Validator.check_schema(schema)
        assert schema["additionalProperties"] is False
        body = new_paths.calls.call_body(number, schema)
        [(tool, _)] = read_tools(body["tools"])
        assert tool.is_strict == (number % 2 == 1)


def test_what_falls_short_is_named(new_paths: SimpleNamespace) -> None:
    shortfalls = getattr(new_paths, "__main__")._shortfalls  # noqa: B009
    calls = {"calls": 500, "valid": 500, "faults": [], "beside_rate_of_free": 0.96}
    good = {
        "apis": {"chats": {"of_chats": 1.0}, "Messages": {"of_chats": 0.99}},
        "constrained": {"of_free": 0.93}, "calls": calls,
        "embeddings": {"of_sentence_transformers": 1.1, "least_cosine": 0.999999},
    }  # fmt: skip
    assert shortfalls(good, has_figures=True) == []
    bad = {
        "apis": {"chats": {"of_chats": 1.0}, "Messages": {"of_chats": 0.97}},
        "constrained": {"of_free": 0.8},
        "calls": calls | {"valid": 499, "beside_rate_of_free": 0.9},
        "embeddings": {"of_sentence_transformers": 0.9, "least_cosine": 0.99},
    }  # fmt: skip
    assert len(shortfalls(bad, has_figures=True)) == 6
    assert len(shortfalls(bad, has_figures=False)) == 2
    assert shortfalls({"embeddings": {"skipped": "no torch"}}, has_figures=True) == []
