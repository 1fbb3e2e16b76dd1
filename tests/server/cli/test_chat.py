"""`octavo chat` in a terminal: commands, tools, thoughts and Markdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import random
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.cli.chat_loop import Chat, line_of, read_tools_file
from octavo.server.cli.chat_screen import PlainScreen, open_screen, split_blocks
from octavo.server.cli.conversation import Conversation

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class ScriptedEngine:
    """Answers as it is told to, a few characters at a time.

    Attributes:
        prompts: what it was asked.
    """

    max_model_len = 400

    def __init__(self, tokenizer: Tokenizer, *answers: str) -> None:
        self.tokenizer = tokenizer.with_chat_template(
            "{% if tools %}T{{ tools | length }}{% endif %}"
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
        )
        self.config = EngineConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
        self._answers = list(answers)
        self.prompts: list[str] = []

    async def start(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass

    async def generate(self, prompt: list[int], params: SamplingParams) -> Any:
        self.prompts.append(self.tokenizer.decode(prompt, skip_special_tokens=False))
        answer = self._answers.pop(0)
        for begin in range(0, len(answer), 5):
            text = answer[begin : begin + 5]
            piece = SimpleNamespace(text=text, token_ids=self.tokenizer.encode(text))
            yield SimpleNamespace(outputs=[piece])


def test_leaving_a_prompt_waits_for_no_line():
    async def leave() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await line_of(file)

    ours, theirs = os.pipe()
    with open(ours) as file, open(theirs, "w") as user:
        thread = threading.Thread(target=asyncio.run, args=(leave(),))
        thread.start()
        thread.join(20)
        was_waiting = thread.is_alive()
        print("at last", file=user, flush=True)
        thread.join()
    assert not was_waiting


@pytest.mark.parametrize(("written", "read"), [(b"one\ntwo\n", "one\n"), (b"", "")])
def test_a_line_is_read_as_it_comes(written, read):
    ours, theirs = os.pipe()
    os.write(theirs, written)
    os.close(theirs)
    with open(ours) as file:
        assert asyncio.run(line_of(file)) == read


def test_a_line_that_is_no_text_says_so(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"\xff\n")
    with path.open(encoding="utf-8") as file, pytest.raises(UnicodeDecodeError):
        asyncio.run(line_of(file))


@pytest.fixture
def tools_file(tmp_path: Any) -> Any:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the process a terminal, whose user types lines; returns what it shows in the end."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with (
        os.fdopen(os.dup(theirs), "w", buffering=1) as output,
        os.fdopen(theirs, "r") as source,
    ):

        def read() -> None:
            while True:
                try:
                    data = os.read(ours, 4096)
                except OSError:
                    return
                shown.append(data)
                if b"\x04" in data:
                    return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()

        def type_lines(*lines: str) -> None:
            # Here, as pytest puts its own in their place before a test begins.
            monkeypatch.setattr(sys, "stdin", source)
            monkeypatch.setattr(sys, "stdout", output)
            monkeypatch.setattr(sys, "stderr", output)
            os.write(ours, "".join(line + "\n" for line in lines).encode())

        def screen() -> str:
            output.write("\x04")  # not shown by anybody else
            output.flush()
            reader.join(10)
            return b"".join(shown).decode().replace("\r\n", "\n")

        yield SimpleNamespace(type=type_lines, screen=screen)
    os.close(ours)


def talk(engine: Any, *, tools: Any = None, system: str | None = None, plain: bool = False) -> None:
    use = None if tools is None else read_tools_file(tools)
    chat = Chat(engine, SamplingParams(max_tokens=50), use, open_screen(is_plain=plain), False)
    asyncio.run(chat.talk(Conversation(system)))


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_shows_markdown_and_dim_thoughts(tiny_model: Any, terminal: Any) -> None:
    answer = "<think>\nhm, a list\n</think>\n\n**Two** things:\n\n- one\n- two\n\n```\nx = 1\n```"
    engine = ScriptedEngine(Tokenizer.from_source(tiny_model), answer)
    terminal.type("what?", "/exit")
    talk(engine)
    shown = terminal.screen()
    assert "\x1b[2;3m" in shown  # dim
    text = without_codes(shown)
    assert "hm, a list" in text
    assert "• one" in text
    assert "**" not in text
    assert "```" not in text.rpartition("x = 1")[2]
    assert engine.prompts == ["[user]what?"]


def test_plain_text_is_as_the_model_writes_it(tiny_model: Any, terminal: Any) -> None:
    engine = ScriptedEngine(Tokenizer.from_source(tiny_model), "**Two** things")
    terminal.type("what?", "/exit")
    talk(engine, plain=True)
    assert "**Two** things" in terminal.screen()


def test_commands_change_the_conversation(tiny_model: Any, terminal: Any) -> None:
    engine = ScriptedEngine(Tokenizer.from_source(tiny_model), *"abcde")
    terminal.type("one", "/system Be brief.", "two", "/reset", "three", "/system", "four")
    terminal.type("/help", "/nonsense", "/usr/bin is what?", "/exit", "never read")
    talk(engine, system="S")
    assert engine.prompts == [
        "[system]S[user]one",
        "[system]Be brief.[user]one[assistant]a[user]two",
        "[system]Be brief.[user]three",
        "[user]three[assistant]c[user]four",
        "[user]three[assistant]c[user]four[assistant]d[user]/usr/bin is what?",
    ]
    shown = terminal.screen()
    assert "/nonsense' is no command" in shown
    assert re.search(r"/system +sets the system message", shown)


def test_calls_are_shown_and_their_results_asked_for(
    tiny_model: Any, terminal: Any, tools_file: Any
) -> None:
    engine = ScriptedEngine(Tokenizer.from_source(tiny_model), f"I look.\n{CALL}\n{CALL}", "Sunny.")
    terminal.type("weather?", "22 degrees", "23 degrees", "/exit")
    talk(engine, tools=tools_file)
    first, second = engine.prompts
    assert first == "T1[user]weather?"
    assert second.endswith("weatherweather[tool]22 degrees[tool]23 degrees")
    shown = without_codes(terminal.screen())
    assert shown.count('→ weather({"city": "Rome"})') == 2
    assert shown.count("weather returns: ") == 2
    assert "<tool_call>" not in shown
    assert "Sunny." in shown


def test_a_user_who_leaves_before_a_result_leaves(
    tiny_model: Any, tools_file: Any, capsys: Any, monkeypatch: Any
) -> None:
    import io

    engine = ScriptedEngine(Tokenizer.from_source(tiny_model), CALL)
    monkeypatch.setattr(sys, "stdin", io.StringIO("weather?\n"))
    talk(engine, tools=tools_file)
    assert 'weather({"city": "Rome"})' in capsys.readouterr().out
    assert isinstance(open_screen(is_plain=False), PlainScreen)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}'])
def test_a_file_without_tools_is_refused_by_name(tmp_path: Any, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match="tools"):
        read_tools_file(path)
    with pytest.raises(InvalidRequestError, match="--tools"):
        read_tools_file(tmp_path / "missing.json")


def test_blocks_are_the_same_however_the_text_is_cut() -> None:
    text = "# A\n\npara\nmore\n\n```py\na\n\nb\n```\n\n~~~\n```\n\n~~~\n\n- x\n\n\n- y\n\nend"
    whole, rest = split_blocks(text)
    assert "".join(whole) + rest == text
    assert rest == "end"
    assert "```py\na\n\nb\n```\n\n" in whole
    rng = random.Random(0)
    for _ in range(200):
        blocks: list[str] = []
        held = ""
        cuts = sorted(rng.choices(range(len(text)), k=rng.randint(0, 12)))
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            new, held = split_blocks(held + text[begin:end])
            blocks += new
        assert "".join(blocks) + held == text
        assert all(block.count("```py") == block.count("b\n```") for block in blocks)
