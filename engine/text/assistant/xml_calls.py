"""Calls whose parameters stand between tags, each as bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.engine.text.assistant.events import MAX_HELD_CHARS, AssistantParser
from octavo.engine.text.assistant.grammars import one_of, turns, words
from octavo.engine.text.assistant.json_text import dumps, read_arguments
from octavo.engine.text.assistant.names import read_name
from octavo.engine.text.assistant.scanner import Scanner, scanner_of
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice, allowed_tools
from octavo.engine.text.assistant.tool_format import NO_SPECIALS, ToolFormat
from octavo.engine.text.assistant.tool_schemas import parameters_of
from octavo.engine.text.assistant.turn import (
    Broken,
    Ended,
    Goes,
    Steps,
    Turn,
    TurnParser,
    read_marked,
)
from octavo.engine.text.assistant.values import ALL, json_of_text, parameter_schema, types_of
from octavo.engine.text.assistant.xml_grammar import call_rules


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts between which the parts of a call stand, in their order.

    Attributes:
        call: before the function's name.
        named: after the name, or "" if white space or the next tag ends it.
        key: before a parameter's name.
        value: after it, before the value.
        value_end: after the value.
        call_end: after the parameters; "" if the section's end ends the call.
        line: white space between tags, in the grammar.
        nothing: what the grammar has in the place of parameters where there are none.
        is_padded: whether a value stands on lines of its own: a line break before it and one after
            it are none of it.
        types: what may stand in the place of `value`, by whether the value is a string, where the
            text itself says so.
    """

    call: str
    named: str
    key: str
    value: str
    value_end: str
    call_end: str
    line: str = "\n"
    nothing: str = ""
    is_padded: bool = False
    types: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True)
class XmlCalls(ToolFormat):
    """A format of calls like `<f><x>1</x></f>`. Values get their types from the tools' schemas.

    Attributes:
        section: what a call, or a list of calls, begins with.
        section_end: what ends it; may be missing from a text.
        tags: of a call.
        has_many: whether a section has several calls, in the grammar.
        other_openings: tags with which a call may begin without its section.
        more_markers: other special tokens of calls.
    """

    section: str
    section_end: str
    tags: Tags
    has_many: bool = False
    other_openings: tuple[str, ...] = ()
    more_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that a call is made of."""
        return (self.section, self.section_end, *self.more_markers)

    def parser(self, tools: Sequence[FunctionTool]) -> AssistantParser:
        """A parser of one turn."""
        openings = scanner_of(self.section, *self.other_openings)
        read = partial(self._read, schemas=parameters_of(tools))
        return TurnParser(partial(read_marked, openings=openings, read_calls=read))

    def _read(
        self, turn: Turn, marker: str, schemas: Mapping[str, Mapping[str, Any]]
    ) -> Steps[None]:
        """Reads the calls of a section."""
        tags = self.tags
        ends = scanner_of(tags.key, tags.call_end or self.section_end)
        if marker == self.section:
            yield from turn.spaces()
            yield from turn.literal(tags.call)
        while True:
            yield from _read_call(turn, tags, ends, schemas)
            if not tags.call_end:
                return
            yield from turn.spaces()
            if (yield from turn.optional(self.section_end)):
                return
            if not (yield from turn.optional(tags.call)):
                return
            turn.hold()

    def can_name(self, key: str) -> bool:
        """Whether a call can have an argument of a name."""
        return _KEY.fullmatch(key) is not None

    def grammar(
        self,
        tools: Sequence[FunctionTool],
        choice: ToolChoice,
        specials: Mapping[str, int] = NO_SPECIALS,
    ) -> str | None:
        """The grammar of the turns that the choice allows."""
        tags = self.tags
        rules: list[str] = []
        allowed = allowed_tools(tools, choice)
        for index, tool in enumerate(allowed):
            rules += call_rules(f"call_{index}", tool, tags, self.section_end, specials)
        calls = f"({one_of([f'call_{index}' for index in range(len(allowed))])})"
        more = "+" if choice.is_parallel and self.has_many else ""
        last = tags.line + self.section_end if tags.call_end else ""
        body = f"{calls}{more} {words(last, specials)}"
        between = None if self.has_many else "\n"
        return turns(self.section, body, rules, choice, specials, between=between)


def _read_call(
    turn: Turn, tags: Tags, ends: Scanner, schemas: Mapping[str, Mapping[str, Any]]
) -> Steps[None]:
    """Reads a call after the tag before its name."""
    yield from turn.spaces()
    name = yield from read_name(turn)
    if tags.named:
        yield from turn.literal(tags.named)
    yield from turn.spaces()
    if (yield from turn.peek()) == "{":  # models that take the tags for a frame around JSON
        turn.start_call(name)
        yield from read_arguments(turn)
        yield from turn.spaces()
        if (yield from turn.either(ends)) == tags.key:
            raise Broken
        turn.end_call()
        return
    tag = yield from turn.either(ends)
    turn.start_call(name)
    schema = schemas.get(name, {})
    begins = "{"
    while tag == tags.key:
        key = yield from turn.word(_KEY)
        is_string = yield from _read_value_tag(turn, tags)
        types = types_of(parameter_schema(schema, key), schema)
        if is_string and "string" in types:
            types = _STRING
        turn.claim()
        turn.tell_arguments(f"{begins}{dumps(key)}: ")
        begins = ", "
        yield from _read_value(turn, tags, types)
        turn.hold()
        yield from turn.spaces()
        tag = yield from turn.either(ends)
    turn.tell_arguments("}" if begins != "{" else "{}")
    turn.end_call()


def _read_value_tag(turn: Turn, tags: Tags) -> Steps[bool]:
    """Reads what stands between a parameter's name and its value; whether it says "a string"."""
    if tags.types is not None:
        return tags.types[(yield from turn.either(scanner_of(*tags.types)))]
    first, *others = tags.value.split("\n")
    yield from turn.literal(first)
    for each in others:
        yield from turn.spaces()
        yield from turn.literal(each)
    return False


def _read_value(turn: Turn, tags: Tags, types: frozenset[str]) -> Steps[None]:
    """Reads a value and its closing tag. A string is told as it comes, another value at its end."""
    turn.send(Goes.NOWHERE)
    # Models forget to close a value that ends a line.
    others = ("\n" + tags.key, "\n" + tags.call_end) if tags.is_padded else ()
    ends = scanner_of(tags.value_end, *others)
    pieces: list[str] = []
    if types == _STRING:
        turn.tell_arguments('"')
    if tags.is_padded and (yield from turn.peek()) == "\n":
        turn.at += 1
    while True:
        at, tag = ends.find(turn.text, turn.at)
        # The line break before the closing tag is no part of the value.
        may_be_break = tags.is_padded and tag in (None, tags.value_end)
        is_break = may_be_break and turn.text[turn.at : at].endswith("\n")
        text = turn.text[turn.at : at - is_break]
        if types == _STRING:
            turn.tell_arguments(dumps(text)[1:-1])
        else:
            pieces.append(text)
        turn.at = at - is_break
        if tag is not None:
            turn.at = at
            break
        if not (yield from turn.more()):
            raise Ended
    if types & _NESTED and types != ALL:
        pieces.append((yield from _rest_of_json(turn, "".join(pieces), ends)))
    yield from turn.optional(tags.value_end)
    turn.tell_arguments('"' if types == _STRING else json_of_text("".join(pieces), types))


def _rest_of_json(turn: Turn, value: str, ends: Scanner) -> Steps[str]:
    """What JSON has from a tag within one of its strings on, up to the tag that ends the value.

    "" if the tag stands in no string, or if no JSON comes of it: then the tag ends the value.
    """
    if value.lstrip()[:1] not in ("[", "{"):
        return ""
    num_read, num_seen = 0, 1  # characters ahead: up to the last tag, and without another
    is_open = _leaves_open(value)
    while is_open:
        at, tag = ends.find(turn.text, turn.at + num_seen)
        num_seen = at - turn.at
        if tag is not None:
            is_open ^= _leaves_open(turn.text[turn.at + num_read : at])
            num_read, num_seen = num_seen, num_seen + 1
        elif num_seen > MAX_HELD_CHARS or not (yield from turn.more()):
            return ""
    rest = turn.text[turn.at : turn.at + num_read]
    try:
        json.loads(value + rest)
    except (ValueError, RecursionError):
        return ""
    turn.at += num_read
    return rest


def _leaves_open(text: str) -> bool:
    """Whether a part of JSON that begins in no string ends within one, or the other way round."""
    return _ESCAPED.sub("", text).count('"') % 2 == 1


_ESCAPED = re.compile(r"\\.", re.DOTALL)
_KEY = re.compile(r"""[^<>"\n]+""")
_STRING = frozenset({"string"})
_NESTED = frozenset({"array", "object"})
