"""Reads JSON values while they come."""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.engine.text.assistant.events import ArgumentsDelta
from octavo.engine.text.assistant.turn import Broken, Ended, Goes, Steps, Turn

MAX_DEPTH = 128
"""Of the arrays and objects in a call's arguments: more is no call. Clients' own parsers give up
not far beyond."""
_SPACES = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_DIGITS = re.compile(r"[0-9]+")
_WORDS = {"t": "true", "f": "false", "n": "null"}


def next_char(turn: Turn) -> Steps[str]:
    """Reads white space, and says which character follows it.

    Raises:
        Ended: none does.
    """
    yield from turn.run(_SPACES)
    char = yield from turn.peek()
    if not char:
        raise Ended
    return char


def read_value(turn: Turn) -> Steps[None]:
    """Reads one JSON value and nothing after it.

    Line breaks and other control characters within strings, which JSON forbids and models write,
    are taken; arguments get their escapes.

    Raises:
        Broken: at the first character with which the text cannot be JSON.
    """
    closers: list[str] = []
    while True:
        char = yield from next_char(turn)
        if char in "{[":
            if len(closers) == MAX_DEPTH:
                raise Broken
            turn.at += 1
            closers.append("}" if char == "{" else "]")
            if (yield from next_char(turn)) != closers[-1]:
                if char == "{":
                    yield from _read_key(turn)
                continue
            turn.at += 1
            closers.pop()
        elif char == '"':
            yield from read_string(turn)
        elif char in _WORDS:
            yield from turn.literal(_WORDS[char])
        else:
            yield from _read_number(turn)
        while closers:
            char = yield from next_char(turn)
            if char == ",":
                turn.at += 1
                if closers[-1] == "}":
                    yield from _read_key(turn)
                break
            if char != closers[-1]:
                raise Broken
            turn.at += 1
            closers.pop()
        else:
            return


def read_string(turn: Turn) -> Steps[None]:
    """Reads one JSON string.

    Raises:
        Broken: at the first character with which the text cannot be one.
    """
    yield from turn.literal('"')
    while True:
        yield from turn.run(_PLAIN)
        char = yield from turn.peek()
        if not char:
            raise Ended
        if char == '"':
            turn.at += 1
            return
        if char == "\\":
            yield from _read_escape(turn)
        else:
            turn.skip(1, instead=json.dumps(char)[1:-1])


def read_string_value(turn: Turn) -> Steps[str]:
    """What a JSON string says; its text is held."""
    text: str = json.loads((yield from turn.captured(read_string(turn))), strict=False)
    return text


def read_arguments(turn: Turn) -> Steps[None]:
    """Reads an object that stands here: the arguments of the open call."""
    turn.send(Goes.TO_ARGUMENTS)
    yield from read_value(turn)
    turn.hold()


def object_text(text: str) -> str:
    """The arguments that a whole JSON value stands for.

    Args:
        text: an object, an object's text in a string, or null; it was read by `read_value`.

    Raises:
        Broken: another value.
    """
    if text.startswith('"'):
        text = json.loads(text, strict=False).strip()
    if text == "null" or not text:
        return "{}"
    if not text.startswith("{"):
        raise Broken
    turn = Turn()
    turn.add(text)
    turn.has_ended = True
    turn.start_call("")
    turn.send(Goes.TO_ARGUMENTS)
    try:
        for _ in read_value(turn):
            raise AssertionError("all of the text is there")
    except Ended:  # of the string, and not of the turn
        raise Broken from None
    turn.pass_on()
    if turn.at < len(text):
        raise Broken
    events = turn.take_events()
    return "".join(event.text for event in events if isinstance(event, ArgumentsDelta))


def dumps(value: Any) -> str:
    """JSON text for a client, as models write it: characters stand for themselves."""
    return json.dumps(value, ensure_ascii=False)


def _read_key(turn: Turn) -> Steps[None]:
    if (yield from next_char(turn)) != '"':
        raise Broken
    yield from read_string(turn)
    if (yield from next_char(turn)) != ":":
        raise Broken
    turn.at += 1


def _read_escape(turn: Turn) -> Steps[None]:
    """Reads an escape, or nothing of it."""
    while len(turn.text) - turn.at < 2:
        if not (yield from turn.more()):
            raise Ended
    kind = turn.text[turn.at + 1]
    if kind in '"\\/bfnrt':
        turn.at += 2
        return
    if kind != "u":
        raise Broken
    while len(turn.text) - turn.at < 6:
        if not (yield from turn.more()):
            raise Ended
    if not _HEX.match(turn.text, turn.at + 2):
        raise Broken
    turn.at += 6


def _read_number(turn: Turn) -> Steps[None]:
    char = yield from turn.peek()
    if char == "-":
        turn.at += 1
        char = yield from turn.peek()
    if char == "0":
        turn.at += 1
    else:
        yield from _read_digits(turn)
    if (yield from turn.peek()) == ".":
        turn.at += 1
        yield from _read_digits(turn)
    if (yield from turn.peek()) in ("e", "E"):
        turn.at += 1
        if (yield from turn.peek()) in ("+", "-"):
            turn.at += 1
        yield from _read_digits(turn)


def _read_digits(turn: Turn) -> Steps[None]:
    char = yield from turn.peek()
    if not char:
        raise Ended
    if not _DIGITS.match(char):
        raise Broken
    yield from turn.run(_DIGITS)
