"""Reads Python's literals while they come, as JSON."""

from __future__ import annotations

import re

from octavo.engine.text.assistant.json_text import MAX_DEPTH, dumps, next_char
from octavo.engine.text.assistant.turn import Broken, Ended, Goes, Steps, Turn

_WORD = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"([+-]?)(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES = {
    "\\": "\\",
    "/": "/",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"[0-7]{1,3}")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def read_python_value(turn: Turn) -> Steps[None]:
    """Reads one literal and nothing after it; tells the arguments what it is in JSON.

    Tuples are arrays, keys are strings. JSON's own words are taken as well.

    Args:
        turn: within a call. What it reads goes nowhere.

    Raises:
        Broken: at the first character with which the text cannot be a literal.
    """
    turn.send(Goes.NOWHERE)
    closers: list[str] = []
    while True:
        char = yield from next_char(turn)
        if char in _CLOSERS:
            if len(closers) == MAX_DEPTH:
                raise Broken
            turn.at += 1
            closers.append(_CLOSERS[char])
            turn.tell_arguments("{" if char == "{" else "[")
        elif char in "'\"":
            yield from read_python_string(turn)
        else:
            turn.tell_arguments((yield from _read_word(turn)))
        is_first = char in _CLOSERS
        while closers:
            char = yield from next_char(turn)
            if char == "," and not is_first:
                turn.at += 1
                # A comma may be the last thing before the end.
                if (yield from next_char(turn)) != closers[-1]:
                    turn.tell_arguments(", ")
                    break
            elif char == closers[-1]:
                turn.at += 1
                turn.tell_arguments("}" if closers.pop() == "}" else "]")
            elif is_first:
                break
            else:
                raise Broken
            is_first = False
        else:
            return
        if closers[-1] == "}":
            yield from _read_key(turn)


def read_python_string(turn: Turn) -> Steps[None]:
    """Reads a string; tells the arguments a JSON string."""
    quote = yield from turn.peek()
    turn.at += 1
    is_long = False
    turn.tell_arguments('"')
    if (yield from turn.peek()) == quote:
        turn.at += 1
        if (yield from turn.peek()) != quote:
            turn.tell_arguments('"')
            return
        turn.at += 1
        is_long = True
    while True:
        match = _PLAIN[quote].match(turn.text, turn.at)
        if match is not None:
            turn.at = match.end()
            turn.tell_arguments(dumps(match.group())[1:-1])
        char = yield from turn.peek()
        if not char:
            raise Ended
        if char == "\\":
            turn.tell_arguments((yield from _read_escape(turn)))
        elif char == quote:
            if not is_long:
                turn.at += 1
                break
            if (yield from _closes_long(turn, quote * 3)):
                break
            turn.at += 1
            turn.tell_arguments(dumps(quote)[1:-1])
    turn.tell_arguments('"')


def _closes_long(turn: Turn, quotes: str) -> Steps[bool]:
    try:
        yield from turn.literal(quotes)
    except Broken:
        return False
    return True


def _read_key(turn: Turn) -> Steps[None]:
    char = yield from next_char(turn)
    if char in "'\"":
        yield from read_python_string(turn)
    else:
        turn.tell_arguments(f'"{(yield from _read_word(turn))}"')
    if (yield from next_char(turn)) != ":":
        raise Broken
    turn.at += 1
    turn.tell_arguments(": ")


def _read_word(turn: Turn) -> Steps[str]:
    """Reads a number, or a word for a value; says it in JSON."""
    turn.hold()
    word = yield from turn.captured(turn.run(_WORD))
    if (yield from turn.peek()) == "":
        raise Ended
    made = _WORDS.get(word) or _json_number(word)
    if made is None:
        raise Broken
    turn.claim()
    turn.send(Goes.NOWHERE)
    return made


def _json_number(word: str) -> str | None:
    match = _NUMBER.fullmatch(word)
    if match is None:
        return None
    sign, whole, part, power = match.groups()
    whole = (whole or "").replace("_", "").lstrip("0")
    digits = part[1:] if part else ""
    if not match[2] and not digits:
        return None
    return (
        ("-" if sign == "-" else "")
        + (whole or "0")
        + (f".{digits or '0'}" if part else "")
        + (power or "")
    )


def _read_escape(turn: Turn) -> Steps[str]:
    """Reads an escape; what it says, within a JSON string."""
    kind = yield from _ahead(turn, 1)
    if kind in _ESCAPES:
        turn.at += 2
        return dumps(_ESCAPES[kind])[1:-1]
    if kind in _HEX_DIGITS:
        num_digits = _HEX_DIGITS[kind]
        for place in range(num_digits):
            if not _HEX.match((yield from _ahead(turn, 2 + place))):
                raise Broken
        code = int(turn.text[turn.at + 2 : turn.at + 2 + num_digits], 16)
        if code > 0x10FFFF:
            raise Broken
        turn.at += 2 + num_digits
        # Half of a pair stays an escape: no text has it, and a JSON string may.
        return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else dumps(chr(code))[1:-1]
    if kind in "01234567":
        yield from _ahead(turn, 2)
        yield from _ahead(turn, 3)
        match = _OCTAL.match(turn.text, turn.at + 1)
        assert match is not None
        turn.at = match.end()
        return dumps(chr(int(match.group(), 8)))[1:-1]
    # Python keeps the backslash of what is no escape.
    turn.at += 1
    return "\\\\"


def _ahead(turn: Turn, num_chars: int) -> Steps[str]:
    """The character that many places on, unread."""
    while len(turn.text) - turn.at <= num_chars:
        if not (yield from turn.more()):
            raise Ended
    return turn.text[turn.at + num_chars]
