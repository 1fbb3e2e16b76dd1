"""Turns as gpt-oss writes them: messages on channels, thoughts and calls among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.engine.text.assistant.events import AssistantParser
from octavo.engine.text.assistant.grammars import arguments_of, one_of, words
from octavo.engine.text.assistant.json_text import next_char, read_arguments
from octavo.engine.text.assistant.scanner import scanner_of
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice, allowed_tools
from octavo.engine.text.assistant.tool_format import NO_SPECIALS, ToolFormat
from octavo.engine.text.assistant.turn import (
    Broken,
    Ended,
    Goes,
    Steps,
    Turn,
    TurnParser,
    attempt,
)

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_END = "<|end|>"
_CALL = "<|call|>"
_RETURN = "<|return|>"
_HEADER = scanner_of(_START, _CHANNEL, _CONSTRAIN, _MESSAGE)
_BEGINS = scanner_of(_START, _CHANNEL, _MESSAGE)
_ENDS = scanner_of(_END, _CALL, _RETURN, _START, _CHANNEL)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
MAX_HEADER_CHARS = 512
"""Of what stands between two marks of a message's header: more is no header."""


@dataclass(frozen=True, slots=True)
class Harmony(ToolFormat):
    """The format of gpt-oss. Its parser reads thoughts too: they stand between other messages.

    A message for a function is a call; one on the analysis channel is a thought; any other is
    content.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that a turn is made of."""
        return (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)

    def parser(self, tools: Sequence[FunctionTool]) -> AssistantParser:
        """A parser of one turn."""
        return TurnParser(_read_turn)

    def grammar(
        self,
        tools: Sequence[FunctionTool],
        choice: ToolChoice,
        specials: Mapping[str, int] = NO_SPECIALS,
    ) -> str | None:
        """The grammar of the turns that the choice allows. None if the vocabulary has not the
        special tokens: then it is no vocabulary of this format."""
        if not specials.keys() >= {_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END}:
            return None

        def put(text: str) -> str:
            return words(text, specials)

        allowed = allowed_tools(tools, choice)
        rules = []
        for index, tool in enumerate(allowed):
            header = f" to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}"
            rules.append(f"call_{index}: {put(header)} {arguments_of(tool)}")
        calls = one_of([f"call_{index}" for index in range(len(allowed))])
        next_message = put(f"{_END}{_START}assistant")
        analysis = put(f"{_CHANNEL}analysis{_MESSAGE}")
        commentary = put(f"{_CHANNEL}commentary")
        final = put(f"{_CHANNEL}final{_MESSAGE}")
        preamble = put(_MESSAGE)
        others = f"thought: {analysis} TEXT? {next_message}"
        last = "call"
        if choice.mode == "auto":
            others += f"\nsaid: {commentary} {preamble} TEXT? {next_message}"
            last = f"call | {final} TEXT?"
        before = "(thought | said)*" if choice.mode == "auto" else "thought*"
        start = f"start: {before} ({last})"
        return (
            "\n".join([start, others, f"call: {commentary} ({calls})", "TEXT: /(?s:.+)/", *rules])
            + "\n"
        )


def _read_turn(turn: Turn) -> Steps[None]:
    """Reads messages up to the end of the turn."""
    turn.hold()
    yield from attempt(turn, _read_message(turn))
    while True:
        marker = yield from turn.until(_BEGINS)
        if marker is None:
            turn.pass_on()
            return
        turn.hold()
        yield from attempt(turn, _read_message(turn))


def _read_message(turn: Turn) -> Steps[None]:
    """Reads a header, whatever of it is there, and the message after it."""
    recipient, channel = yield from _read_header(turn)
    if recipient:
        if (yield from next_char(turn)) != "{":
            raise Broken
        turn.start_call(recipient.removeprefix("functions."))
        yield from read_arguments(turn)
        turn.end_call()
        yield from turn.spaces()
        yield from _read_end(turn)
        return
    turn.drop_held()
    turn.send(Goes.TO_REASONING if channel == "analysis" else Goes.TO_CONTENT)
    yield from turn.until(_ENDS)
    turn.send(Goes.NOWHERE)
    yield from _read_end(turn)


def _read_end(turn: Turn) -> Steps[None]:
    """Reads what ends a message, if anything does."""
    for mark in (_END, _CALL, _RETURN):
        if (yield from turn.optional(mark)):
            return


def _read_header(turn: Turn) -> Steps[tuple[str | None, str]]:
    """Reads up to a message's text; says for whom it is, if not for the user, and on which channel.

    Raises:
        Broken: no header stands there.
    """
    recipient: str | None = None
    channel = last = ""
    yield from turn.spaces()
    if (yield from turn.peek()) != "<":
        yield from turn.literal("to=")
        recipient = (yield from _read_words(turn)).strip()
    while True:
        last = yield from turn.either(_HEADER)
        if last == _MESSAGE:
            return recipient, channel
        words = yield from _read_words(turn)
        named = _RECIPIENT.search(words)
        recipient = recipient if named is None else named[1]
        if last == _CHANNEL:
            channel = words.split(maxsplit=1)[0] if words.strip() else ""


def _read_words(turn: Turn) -> Steps[str]:
    """Reads up to the next special token of a header."""
    turn.pass_on()
    pieces: list[str] = []
    num_left = MAX_HEADER_CHARS
    while (yield from turn.peek()) != "<":
        if turn.has_ended:
            raise Ended
        if not num_left:
            raise Broken
        end = turn.text.find("<", turn.at)
        text = turn.text[turn.at : min(len(turn.text) if end < 0 else end, turn.at + num_left)]
        pieces.append(text)
        num_left -= len(text)
        turn.at += len(text)
    return "".join(pieces)
