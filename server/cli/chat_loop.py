"""The loop of `octavo chat`: lines in, answers out, and results of calls asked for between them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from octavo.engine.errors import InvalidRequestError, shorten
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.events import ContentDelta, ReasoningDelta
from octavo.engine.text.assistant.message import AssistantMessage
from octavo.engine.text.assistant.tool_request import ToolUse, read_tool_use
from octavo.engine.text.assistant.turn_plan import model_formats
from octavo.server.cli.chat import COMMANDS, HINT
from octavo.server.cli.chat_screen import Screen
from octavo.server.cli.conversation import Conversation

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

_COMMAND = re.compile(r"/[a-z]+(?=\s|$)")


def read_tools_file(path: Path) -> ToolUse | None:
    """The tools of a file.

    Raises:
        InvalidRequestError: it cannot be read, or holds no tools.
    """
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        allowed = f"a file with a JSON list of functions ({error})"
        raise InvalidRequestError("--tools", path, allowed) from None
    return read_tool_use(tools, None, None)


@dataclass(frozen=True, slots=True)
class Chat:
    """What a conversation is held with.

    Attributes:
        engine: of the model.
        params: of each answer.
        use: the tools that it may call.
        screen: shows answers.
        is_quiet: whether there are no prompt signs.
    """

    engine: AsyncEngine
    params: SamplingParams
    use: ToolUse | None
    screen: Screen
    is_quiet: bool

    async def talk(self, conversation: Conversation) -> None:
        """Reads lines and answers them, until the user leaves."""
        await self.engine.start()
        try:
            if not self.is_quiet:
                print(HINT, file=sys.stderr)
            while (line := await self._read_line("> ")) is not None:
                if command := _COMMAND.match(line):
                    if command[0] == "/exit":
                        return
                    obey(conversation, command[0], line[command.end() :].strip())
                elif line:
                    try:
                        await self._turn(conversation, line)
                    except InvalidRequestError as error:
                        print(f"octavo: {error}", file=sys.stderr)
        finally:
            await self.engine.shutdown()

    async def _turn(self, conversation: Conversation, line: str) -> None:
        """One question and its answer, shown as it comes; calls and their results between."""
        conversation.say("user", line)
        try:
            while True:
                message = await self._answer(conversation)
                conversation.answer(message)
                if not message.tool_calls:
                    return
                for call in message.tool_calls:
                    result = await self._read_line(f"{call.name} returns: ")
                    if result is None:
                        conversation.take_back()
                        return
                    conversation.tell_result(call, result)
        except BaseException:
            conversation.take_back()
            raise

    async def _answer(self, conversation: Conversation) -> AssistantMessage:
        """What the model says next, shown as it comes."""
        engine, screen = self.engine, self.screen
        # The answer gets what it may take, but never more than half of the context.
        most = min(self.params.max_tokens or engine.max_model_len, engine.max_model_len // 2)
        params = self.params.replace(max_tokens=most)
        names = {} if self.use is None else {"tools": list(self.use.shown)}
        text, prompt = conversation.prompt(engine.tokenizer, engine.max_model_len - most, names)
        plan = model_formats(engine.config, engine.tokenizer).plan(self.use)
        reader = None
        if plan is not None:
            plan = plan.opened_by(text)
            params = plan.constrained(params, engine.tokenizer)
            reader = plan.reader(engine.tokenizer, params, f"chat/{len(prompt)}")
        parts: list[str] = []
        stream: Any = engine.generate(prompt, params)
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    piece = output.outputs[0]
                    if reader is None:
                        parts.append(piece.text)
                        screen.write(piece.text)
                    else:
                        self._show(reader.feed(piece.text, piece.token_ids))
            if reader is None:
                return AssistantMessage(content="".join(parts))
            self._show(reader.finish())
            message = reader.message()
            for call in message.tool_calls:
                screen.call(call.name, call.arguments)
            return message
        finally:
            screen.end()

    def _show(self, events: list[Any]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self.screen.write(text)
                case ReasoningDelta(text):
                    self.screen.think(text)

    async def _read_line(self, sign: str) -> str | None:
        """The user's next line, or None when there are no more."""
        if not self.is_quiet and sys.stdin.isatty():
            print(sign, end="", file=sys.stderr, flush=True)
        line = await line_of(sys.stdin)
        return line.strip() if line else None


async def line_of(file: TextIO) -> str:
    """A file's next line, empty at its end. Who is cancelled does not wait for it."""
    line: concurrent.futures.Future[str] = concurrent.futures.Future()
    line.set_running_or_notify_cancel()

    def read() -> None:
        try:
            line.set_result(file.readline())
        except Exception as error:
            line.set_exception(error)

    # Not a thread of the loop's own: it would be waited for, until somebody presses enter.
    threading.Thread(target=read, name="octavo-line", daemon=True).start()
    return await asyncio.wrap_future(line)


def obey(conversation: Conversation, command: str, rest: str) -> None:
    """Does what a command says."""
    match command:
        case "/reset":
            conversation.reset()
        case "/system":
            conversation.system = rest or None
        case "/help":
            for name, text in COMMANDS.items():
                print(f"{name:8} {text}", file=sys.stderr)
        case _:
            known = ", ".join(COMMANDS)
            print(f"octavo: {shorten(command)} is no command: {known}", file=sys.stderr)
