"""A turn that is read while it comes: what formats' parsers are made of.

A format is a generator over a `Turn`: it reads the text in the order in which it stands, and waits
wherever it needs more. What it reads goes to one of five places: to the user, to the thoughts, to
the arguments of the open call, to what is held until it is known to be a call, or nowhere. Text
that was read is passed on whenever the generator waits, so that nothing is held but what may be a
marker or a name.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import TypeVar

from octavo.engine.text.assistant.events import (
    ArgumentsDelta,
    AssistantEvent,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.scanner import Scanner

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads a part of a turn. Yields when it needs more text than has come."""


class Broken(Exception):
    """The text is not what the format demands. What was read is as far as it was."""


class Ended(Broken):
    """The text ended where the format demands more."""


class Goes(Enum):
    """Where text goes that is read."""

    TO_CONTENT = auto()
    TO_REASONING = auto()
    TO_ARGUMENTS = auto()
    HELD = auto()
    NOWHERE = auto()


class Turn:
    """The text of a turn that was not read yet, and the events of what was.

    White space around a call belongs to the call: it is content only if words follow it.

    Attributes:
        text: what has come and may not have been read.
        at: where in it the next unread character is.
        has_ended: whether no more text comes.
        is_call_open: whether a call has begun and not ended.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False
        self.is_call_open = False
        self._passed = 0
        self._goes = Goes.TO_CONTENT
        self._held: list[str] = []
        self._blank: list[str] = []
        self._is_after_call = False
        self._num_calls = 0
        self._events: list[AssistantEvent] = []

    def add(self, text: str) -> None:
        """Takes in more text."""
        self.text = self.text[self.at :] + text
        self.at = self._passed = 0

    def take_events(self) -> list[AssistantEvent]:
        """The events since the last call. Neighbours of one kind are one event."""
        taken, self._events = self._events, []
        return joined(taken)

    def more(self) -> Steps[bool]:
        """Waits for more text. False if none will come."""
        if self.has_ended:
            return False
        self.pass_on()
        yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, which stays unread; "" at the end of the text."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def literal(self, word: str) -> Steps[None]:
        """Reads a word, or nothing of it.

        Raises:
            Broken: another text stands there, or the text ends.
        """
        while not self.text.startswith(word, self.at):
            if not word.startswith(self.text[self.at : self.at + len(word)]):
                raise Broken
            if not (yield from self.more()):
                raise Ended
        self.at += len(word)

    def optional(self, word: str) -> Steps[bool]:
        """Reads a word if it stands there. A beginning of it that ends the text is read as well."""
        try:
            yield from self.literal(word)
        except Ended:
            self.at = len(self.text)
            return False
        except Broken:
            return False
        return True

    def either(self, words: Scanner) -> Steps[str]:
        """Reads the one of some words that stands here, or nothing of them.

        Raises:
            Broken: none does, or the text ends.
        """
        while True:
            at, word = words.find(self.text, self.at)
            if at > self.at:
                raise Broken
            if word is not None:
                self.at += len(word)
                return word
            if not (yield from self.more()):
                raise Ended

    def run(self, pattern: re.Pattern[str]) -> Steps[None]:
        """Reads as many characters as a class of characters, repeated, matches; perhaps none."""
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None:
                self.at = match.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def spaces(self) -> Steps[None]:
        """Reads white space, if any stands there."""
        yield from self.run(_SPACES)

    def until(self, scanner: Scanner) -> Steps[str | None]:
        """Reads up to a marker, which stays unread.

        Returns:
            the marker; None if the text ended without one, and all of it is read.
        """
        while True:
            self.at, marker = scanner.find(self.text, self.at)
            if marker is not None:
                return marker
            if not (yield from self.more()):
                self.at = len(self.text)
                return None

    def captured(self, steps: Steps[None]) -> Steps[str]:
        """The text that a generator reads, which must be held."""
        assert self._goes is Goes.HELD
        self.pass_on()
        first = len(self._held)
        yield from steps
        self.pass_on()
        return "".join(self._held[first:])

    def skip(self, num_chars: int, instead: str) -> None:
        """Reads characters that have come. Arguments get other text in their place."""
        self.pass_on()
        self.at += num_chars
        if self._goes is Goes.TO_ARGUMENTS:
            self._passed = self.at
            self.tell_arguments(instead)

    def send(self, goes: Goes) -> None:
        """Says where text goes that is read from here on."""
        self.pass_on()
        self._goes = goes

    def hold(self) -> None:
        """Holds what is read from here on: another call may begin."""
        self.send(Goes.HELD)

    def drop_held(self) -> None:
        """Forgets what is held: it was a mark and says nothing to the user."""
        self.pass_on()
        self._held.clear()

    def pass_on(self) -> None:
        """Brings what was read to where it goes."""
        text = self.text[self._passed : self.at]
        self._passed = self.at
        if not text:
            return
        if self._goes is Goes.TO_CONTENT:
            self._tell_content(text)
        elif self._goes is Goes.TO_REASONING:
            self._events.append(ReasoningDelta(text))
        elif self._goes is Goes.TO_ARGUMENTS:
            self.tell_arguments(text)
        elif self._goes is Goes.HELD:
            self._held.append(text)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begins a call, made of what is held and of what follows."""
        assert not self.is_call_open
        self.pass_on()
        self._held.clear()
        self._blank.clear()
        self.is_call_open = True
        self._events.append(CallStart(self._num_calls, name, call_id))

    def claim(self) -> None:
        """Makes what is held a part of the open call, which no later fault makes content."""
        assert self.is_call_open
        self.drop_held()

    def tell_arguments(self, text: str) -> None:
        """Arguments of the open call that do not stand in the text as they are."""
        if text:
            self._events.append(ArgumentsDelta(self._num_calls, text))

    def end_call(self) -> None:
        """Ends the open call; what is held belonged to it."""
        assert self.is_call_open
        self.send(Goes.NOWHERE)
        self._held.clear()
        self.is_call_open = False
        self._is_after_call = True
        self._events.append(CallEnd(self._num_calls))
        self._num_calls += 1

    def to_content(self, *, held: bool) -> None:
        """Goes on with words for the user.

        Args:
            held: whether what is held is content too; else it belonged to a call.
        """
        self.send(Goes.TO_CONTENT)
        text = "".join(self._held)
        self._held.clear()
        if self.is_call_open:
            # It never becomes whole, but what comes next is no part of it.
            self.is_call_open = False
            self._num_calls += 1
            self._is_after_call = True
        if held and text:
            self._tell_content(text)

    def finish(self) -> None:
        """Tells the white space that no call has claimed."""
        if not self._is_after_call and self._blank:
            self._events.append(ContentDelta("".join(self._blank)))
        self._blank.clear()

    def _tell_content(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
            if not text:
                return
            self._is_after_call = False
        words = text.rstrip()
        if not words:
            self._blank.append(text)
            return
        self._events.append(ContentDelta("".join((*self._blank, words))))
        self._blank = [text[len(words) :]] if len(words) < len(text) else []


class TurnParser:
    """An `AssistantParser` of a generator that reads a turn to its end.

    Args:
        read: makes the generator; it raises nothing.
    """

    def __init__(self, read: Callable[[Turn], Steps[None]]) -> None:
        self._turn = Turn()
        self._steps = read(self._turn)
        next(self._steps)

    def feed(self, text: str) -> list[AssistantEvent]:
        """What a further piece of the turn says."""
        self._turn.add(text)
        next(self._steps)
        return self._turn.take_events()

    def finish(self) -> list[AssistantEvent]:
        """What was held back, as the text has ended. Nothing may be fed after it."""
        self._turn.has_ended = True
        next(self._steps, None)
        self._turn.finish()
        return self._turn.take_events()


def read_marked(
    turn: Turn, openings: Scanner, read_calls: Callable[[Turn, str], Steps[None]]
) -> Steps[None]:
    """Reads words and calls, each of which begins with a marker.

    Args:
        turn: at its beginning or after a call.
        openings: what a call, or a list of calls, begins with.
        read_calls: reads on after an opening, which is held. When it returns, words may follow.
    """
    while True:
        marker = yield from turn.until(openings)
        if marker is None:
            turn.pass_on()
            return
        turn.hold()
        turn.at += len(marker)
        yield from attempt(turn, read_calls(turn, marker))


def attempt(turn: Turn, calls: Steps[None]) -> Steps[None]:
    """Reads calls as far as the text has them. What is held and belongs to none is content."""
    try:
        yield from calls
    except Ended:
        if turn.is_call_open:
            turn.at = len(turn.text)
        turn.to_content(held=not turn.is_call_open)
    except Broken:
        turn.to_content(held=True)
    else:
        turn.to_content(held=False)


def joined(events: list[AssistantEvent]) -> list[AssistantEvent]:
    """The same events, with neighbours of one kind as one."""
    made: list[AssistantEvent] = []
    for _, group in itertools.groupby(events, _kind):
        first, *others = group
        if not others or isinstance(first, CallStart | CallEnd):
            made += [first, *others]
        else:
            text = "".join(event.text for event in (first, *others))  # type: ignore[union-attr]
            made.append(dataclasses.replace(first, text=text))
    return made


def _kind(event: AssistantEvent) -> tuple[type, int]:
    return type(event), getattr(event, "index", 0)


_SPACES = re.compile(r"\s+")
