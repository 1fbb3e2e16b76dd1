"""What a chat needs before it is submitted is made where it delays nobody."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.server.http import chat_turns


@pytest.mark.parametrize(
    ("plan", "is_aside"),
    [
        (None, False),
        (SimpleNamespace(use=None), False),
        (SimpleNamespace(use="tools"), True),
    ],
)
def test_grammars_of_tools_are_made_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, plan: Any, is_aside: bool
) -> None:
    async def chat_text(*_: Any, **__: Any) -> tuple[str, Any]:
        return "text", plan

    async def tokenize(*_: Any, **__: Any) -> list[int]:
        return [1]

    monkeypatch.setattr(chat_turns, "chat_text", chat_text)
    for name in ("check_model", "chat_ask", "request_id_of"):
        monkeypatch.setattr(chat_turns, name, lambda *_: None)
    monkeypatch.setattr(chat_turns, "prepared", lambda *_, **__: threading.get_ident())
    engine = SimpleNamespace(tokenize=tokenize, sampling_defaults=None)
    front: Any = SimpleNamespace(ready_engine=lambda: engine)
    body: Any = SimpleNamespace(model=None, add_special_tokens=None, truncate_prompt_tokens=None)
    made_in = asyncio.run(chat_turns.prepare_chat(front, body, {}, "chatcmpl"))
    assert (made_in != threading.get_ident()) is is_aside
