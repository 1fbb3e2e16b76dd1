"""Calls as Python has them: `[f(x=1), g()]`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from octavo.engine.text.assistant.events import AssistantParser
from octavo.engine.text.assistant.grammars import one_of, turns, words
from octavo.engine.text.assistant.json_calls import read_call, read_rest_of_list
from octavo.engine.text.assistant.json_text import dumps, next_char
from octavo.engine.text.assistant.names import read_name
from octavo.engine.text.assistant.python_text import read_python_value
from octavo.engine.text.assistant.scanner import scanner_of
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice, allowed_tools
from octavo.engine.text.assistant.tool_format import NO_SPECIALS, ToolFormat, special_tokens
from octavo.engine.text.assistant.tool_schemas import arguments_schema, names_of
from octavo.engine.text.assistant.turn import (
    Broken,
    Steps,
    Turn,
    TurnParser,
    attempt,
    read_marked,
)
from octavo.engine.text.assistant.value_grammar import Style, ValueRules

_STYLE = Style(
    separator=", ",
    keys=lambda key: [f"{key!r}: ", f"{dumps(key)}: "],
    any_key=r"""/"[^"\\\x00-\x1f]*": |'[^'\\\x00-\x1f]*': /""",
    literals=lambda value: list(dict.fromkeys([repr(value), dumps(value)])),
    strings=(
        r"""/"([^"\\\x00-\x1f]|\\(["'\\bfnrt]|x[0-9a-f]{2}|u[0-9a-f]{4}))*"/ | """
        r"""/'([^'\\\x00-\x1f]|\\(["'\\bfnrt]|x[0-9a-f]{2}|u[0-9a-f]{4}))*'/"""
    ),
)
_WORD = re.compile(r"[^\W\d]")
# More than Python's names, since tools have what they like.
_KEY = re.compile(r"""[^\s=(),'"\[\]{}]+""")


@dataclass(frozen=True, slots=True)
class PythonicCalls(ToolFormat):
    """A format of calls in Python's syntax, with arguments by name.

    Attributes:
        opening: what a list of calls begins with; "" if the turn itself begins with one, in which
            case only offered tools are called: an answer may begin with a bracket as well.
        closing: what ends it; may be missing from a text.
        others: other openings that models are known to write, and their closings.
        inside: what the grammar has before, between and after several calls.
    """

    opening: str = ""
    closing: str = ""
    others: tuple[tuple[str, str], ...] = ()
    inside: tuple[str, str, str] = ("[", ", ", "]")

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that a call is made of."""
        pairs = ((self.opening, self.closing), *self.others)
        return special_tokens(*(mark for pair in pairs for mark in pair))

    def parser(self, tools: Sequence[FunctionTool]) -> AssistantParser:
        """A parser of one turn."""
        return TurnParser(partial(self._read_turn, known=names_of(tools)))

    def _read_turn(self, turn: Turn, known: frozenset[str]) -> Steps[None]:
        closings = dict(self.others)
        if self.opening:
            closings[self.opening] = self.closing
        if not self.opening:
            turn.hold()
            yield from attempt(turn, self._read_first(turn, known))
        if not closings:
            while (yield from turn.more()):
                turn.at = len(turn.text)
            turn.at = len(turn.text)
            turn.pass_on()
            return
        read = partial(self._read_marked, closings=closings)
        yield from read_marked(turn, scanner_of(*closings), read)

    def _read_first(self, turn: Turn, known: frozenset[str]) -> Steps[None]:
        """Reads the calls that a turn begins with."""
        if (yield from next_char(turn)) != "[":
            raise Broken
        turn.at += 1
        yield from _read_list(turn, known)

    def _read_marked(self, turn: Turn, marker: str, closings: Mapping[str, str]) -> Steps[None]:
        """Reads the calls after an opening, in brackets or a line each, and the closing."""
        char = yield from next_char(turn)
        if char == "[":
            turn.at += 1
            if (yield from next_char(turn)) == "{":  # models that were shown JSON
                yield from read_rest_of_list(turn, None)
            else:
                yield from _read_list(turn, None)
            yield from turn.spaces()
        elif char == "{":
            yield from read_call(turn, None)
            yield from turn.spaces()
        else:
            while True:
                yield from _read_call(turn, None)
                yield from turn.spaces()
                char = yield from turn.peek()
                if not _WORD.match(char):
                    break
                turn.hold()
        if closings[marker]:
            yield from turn.optional(closings[marker])

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
        rules: list[str] = []
        allowed = allowed_tools(tools, choice)
        for index, tool in enumerate(allowed):
            values = ValueRules(f"call_{index}", arguments_schema(tool), _STYLE, specials)
            arguments = values.arguments(lambda key: [f"{key}="], "/[a-zA-Z_][a-zA-Z0-9_]{0,63}=/")
            rules += [f"args_{index}: {arguments}", *values.rules]
        first, between, last = self.inside
        # A bracket and a name are one text: words for the user may begin with the bracket alone.
        firsts, others = (
            one_of(
                [
                    f'{words(before + tool.name + "(", specials)} args_{index} ")"'
                    for index, tool in enumerate(allowed)
                ]
            )
            for before in (first, between)
        )
        more = f" ({others})*" if choice.is_parallel else ""
        body = f"({firsts}){more} {words(last + self.closing, specials)}"
        if self.opening:
            return turns(self.opening, body, rules, choice, specials, between=None)
        start = "start: calls"
        if choice.mode == "auto":
            names = "|".join(re.escape(tool.name) for tool in allowed)
            start = f"start: calls | TEXT\nTEXT: ~(/\\[({names})\\(/ /(?s:.*)/) & /(?s:.*)/"
        return "\n".join([start, f"calls: {body}", *dict.fromkeys(rules)]) + "\n"


def _read_list(turn: Turn, known: frozenset[str] | None) -> Steps[None]:
    """Reads calls in brackets after the first."""
    while True:
        yield from turn.spaces()
        yield from _read_call(turn, known)
        char = yield from next_char(turn)
        if char not in ",]":
            raise Broken
        turn.at += 1
        if char == "]" or (yield from turn.peek()) == "]":
            return
        turn.hold()


def _read_call(turn: Turn, known: frozenset[str] | None) -> Steps[None]:
    """Reads one call. It begins when its first argument does, or at its end."""
    name = yield from read_name(turn)
    if known is not None and name not in known:
        raise Broken
    yield from turn.literal("(")
    char = yield from next_char(turn)
    is_first = True
    while char != ")":
        key = yield from turn.word(_KEY)
        if not key or (yield from next_char(turn)) != "=":
            raise Broken
        turn.at += 1
        if is_first:
            turn.start_call(name)
        turn.claim()
        turn.tell_arguments(f"{'{' if is_first else ', '}{dumps(key)}: ")
        is_first = False
        yield from read_python_value(turn)
        turn.hold()
        char = yield from next_char(turn)
        if char == ",":
            turn.at += 1
            char = yield from next_char(turn)
        elif char != ")":
            raise Broken
    turn.at += 1
    if is_first:
        turn.start_call(name)
    turn.tell_arguments("{}" if is_first else "}")
    turn.end_call()
