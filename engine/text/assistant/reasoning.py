"""What models think before they answer, apart from the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.assistant.events import (
    AssistantEvent,
    AssistantParser,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.grammars import words
from octavo.engine.text.assistant.harmony import Harmony
from octavo.engine.text.assistant.scanner import scanner_of
from octavo.engine.text.assistant.tool_format import NO_SPECIALS
from octavo.engine.text.assistant.turn import joined

AUTO = "auto"
FIELD = "reasoning_parser"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A way of marking thoughts, which come first in a turn.

    Attributes:
        name: as `--reasoning-parser` takes it; vLLM's name where it has one.
        opening: what a thought begins with.
        closing: what ends it.
        fits: whether a template and a family mark thoughts like this.
        also_ended_by: markers of calls that end a thought without its closing, if calls are read;
            they belong to the answer.
        whole_turn: makes a parser of all that a turn is made of, in formats in which thoughts stand
            between other messages; their parser of calls is one as well.
    """

    name: str
    opening: str
    closing: str
    fits: Callable[[str, str], bool]
    also_ended_by: tuple[str, ...] = ()
    whole_turn: Callable[[], AssistantParser] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that thoughts are marked with: the detokenizer must not leave them out."""
        return (self.opening, self.closing)

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends within a thought, which the turn then goes on with."""
        return prompt.rstrip().endswith(self.opening.rstrip())

    def parser(self, answer: AssistantParser | None, *, is_open: bool) -> AssistantParser:
        """A parser of one turn.

        Args:
            answer: parser of what follows the thought; None if all of it is content.
            is_open: whether the turn begins within a thought.
        """
        if self.whole_turn is not None:
            return answer or self.whole_turn()
        ends = () if answer is None else self.also_ended_by
        return ThoughtParser(self, answer or PlainParser(), ends, is_open=is_open)

    def grammar(
        self,
        answer: str,
        *,
        is_open: bool,
        specials: Mapping[str, int] = NO_SPECIALS,
        budget: int | None = None,
    ) -> str:
        """The grammar of turns with any thought, or none, and an answer of another grammar.

        Args:
            answer: in Lark's syntax, beginning at `start`.
            is_open: whether the turn begins within a thought.
            specials: ids of the vocabulary's special tokens, by their text.
            budget: most tokens of the thought, after which it is closed; None for no limit.
        """
        after = re.sub(r"^start:", "answer:", answer, count=1, flags=re.MULTILINE)
        closing = words(self.closing, specials)
        # What ends a thought for the parser is none of it.
        others = "".join(
            f" & ~(/(?s:.*)/ {words(mark, {})} /(?s:.*)/)" for mark in self.also_ended_by
        )
        if budget == 0:
            rules = [f"thought: {closing}"]
        elif self.closing in specials:
            limit = "" if budget is None else f"[max_tokens={budget}]"
            rules = [f"thought: within? {closing}", f"within{limit}: THOUGHT"]
            rules.append("THOUGHT: /(?s:.+)/")
        elif budget is None:
            rules = ["thought[lazy]: THOUGHT " + closing, f"THOUGHT: /(?s:.*)/{others}"]
        else:
            rules = [f"thought: within {closing}"]
            rules.append(f"within[stop={closing}, max_tokens={budget}]: THOUGHT")
            rules.append(f"THOUGHT: /(?s:.*)/{others}")
        opened = words(self.opening, specials)
        if budget is not None and self.opening not in specials:
            # Else a thought beyond its limit could be words of the answer.
            unopened = f" & ~(/\\s*/ {opened} /(?s:.*)/)"
            after = re.sub(
                r"^TEXT: (.*)$", lambda m: f"TEXT: ({m[1]}){unopened}", after, flags=re.MULTILINE
            )
        # Line breaks are left out behind a thought alone, and would else be words of the answer.
        first = "thought BREAKS" if is_open else f"({opened} thought BREAKS)?"
        rules.append(r"BREAKS: /\n*/")
        return "\n".join([f"start: {first} answer", *rules, after])


class PlainParser:
    """Takes all text for content."""

    def feed(self, text: str) -> list[AssistantEvent]:
        """The text, as content."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[AssistantEvent]:
        """Nothing."""
        return []


class ThoughtParser:
    """Reads a thought, and then the answer with a parser of its own.

    Line breaks at a thought's ends belong to its marks, as those between the thought and the answer
    do. A turn that ends within its thought has no answer.

    Args:
        format: how thoughts are marked.
        answer: parser of the answer.
        also_ended_by: what else than the closing ends a thought, and belongs to the answer.
        is_open: whether the text begins within a thought.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        answer: AssistantParser,
        also_ended_by: tuple[str, ...],
        *,
        is_open: bool,
    ) -> None:
        self._format = format
        self._answer = answer
        self._closings = scanner_of(format.closing, *also_ended_by)
        self._opening = format.opening
        self._read = self._within if is_open else self._before
        # White space at the beginning of the turn, and text that may be the opening.
        self._blank: list[str] = []
        self._text = ""
        # Line breaks that end the thought if its closing follows.
        self._breaks: list[str] = []
        self._has_thought = False
        self._may_reopen = is_open

    def feed(self, text: str) -> list[AssistantEvent]:
        """What a further piece of the turn says."""
        return joined(self._read(text, is_last=False))

    def finish(self) -> list[AssistantEvent]:
        """What was held back, as the text has ended. Nothing may be fed after it."""
        return joined([*self._read("", is_last=True), *self._answer.finish()])

    def _before(self, text: str, *, is_last: bool) -> list[AssistantEvent]:
        """Reads until it is known whether the turn begins with a thought."""
        text = self._text + text
        words = text.lstrip()
        self._blank.append(text[: len(text) - len(words)])
        if words.startswith(self._opening):
            self._read, self._text, self._may_reopen = self._within, "", False
            return self._within(words[len(self._opening) :], is_last=is_last)
        if self._opening.startswith(words) and not is_last:
            self._text = words
            return []
        self._text = ""
        if self._may_reopen:
            self._read, self._may_reopen = self._within, False
            return self._within("".join((*self._blank, words)), is_last=is_last)
        self._read = self._after
        return self._answer.feed("".join((*self._blank, words)))

    def _within(self, text: str, *, is_last: bool) -> list[AssistantEvent]:
        """Reads the thought up to its end."""
        if self._may_reopen:
            # A prompt has opened the thought, and some models open it once more.
            self._read = self._before
            return self._before(text, is_last=is_last)
        text = self._text + text
        end, marker = self._closings.find(text, 0)
        if marker is None:
            if is_last:
                end = len(text)
            self._text = text[end:]
            return self._thought(text[:end], is_last=is_last)
        events = self._thought(text[:end], is_last=False)
        self._text = ""
        self._read = self._between
        if marker == self._format.closing:
            end += len(marker)
        return events + self._between(text[end:], is_last=is_last)

    def _thought(self, text: str, *, is_last: bool) -> list[AssistantEvent]:
        """A piece of the thought, without the line breaks that may be its last."""
        if not self._has_thought:
            text = text.lstrip("\n")
        words = text.rstrip("\n")
        made: list[AssistantEvent] = []
        if words:
            self._has_thought = True
            made.append(ReasoningDelta("".join((*self._breaks, words))))
            self._breaks.clear()
        if len(words) < len(text):
            self._breaks.append(text[len(words) :])
        return made

    def _between(self, text: str, *, is_last: bool) -> list[AssistantEvent]:
        """Leaves out line breaks before the answer."""
        words = text.lstrip("\n")
        if not words:
            return []
        self._read = self._after
        return self._after(words, is_last=is_last)

    def _after(self, text: str, *, is_last: bool) -> list[AssistantEvent]:
        return self._answer.feed(text) if text else []


def _has(*signs: str) -> Callable[[str, str], bool]:
    return lambda template, _: all(sign in template for sign in signs)


def _think(name: str, *signs: str, also_ended_by: tuple[str, ...] = ()) -> ReasoningFormat:
    """Thoughts as most families mark them."""
    fits = _has("</think>", *signs)
    return ReasoningFormat(name, "<think>", "</think>", fits, also_ended_by)


REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        name="openai_gptoss",
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        fits=_has("<|channel|>", "<|message|>"),
        whole_turn=lambda: Harmony("openai", _has()).parser([]),
    ),
    ReasoningFormat(
        name="gemma4",
        opening="<|channel>thought",
        closing="<channel|>",
        fits=_has("<|channel>", "<channel|>"),
        also_ended_by=("<|tool_call>",),
    ),
    ReasoningFormat(
        name="mistral", opening="[THINK]", closing="[/THINK]", fits=_has("[THINK]", "[/THINK]")
    ),
    ReasoningFormat(
        name="cohere_command",
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        fits=_has("<|START_THINKING|>"),
        also_ended_by=("<|START_ACTION|>",),
    ),
    ReasoningFormat(
        name="seed_oss",
        opening="<seed:think>",
        closing="</seed:think>",
        fits=_has("</seed:think>"),
    ),
    ReasoningFormat(
        name="granite",
        opening="Here is my thought process:",
        closing="Here is my response:",
        fits=_has("Here is my thought process:"),
    ),
    _think(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        also_ended_by=("<|tool_calls_section_begin|>",),
    ),
    _think("minimax_m2", "<minimax:tool_call>", also_ended_by=("<minimax:tool_call>",)),
    ReasoningFormat(
        name="deepseek_v3",
        opening="<think>",
        closing="</think>",
        fits=lambda template, _: (
            all(sign in template for sign in ("</think>", "<｜Assistant｜>"))
            and re.search(r"\bthinking\b", template) is not None
        ),
    ),
    _think("deepseek_r1", "<｜Assistant｜>"),
    _think("glm45", "<arg_key>", also_ended_by=("<tool_call>",)),
    _think("qwen3", also_ended_by=("<tool_call>",)),
)
"""In the order in which they are tried on a template."""


def reasoning_named(name: str) -> ReasoningFormat:
    """The format of a name.

    Raises:
        InvalidRequestError: there is none.
    """
    for each in REASONING_FORMATS:
        if each.name == name:
            return each
    names = ", ".join(sorted(each.name for each in REASONING_FORMATS))
    raise InvalidRequestError(FIELD, name, f"{AUTO} or one of {names}")


def reasoning_for(template: str, model_type: str) -> ReasoningFormat | None:
    """How a model of this template and family (`model_type` of its config, or "") marks its
    thoughts; None if it has none."""
    return next((each for each in REASONING_FORMATS if each.fits(template, model_type)), None)
