"""Calls as Gemma's families write them: `call:f{x:1,s:<escape>text<escape>}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.engine.text.assistant.events import MAX_HELD_CHARS, AssistantParser
from octavo.engine.text.assistant.grammars import one_of, turns, words
from octavo.engine.text.assistant.json_text import MAX_DEPTH, dumps, next_char
from octavo.engine.text.assistant.names import read_name
from octavo.engine.text.assistant.scanner import scanner_of
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice, allowed_tools
from octavo.engine.text.assistant.tool_format import NO_SPECIALS, ToolFormat
from octavo.engine.text.assistant.tool_schemas import arguments_schema, parameters_of
from octavo.engine.text.assistant.turn import (
    Broken,
    Ended,
    Goes,
    Steps,
    Turn,
    TurnParser,
    read_marked,
)
from octavo.engine.text.assistant.value_grammar import Style, ValueRules
from octavo.engine.text.assistant.values import ALL, json_of_text, parameter_schema, types_of

_BARE = re.compile(r"[^,\[\]{}<]+")
_BARE_KEY = re.compile(r"[^:,\[\]{}<>\n]+")
_ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}:/"
_CLOSERS = {"[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class GemmaCalls(ToolFormat):
    """A format of calls whose strings stand between two of the same special token.

    Attributes:
        opening: what a call begins with.
        closing: what ends it; may be missing from a text.
        quote: what a string begins and ends with.
    """

    opening: str
    closing: str
    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that a call is made of."""
        return (self.opening, self.closing, self.quote)

    def parser(self, tools: Sequence[FunctionTool]) -> AssistantParser:
        """A parser of one turn."""
        read = partial(self._read, schemas=parameters_of(tools))
        return TurnParser(partial(read_marked, openings=scanner_of(self.opening), read_calls=read))

    def _read(
        self, turn: Turn, marker: str, schemas: Mapping[str, Mapping[str, Any]]
    ) -> Steps[None]:
        yield from turn.spaces()
        yield from turn.literal("call:")
        name = yield from read_name(turn)
        yield from turn.literal("{")
        turn.start_call(name)
        yield from _Arguments(turn, self.quote, schemas.get(name, {})).read()
        turn.end_call()
        yield from turn.spaces()
        yield from turn.optional(self.closing)

    def can_name(self, key: str) -> bool:
        """Whether a call can have an argument of a name."""
        return _BARE_KEY.fullmatch(key) is not None and key == key.strip()

    def grammar(
        self,
        tools: Sequence[FunctionTool],
        choice: ToolChoice,
        specials: Mapping[str, int] = NO_SPECIALS,
    ) -> str | None:
        """The grammar of the turns that the choice allows."""
        rules: list[str] = []
        allowed = allowed_tools(tools, choice)
        style = Style(
            separator=",",
            keys=lambda key: [f"{key}:"],
            any_key=_ANY_KEY,
            literals=lambda value: [self._written(value)],
            quote=self.quote,
        )
        for index, tool in enumerate(allowed):
            values = ValueRules(f"call_{index}", arguments_schema(tool), style, specials)
            arguments = values.arguments(style.keys, style.any_key)
            before = words(f"call:{tool.name}{{", specials)
            rules += [f'call_{index}: {before} {arguments} "}}"', *values.rules]
        calls = f"({one_of([f'call_{index}' for index in range(len(allowed))])})"
        body = f"{calls} {words(self.closing, specials)}"
        return turns(self.opening, body, rules, choice, specials, between="")

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, Mapping):
            parts = (f"{key}:{self._written(each)}" for key, each in value.items())
            return f"{{{','.join(parts)}}}"
        return dumps(value)


class _Arguments:
    """Reads a call's arguments after their brace, and tells them in JSON."""

    def __init__(self, turn: Turn, quote: str, schema: Mapping[str, Any]) -> None:
        self._turn = turn
        self._quote = quote
        self._ends = scanner_of(quote)
        self._schema = schema

    def read(self) -> Steps[None]:
        turn = self._turn
        turn.send(Goes.NOWHERE)
        turn.tell_arguments("{")
        closers = ["}"]
        is_first = True
        while closers:
            char = yield from next_char(turn)
            if char == closers[-1]:
                turn.at += 1
                turn.tell_arguments(closers.pop())
                is_first = False
                continue
            if not is_first:
                # Small models leave commas out.
                if char == ",":
                    turn.at += 1
                turn.tell_arguments(", ")
            types = ALL
            if closers[-1] == "}":
                key = yield from self._key()
                turn.tell_arguments(f"{dumps(key)}: ")
                if len(closers) == 1:
                    types = types_of(parameter_schema(self._schema, key), self._schema)
                char = yield from next_char(turn)
            elif not is_first:
                char = yield from next_char(turn)
            is_first = char in _CLOSERS
            if is_first:
                if len(closers) == MAX_DEPTH:
                    raise Broken
                turn.at += 1
                turn.tell_arguments(char)
                closers.append(_CLOSERS[char])
            elif char == self._quote[0]:
                yield from turn.literal(self._quote)
                yield from self._string(types)
            else:
                yield from self._bare(types)

    def _key(self) -> Steps[str]:
        """Reads a parameter's name and the colon after it."""
        turn = self._turn
        turn.hold()
        if (yield from next_char(turn)) == self._quote[0]:
            yield from turn.literal(self._quote)
            turn.claim()
            key = ""
            while (yield from turn.peek()):
                at, found = self._ends.find(turn.text, turn.at)
                key += turn.text[turn.at : at]
                turn.at = at
                if found is not None:
                    break
                if not (yield from turn.more()):
                    raise Ended
            yield from turn.literal(self._quote)
        else:
            key = yield from turn.word(_BARE_KEY)
        if (yield from next_char(turn)) != ":" or not key:
            raise Broken
        turn.at += 1
        turn.claim()
        turn.send(Goes.NOWHERE)
        return key.strip()

    def _string(self, types: frozenset[str]) -> Steps[None]:
        """Reads a string after its quote, up to the next."""
        turn = self._turn
        is_string = "string" in types
        pieces: list[str] = []
        if is_string:
            turn.tell_arguments('"')
        while True:
            at, found = self._ends.find(turn.text, turn.at)
            text = turn.text[turn.at : at]
            turn.at = at
            if is_string:
                turn.tell_arguments(dumps(text)[1:-1])
            else:
                pieces.append(text)
            if found is not None:
                turn.at += len(found)
                break
            if not (yield from turn.more()):
                raise Ended
        turn.tell_arguments('"' if is_string else json_of_text("".join(pieces), types))

    def _bare(self, types: frozenset[str]) -> Steps[None]:
        """Reads a value without quotes: a number, a word, or a string of a careless model."""
        turn = self._turn
        turn.hold()
        text = yield from turn.word(_BARE, MAX_HELD_CHARS)
        if (yield from turn.peek()) not in (",", "]", "}", "<"):
            raise Ended if turn.has_ended else Broken
        turn.claim()
        turn.send(Goes.NOWHERE)
        turn.tell_arguments(json_of_text(text.strip(), types | {"boolean", "null"}))
