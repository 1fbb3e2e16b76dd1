"""Calls that are a function's name, a marker, and the arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from octavo.engine.text.assistant.events import AssistantParser
from octavo.engine.text.assistant.grammars import arguments_of, one_of, turns, words
from octavo.engine.text.assistant.json_calls import read_call_or_list
from octavo.engine.text.assistant.json_text import next_char, read_arguments
from octavo.engine.text.assistant.names import read_name
from octavo.engine.text.assistant.scanner import scanner_of
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice, allowed_tools
from octavo.engine.text.assistant.tool_format import NO_SPECIALS, ToolFormat
from octavo.engine.text.assistant.turn import Broken, Steps, Turn, TurnParser, read_marked

_ID = re.compile(r"[^\s\[{]+")
_FENCE = "```"
_AFTER_NAME = scanner_of("[CALL_ID]", "[ARGS]")


@dataclass(frozen=True, slots=True)
class NamedCalls(ToolFormat):
    """A format of calls like `<begin>f<sep>{"x": 1}<end>`, one by one or in a section.

    Attributes:
        call: what a call begins with.
        before_arguments: what the grammar has between the name and the arguments.
        read: reads a call after its beginning, up to the end of its arguments.
        before_name: what the grammar has before the name.
        call_end: what ends a call; may be missing from a text.
        after_arguments: what the grammar has before that.
        section: what a list of calls begins with; "" if calls stand alone.
        section_end: what ends it; may be missing from a text.
        between: text between calls in the grammar.
        is_counted: whether the grammar has the call's number after its name.
        more_markers: other special tokens of calls.
    """

    call: str
    before_arguments: str
    read: Callable[[Turn, Sequence[FunctionTool]], Steps[None]]
    before_name: str = ""
    call_end: str = ""
    after_arguments: str = ""
    section: str = ""
    section_end: str = ""
    between: str = ""
    is_counted: bool = False
    more_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that a call is made of."""
        named = (self.section, self.call, self.call_end, self.section_end, *self.more_markers)
        return tuple(filter(None, named))

    def parser(self, tools: Sequence[FunctionTool]) -> AssistantParser:
        """A parser of one turn."""
        openings = scanner_of(*filter(None, (self.section, self.call)))
        read = partial(self._read, tools=tools)
        return TurnParser(partial(read_marked, openings=openings, read_calls=read))

    def _read(self, turn: Turn, marker: str, tools: Sequence[FunctionTool]) -> Steps[None]:
        """Reads the calls of a section, or the one whose beginning was read."""
        if marker == self.section:
            yield from turn.spaces()
            yield from turn.literal(self.call)
        while True:
            yield from self.read(turn, tools)
            if not turn.is_call_open:  # a list of whole calls
                return
            turn.end_call()
            yield from turn.spaces()
            if self.call_end:
                yield from turn.optional(self.call_end)
                yield from turn.spaces()
            if self.section_end and (yield from turn.optional(self.section_end)):
                return
            if not (yield from turn.optional(self.call)):
                return
            turn.hold()

    def grammar(
        self,
        tools: Sequence[FunctionTool],
        choice: ToolChoice,
        specials: Mapping[str, int] = NO_SPECIALS,
    ) -> str | None:
        """The grammar of the turns that the choice allows."""
        end = words(self.after_arguments + self.call_end, specials)
        rules = []
        allowed = allowed_tools(tools, choice)
        for index, tool in enumerate(allowed):
            before = words(
                self.before_name + tool.name + (":" if self.is_counted else ""), specials
            )
            count = " COUNT" if self.is_counted else ""
            middle = words(self.before_arguments, specials)
            rules.append(f"call_{index}: {before}{count} {middle} {arguments_of(tool)} {end}")
        if self.is_counted:
            rules.append("COUNT: /[0-9]{1,4}/")
        calls = f"({one_of([f'call_{index}' for index in range(len(allowed))])})"
        if not self.section:
            return turns(self.call, calls, rules, choice, specials, between=self.between)
        call = words(self.call, specials)
        more = f" ({words(self.between, specials)} {call} {calls})*" if choice.is_parallel else ""
        body = f"{call} {calls}{more} {words(self.section_end, specials)}"
        return turns(self.section, body, rules, choice, specials, between=None)


def read_deepseek(turn: Turn, tools: Sequence[FunctionTool]) -> Steps[None]:
    """Reads `f<｜tool▁sep｜>{…}`, or `function<｜tool▁sep｜>f` and the arguments in a fence."""
    yield from turn.spaces()
    name = yield from read_name(turn)
    yield from turn.literal("<｜tool▁sep｜>")
    char = yield from next_char(turn)
    is_fenced = False
    if char != "{":
        name = yield from read_name(turn)
        yield from turn.spaces()
        is_fenced = yield from turn.optional(_FENCE)
        if is_fenced:
            yield from turn.optional("json")
        yield from turn.spaces()
    if (yield from next_char(turn)) != "{":
        raise Broken
    turn.start_call(name)
    yield from read_arguments(turn)
    if is_fenced:
        yield from turn.spaces()
        yield from turn.literal(_FENCE)


def read_kimi(turn: Turn, tools: Sequence[FunctionTool]) -> Steps[None]:
    """Reads `functions.f:0<|tool_call_argument_begin|>{…}`; all before the marker is the id."""
    yield from turn.spaces()
    call_id = yield from read_name(turn)
    yield from turn.spaces()
    yield from turn.literal("<|tool_call_argument_begin|>")
    name, _, count = call_id.removeprefix("functions.").rpartition(":")
    if not name or not count.isdigit():
        # Some write the count alone, which is clear enough if there is but one tool.
        if not call_id.isdigit() or len(tools) != 1:
            raise Broken
        name = tools[0].name
    if (yield from next_char(turn)) != "{":
        raise Broken
    turn.start_call(name, call_id)
    yield from read_arguments(turn)


def read_mistral(turn: Turn, tools: Sequence[FunctionTool]) -> Steps[None]:
    """Reads `f[CALL_ID]i[ARGS]{…}`, of which name and arguments alone must be there; or, as older
    models write it, a list of calls."""
    char = yield from next_char(turn)
    if char in "[{":
        yield from read_call_or_list(turn, None)
        return
    name = yield from read_name(turn)
    call_id = None
    has_more = (yield from next_char(turn)) == "["
    if has_more and (yield from turn.either(_AFTER_NAME)) == "[CALL_ID]":
        call_id = yield from turn.word(_ID)
        yield from turn.optional("[ARGS]")
    if (yield from next_char(turn)) != "{":
        raise Broken
    turn.start_call(name, call_id or None)
    yield from read_arguments(turn)
