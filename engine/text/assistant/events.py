"""The pieces of an assistant's turn, as they stream out of the model's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MAX_HELD_CHARS = 65_536
"""The most text that a parser holds until it is known to be a call: more is no call. White space,
which costs nothing to hold, does not count."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Words for the user.

    Attributes:
        text: what came since the last one; not empty.
    """

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Words that the model thinks before it answers.

    Attributes:
        text: what came since the last one; not empty.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; its name is known and final.

    Attributes:
        index: 0 for the first call of the turn, then counted up.
        name: the function's.
        id: the call's, where the format lets the model write one.
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of a call's arguments. All pieces of a call, joined, are one JSON object.

    Attributes:
        index: the call's.
        text: what came since the last one; not empty.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is whole. One that the text breaks off has none.

    Attributes:
        index: the call's.
    """

    index: int


AssistantEvent = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


class AssistantParser(Protocol):
    """Reads one turn of an assistant. Raises nothing, whatever the text.

    How the text is cut into pieces changes how events are cut, never what they say: contents,
    thoughts and each call's arguments, joined, are the same for every cut. Text that turns out not
    to be a call is content, as the model wrote it. Every piece of text is told as soon as it cannot
    belong to a marker or to a call's name.

    The work of all pieces together grows as the text does, about a second of processor time a
    million characters at worst. That of one piece grows as the piece and what is held do, and a
    parser holds at most `MAX_HELD_CHARS`. A piece of a step's text may be fed on an event loop. A
    long text that is there already, as of a file or a recorded turn, must be fed in a thread.
    """

    def feed(self, text: str) -> list[AssistantEvent]:
        """What a further piece of the turn says."""
        ...

    def finish(self) -> list[AssistantEvent]:
        """What was held back, as the text has ended. Nothing may be fed after it."""
        ...
