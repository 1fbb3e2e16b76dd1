"""The fuzzer's bodies are nearly right, and it tells an answer from none."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT))
    names = {"bodies": "benchmarks.fuzz_bodies", "answers": "benchmarks.fuzz_answers"}
    return SimpleNamespace(**{key: importlib.import_module(name) for key, name in names.items()})


def test_bodies_are_changed_and_some_are_not(fuzz: SimpleNamespace) -> None:
    rng = random.Random(3)
    for route, valid in fuzz.bodies.VALID.items():
        before = json.dumps(valid)
        made = {fuzz.bodies.write(fuzz.bodies.random_body(route, rng)) for _ in range(300)}
        assert len(made) > 150, route
        assert any(fuzz.bodies.write(body) in made for body in valid), route
        assert json.dumps(valid) == before, "a change reached the bodies themselves"


def error(**more: Any) -> dict[str, Any]:
    return {"error": {"message": "a", "type": "b", "param": None, "code": None} | more}


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ANTHROPIC = {"type": "error", "error": {"type": "api_error", "message": "a"}}
GOOD = [
    (CHAT, 400, error()),
    (CHAT, 504, error()),
    (CHAT, 200, {"choices": [], "usage": {}}),
    (MESSAGES, 400, ANTHROPIC),
    ("/v1/rerank", 400, {"message": "a", "detail": "a", **error()}),
]
BAD = [
    (CHAT, 500, error()),
    (CHAT, 400, ANTHROPIC),
    (CHAT, 400, error(message="")),
    (CHAT, 400, []),
    (CHAT, 200, {"choices": []}),
    (MESSAGES, 400, error()),
    ("/v1/rerank", 400, error()),
]


@pytest.mark.parametrize(("route", "status", "body"), GOOD)
def test_an_answer_in_its_apis_shape_is_no_fault(
    fuzz: SimpleNamespace, route: str, status: int, body: Any
) -> None:
    content = json.dumps(body).encode()
    assert fuzz.answers.fault_of(route, status, "application/json", content) is None


@pytest.mark.parametrize(("route", "status", "body"), BAD)
def test_another_shape_or_a_server_error_is_a_fault(
    fuzz: SimpleNamespace, route: str, status: int, body: Any
) -> None:
    content = json.dumps(body).encode()
    assert fuzz.answers.fault_of(route, status, "application/json", content) is not None


STREAMS = [
    (CHAT, 'data: {"choices": []}\n\ndata: [DONE]\n\n', True),
    (CHAT, 'data: {"choices": []}\n\n', False),
    (CHAT, 'data: {"error": {"message": "deadline exceeded"}}\n\n', True),
    (CHAT, 'data: {"error": {"message": "internal error, incident 1"}}\n\n', False),
    (CHAT, "", False),
    (MESSAGES, 'event: message_stop\ndata: {"type": "message_stop"}\n\n', True),
    (MESSAGES, 'event: ping\ndata: {"type": "ping"}\n\n', False),
    (RESPONSES, 'data: {"type": "response.incomplete"}\n\n', True),
    (
        RESPONSES,
        'data: {"type": "response.failed", "response": {"error": {"message": "bug"}}}\n\n',
        False,
    ),
]


@pytest.mark.parametrize(("route", "text", "is_whole"), STREAMS)
def test_a_stream_has_to_come_to_its_end(
    fuzz: SimpleNamespace, route: str, text: str, is_whole: bool
) -> None:
    found = fuzz.answers.fault_of(route, 200, "text/event-stream", text.encode())
    assert (found is None) == is_whole
