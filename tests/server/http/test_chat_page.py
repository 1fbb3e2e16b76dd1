"""The page to talk to, in a browser, over a server whose answers are written down."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.browser import CHROMIUM, Browser, Page

PAGE = Path(__file__).parents[3] / "server" / "http" / "chat_page.html"
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

THOUGHT = [{"reasoning_content": "They want "}, {"reasoning_content": "the weather."}]
WORDS = ["Let me **look**:\n\n```py\nif a < b:\n", "    pass\n```\n- one\n- two `x`\n\n<b>no</b>"]
CALL = [
    {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                     "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Ulm"}'}}]},
]  # fmt: skip


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers chats with what `turns` holds, and keeps what it was asked."""

    turns: list[Any]
    asked: list[dict[str, Any]]
    left: threading.Event

    def do_GET(self) -> None:
        if self.path == "/chat":
            self.reply(200, "text/html", PAGE.read_bytes())
        else:
            self.reply(200, "application/json", b'{"data": [{"id": "scripted"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        turn = self.turns.pop(0)
        if isinstance(turn, int):
            self.reply(turn, "application/json", b'{"error": {"message": "not like this"}}')
            return
        deltas, reason = turn
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for delta in deltas:
            self.event({"choices": [{"delta": delta, "finish_reason": None}]})
        while reason is None:
            try:
                self.event({"choices": [{"delta": {"content": "more "}, "finish_reason": None}]})
            except OSError:
                self.left.set()
                return
            time.sleep(0.02)
        self.event({"choices": [{"delta": {}, "finish_reason": reason}]})
        self.event({"choices": [], "usage": {"completion_tokens": 17}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: object) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def scripted() -> Iterator[Any]:
    kind = type("Handler", (Scripted,), {"turns": [], "asked": [], "left": threading.Event()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}/chat", script=kind)
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(str(tmp_path_factory.mktemp("profile")))
    yield browser
    browser.close()


def say(page: Page, words: str) -> None:
    page.ask(f"$('words').value = {json.dumps(words)}; $('ask').requestSubmit()")


IS_DONE = "$('send').textContent === 'Send'"


def test_the_page_loads_nothing_from_anywhere(live) -> None:
    answer = httpx.get(live.http + "/chat")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("// ", "")
    assert "innerHTML" not in answer.text
    assert answer.content == PAGE.read_bytes()


@in_a_browser
@pytest.mark.parametrize(("width", "is_dark"), [(1000, False), (1000, True), (380, True)])
def test_thoughts_words_and_calls_are_shown_and_answered(
    scripted: Any, browser: Browser, width: int, is_dark: bool, tmp_path: Path
) -> None:
    script = scripted.script
    script.turns += [
        ([*THOUGHT, *({"content": words} for words in WORDS), *CALL], "tool_calls"),
        ([{"content": "Rain."}], "stop"),
        ([{"content": "Bye."}], "length"),
    ]
    page = browser.open(scripted.url, width=width, height=700, is_dark=is_dark)
    page.wait("$('model').textContent === 'scripted'")
    page.ask("$('system').value = 'Be kind.'; $('max_tokens').value = '50'")
    say(page, "weather?")
    page.wait("document.querySelector('.call form') && " + IS_DONE)
    assert page.ask("document.querySelector('.thought').open") is False
    assert (
        page.ask("document.querySelector('.thought div').textContent") == "They want the weather."
    )
    assert page.ask("document.querySelector('pre').textContent") == "if a < b:\n    pass"
    assert page.ask("[...document.querySelectorAll('li')].map((e) => e.textContent)") == [
        "one", "two x",
    ]  # fmt: skip
    assert "<b>no</b>" in page.ask("$('log').innerText")
    assert page.ask("document.querySelector('.call').innerText").startswith(
        'weather {"city": "Ulm"}'
    )
    page.ask("document.querySelector('.call input').value = '7 degrees'")
    page.ask("document.querySelector('.call form').requestSubmit()")
    page.wait("$('log').innerText.includes('Rain.') && " + IS_DONE)
    say(page, "bye")
    page.wait("$('figures').textContent.includes('cut off') && " + IS_DONE)
    assert "17 tokens" in page.ask("$('figures').textContent")
    roles = [message["role"] for message in script.asked[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    first, second = script.asked[0], script.asked[1]
    assert (first["temperature"], first["max_tokens"]) == (0.7, 50)
    assert "tools" not in first
    assert second["messages"][-1] == {
        "role": "tool", "tool_call_id": "call_1", "content": "7 degrees"
    }  # fmt: skip
    call = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    assert second["messages"][-2]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": call}
    ]
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert len(page.picture()) > 5_000


@in_a_browser
def test_an_answer_is_stopped_and_an_error_shown(scripted: Any, browser: Browser) -> None:
    script = scripted.script
    script.turns += [([], None), 400, ([{"content": "Fine."}], "stop"), 401]
    page = browser.open(scripted.url, width=800, height=600)
    say(page, "go on")
    page.wait("$('log').innerText.includes('more more')")
    page.ask("$('ask').requestSubmit()")
    page.wait(IS_DONE)
    assert script.left.wait(10), "the server is told that nobody listens"
    assert "stopped" in page.ask("$('figures').textContent")
    page.ask("$('temperature').value = ''; $('tools').value = '[]'")
    say(page, "again")
    page.wait("document.querySelector('.error')?.textContent === 'not like this' && " + IS_DONE)
    say(page, "and again")
    page.wait("$('log').innerText.includes('Fine.') && " + IS_DONE)
    assert script.asked[-1]["tools"] == []
    assert "temperature" not in script.asked[-1]
    assert script.asked[-1]["messages"][1]["content"].startswith("more more")
    page.ask("$('tools').value = '{'")
    say(page, "with broken tools")
    page.wait("document.querySelectorAll('.error').length === 2 && " + IS_DONE)
    page.ask("$('new').click(); $('tools').value = ''")
    assert page.ask("$('log').childElementCount") == 0
    say(page, "who am I")
    page.wait("!$('login').hidden && " + IS_DONE)
