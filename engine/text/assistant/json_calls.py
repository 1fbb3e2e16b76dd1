"""Calls that are JSON objects with the function's name and its arguments in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from octavo.engine.text.assistant.events import MAX_HELD_CHARS, AssistantParser
from octavo.engine.text.assistant.grammars import arguments_of, one_of, turns, words
from octavo.engine.text.assistant.json_text import (
    dumps,
    next_char,
    object_text,
    read_arguments,
    read_string_value,
    read_value,
)
from octavo.engine.text.assistant.scanner import Scanner, Shape, scanner_of
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice, allowed_tools
from octavo.engine.text.assistant.tool_format import NO_SPECIALS, ToolFormat, special_tokens
from octavo.engine.text.assistant.tool_schemas import names_of
from octavo.engine.text.assistant.turn import Broken, Steps, Turn, TurnParser, read_marked

NAME_KEYS = ("name", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")
ID_KEYS = ("id", "tool_call_id")
FUNCTION_KEY = "function"
_KEYS = (*NAME_KEYS, *ARGUMENTS_KEYS, *ID_KEYS, FUNCTION_KEY, "type")
_SPACE = r"[ \t\n\r]{0,32}"


def _bare_objects() -> Shape:
    """Objects, or lists of them, that begin with a key of calls. Their first key is a part of the
    marker, so that most braces of an answer or a program cost nothing."""
    keys = "|".join(_KEYS)
    begun_keys = sorted({key[:size] for key in _KEYS for size in range(1, len(key))}, reverse=True)
    begun = rf'{_SPACE}(?:"(?:(?:{keys})(?:"{_SPACE})?|{"|".join(begun_keys)})?)?'
    return Shape(
        whole=rf'(?:\[{_SPACE})?\{{{_SPACE}"(?:{keys})"{_SPACE}:',
        begun=rf"(?:\[{_SPACE}(?:\{{{begun})?|\{{{begun})",
        most_begun=3 * 32 + max(map(len, _KEYS)) + len('[{""'),
    )


_BARE_OBJECTS = _bare_objects()


@dataclass(frozen=True, slots=True)
class JsonCalls(ToolFormat):
    """A format of calls like `{"name": "f", "arguments": {"x": 1}}`, one by one or in a list.

    The parser takes objects and lists of objects wherever either is due, the keys in any order,
    and the names for them that any family uses. The grammar knows only what the family writes.

    Attributes:
        opening: what a call, or a list, begins with.
        closing: what ends it; may be missing from a text.
        other_openings: others that models are known to write.
        name_key: the grammar's name for the function's name.
        arguments_key: the grammar's name for the arguments.
        inside: what the grammar has before, between and after several calls of one opening; None
            if each has its own.
        separator: of calls that have an opening each, in the grammar.
        space: white space after the opening and before the closing, in the grammar.
        needs_known_name: whether an object is a call only if its name is an offered tool's, since
            answers may begin as calls do.
    """

    opening: str
    closing: str = ""
    other_openings: tuple[str, ...] = ()
    name_key: str = "name"
    arguments_key: str = "arguments"
    inside: tuple[str, str, str] | None = None
    separator: str = "\n"
    space: str = ""
    needs_known_name: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that a call is made of."""
        return special_tokens(self.opening, *self.other_openings, self.closing)

    def parser(self, tools: Sequence[FunctionTool]) -> AssistantParser:
        """A parser of one turn."""
        known = names_of(tools) if self.needs_known_name else None
        read = partial(_read_calls, closing=self.closing, known=known)
        return TurnParser(partial(read_marked, openings=self._openings(), read_calls=read))

    def _openings(self) -> Scanner:
        if not self.needs_known_name:
            return scanner_of(self.opening, *self.other_openings)
        return Scanner(self.other_openings, _BARE_OBJECTS)

    def grammar(
        self,
        tools: Sequence[FunctionTool],
        choice: ToolChoice,
        specials: Mapping[str, int] = NO_SPECIALS,
    ) -> str | None:
        """The grammar of the turns that the choice allows."""
        rules = []
        allowed = allowed_tools(tools, choice)
        head = "" if self.needs_known_name else f'{{"{self.name_key}": '
        for index, tool in enumerate(allowed):
            before = f'{head}{dumps(tool.name)}, "{self.arguments_key}": '
            rules.append(f'call_{index}: {words(before, specials)} {arguments_of(tool)} "}}"')
        calls = f"({one_of([f'call_{index}' for index in range(len(allowed))])})"
        if self.inside is not None:
            first, between, last = (words(each, specials) for each in self.inside)
            more = f" ({between} {calls})*" if choice.is_parallel else ""
            calls = f"{first} {calls}{more} {last}"
        # What ends a call that has no marks of its own comes only between two.
        end = "" if self.needs_known_name or not self.closing else self.space + self.closing
        body = f"{words(self.space, specials)} {calls} {words(end, specials)}"
        separator = self.separator if self.inside is None else None
        return turns(self.opening, body, rules, choice, specials, between=separator)


def _read_calls(turn: Turn, marker: str, closing: str, known: frozenset[str] | None) -> Steps[None]:
    """Reads the call or the list of calls after an opening, and the closing."""
    if marker[-1] == ":":
        turn.at -= len(marker)
    elif marker[-1] == "[":
        turn.at -= 1
    while True:
        yield from read_call_or_list(turn, known)
        yield from turn.spaces()
        if closing and (yield from turn.optional(closing)):
            return
        if (yield from turn.peek()) != "{":
            return
        turn.hold()


def read_call_or_list(turn: Turn, known: frozenset[str] | None) -> Steps[None]:
    """Reads one call, or several in a list."""
    if (yield from next_char(turn)) != "[":
        yield from read_call(turn, known)
        return
    turn.at += 1
    yield from read_rest_of_list(turn, known)


def read_rest_of_list(turn: Turn, known: frozenset[str] | None) -> Steps[None]:
    """Reads calls in a list after its bracket."""
    while True:
        yield from read_call(turn, known)
        char = yield from next_char(turn)
        turn.at += 1
        if char == "]":
            return
        if char != ",":
            turn.at -= 1
            raise Broken
        turn.hold()


def read_call(turn: Turn, known: frozenset[str] | None, *, may_wrap: bool = True) -> Steps[None]:
    """Reads one call. It begins when its arguments do, or at its end if they precede the name.

    Args:
        turn: what it reads is held.
        known: names of functions; others make the object no call. None for any.
        may_wrap: whether the object may have the call within it, as OpenAI's API does.

    Raises:
        Broken: the object is no call, or breaks off.
    """
    name = call_id = early = None
    has_arguments = is_wrapped = False
    if (yield from next_char(turn)) != "{":
        raise Broken
    while True:
        turn.at += 1
        if (yield from next_char(turn)) != '"':
            raise Broken
        key = yield from read_string_value(turn)
        if (yield from next_char(turn)) != ":":
            raise Broken
        turn.at += 1
        char = yield from next_char(turn)
        if is_wrapped:
            yield from turn.captured(read_value(turn), MAX_HELD_CHARS)
        elif key in NAME_KEYS and name is None:
            name = yield from _read_name(turn, known)
            if early is not None:
                turn.start_call(name, call_id)
                turn.tell_arguments(early)
        elif key == FUNCTION_KEY and char == "{" and name is None and may_wrap:
            yield from read_call(turn, known, may_wrap=False)
            turn.hold()
            is_wrapped, may_wrap = True, False
        elif key in ARGUMENTS_KEYS and not has_arguments:
            has_arguments = True
            if char == "{" and name is not None:
                turn.start_call(name, call_id)
                yield from read_arguments(turn)
            else:
                early = object_text((yield from turn.captured(read_value(turn), MAX_HELD_CHARS)))
                if name is not None:
                    turn.start_call(name, call_id)
                    turn.tell_arguments(early)
        elif key in ID_KEYS and char == '"':
            call_id = yield from read_string_value(turn)
        elif known is not None and key != "type":
            raise Broken
        else:
            yield from turn.captured(read_value(turn), MAX_HELD_CHARS)
        char = yield from next_char(turn)
        if char == "}":
            break
        if char != ",":
            raise Broken
    turn.at += 1
    if is_wrapped:
        return
    if name is None:
        raise Broken
    if not has_arguments:
        if known is not None:  # words for the user may be an object with a name
            raise Broken
        turn.start_call(name, call_id)
        turn.tell_arguments("{}")
    turn.end_call()


def _read_name(turn: Turn, known: frozenset[str] | None) -> Steps[str]:
    name = yield from read_string_value(turn)
    if not name or (known is not None and name not in known):
        raise Broken
    return name
