"""Reads a turn as an answer tells it: calls with ids, thoughts apart, and the whole of it."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.engine.text.assistant.events import (
    ArgumentsDelta,
    AssistantEvent,
    AssistantParser,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.message import AssistantMessage, ToolCall
from octavo.engine.text.detokenizer import IncrementalDetokenizer

_ID_CHARS = 24
_SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class CallIds:
    """Names calls. The names are not random, so that a log replays.

    Attributes:
        turn: names the turn: the engine's request and which of its completions.
        is_short: whether the format wants nine letters and digits, as Mistral's templates do.
    """

    turn: str
    is_short: bool = False

    def of(self, index: int) -> str:
        """The id of a call."""
        digest = hashlib.sha256(f"{self.turn}/{index}".encode()).hexdigest()
        return digest[:_SHORT_ID_CHARS] if self.is_short else f"call_{digest[:_ID_CHARS]}"


class ThoughtCounter:
    """Counts the tokens of a thought: those that spell it in the text of the turn.

    Args:
        detokenizer: fresh, of the turn's tokens.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._begins: list[int] = []
        """Characters of the text before each token."""
        self._num_chars = 0
        self._text: list[str] = []

    def add(self, text: str, token_ids: Sequence[int]) -> None:
        """Takes in a piece of the turn."""
        self._text.append(text)
        for token_id in token_ids:
            self._begins.append(self._num_chars)
            self._num_chars += len(self._detokenizer.append_one(token_id))

    def count(self, thought: str) -> int:
        """Tokens of a thought that the turn holds."""
        if not thought:
            return 0
        text = "".join(self._text)
        at = text.find(thought)
        if at < 0:  # it stands in several places
            return round(len(self._begins) * len(thought) / max(len(text), len(thought)))
        return bisect_left(self._begins, at + len(thought)) - bisect_left(self._begins, at)


class TurnReader:
    """Reads one turn with its format's parser.

    Args:
        parser: of the turn.
        ids: names calls that the model did not.
        is_parallel: whether there may be several calls; those after the first are left out.
        thoughts: counts the thought's tokens; None where there are no thoughts to count.
    """

    def __init__(
        self,
        parser: AssistantParser,
        ids: CallIds,
        *,
        is_parallel: bool = True,
        thoughts: ThoughtCounter | None = None,
    ) -> None:
        self._parser = parser
        self._ids = ids
        self._is_parallel = is_parallel
        self._thoughts = thoughts
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []
        self._num_whole = 0

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and the text has broken off none of them."""
        return 0 < len(self._calls) == self._num_whole

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[AssistantEvent]:
        """What a further piece of the turn says.

        Args:
            token_ids: the piece's tokens.
        """
        if self._thoughts is not None:
            self._thoughts.add(text, token_ids)
        return self._take(self._parser.feed(text)) if text else []

    def finish(self) -> list[AssistantEvent]:
        """What was held back, as the text has ended."""
        return self._take(self._parser.finish())

    def message(self) -> AssistantMessage:
        """The turn so far."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        has_more = bool(reasoning or self._calls)
        return AssistantMessage(
            content=content if content or not has_more else None,
            reasoning=reasoning or None,
            tool_calls=tuple(
                ToolCall(start.id or "", start.name, "".join(pieces))
                for start, pieces in self._calls
            ),
            num_reasoning_tokens=self.num_reasoning_tokens,
        )

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thought so far."""
        return 0 if self._thoughts is None else self._thoughts.count("".join(self._reasoning))

    def _take(self, events: Sequence[AssistantEvent]) -> list[AssistantEvent]:
        taken: list[AssistantEvent] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case _ if event.index > 0 and not self._is_parallel:
                    continue
                case CallStart(index, _, given):
                    event = replace(event, id=given or self._ids.of(index))
                    self._calls.append((event, []))
                case ArgumentsDelta(index, text):
                    self._calls[index][1].append(text)
                case CallEnd():
                    self._num_whole += 1
            taken.append(event)
        return taken
