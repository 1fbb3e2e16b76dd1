"""A thought that has a budget is closed when it is spent, and may end before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo.engine.structured.grammar import fill_mask
from octavo.engine.text.assistant.events import ContentDelta, ReasoningDelta
from octavo.engine.text.assistant.reasoning import REASONING_FORMATS, ReasoningFormat
from tests.engine.text.assistant.walks import Vocabulary, matcher_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANSWER = "start: TEXT\nTEXT: /(?s:.*)/\n"
BOUNDED = [each for each in REASONING_FORMATS if each.whole_turn is None]


def turn(
    grammar: str, tokens: LLTokenizer, vocabulary: Vocabulary, begin: list[int], num_tokens: int
) -> str:
    """A turn that begins so, and goes on with one word wherever that is allowed."""
    matcher = matcher_of(grammar, tokens, vocabulary)
    assert matcher.consume_tokens(begin), "it may not begin so"
    mask = np.zeros(-(-len(vocabulary.tokens) // 32), np.uint32)
    (word,) = vocabulary(" the")
    made = list(begin)
    for _ in range(num_tokens):
        fill_mask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(vocabulary.tokens))
        allowed = np.flatnonzero(bits)
        token = word if bits[word] else int(allowed[0])
        assert matcher.consume_tokens([token])
        made.append(token)
    return vocabulary.decode(made)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7, 30])
@pytest.mark.parametrize("has_specials", [False, True])
@pytest.mark.parametrize("format", BOUNDED, ids=lambda each: each.name)
def test_a_thought_ends_when_its_budget_is_spent(
    format: ReasoningFormat,
    budget: int,
    is_open: bool,
    has_specials: bool,
    tokens: LLTokenizer,
    vocabulary: Vocabulary,
) -> None:
    marks = format.markers if has_specials else ()
    specials = {mark: vocabulary.specials[mark] for mark in marks if mark in vocabulary.specials}
    grammar = format.grammar(ANSWER, is_open=is_open, specials=specials, budget=budget)
    begin = [] if is_open else vocabulary.encode(format.opening, specials)
    said = turn(grammar, tokens, vocabulary, begin, budget + 30)
    thought, words = read(format, said, is_open=is_open)
    assert thought.split() == ["the"] * budget
    assert words.startswith(" the the")


@pytest.mark.parametrize("has_specials", [False, True])
@pytest.mark.parametrize("format", BOUNDED, ids=lambda each: each.name)
def test_a_thought_may_end_before_or_not_be(
    format: ReasoningFormat, has_specials: bool, tokens: LLTokenizer, vocabulary: Vocabulary
) -> None:
    marks = format.markers if has_specials else ()
    specials = {mark: vocabulary.specials[mark] for mark in marks if mark in vocabulary.specials}
    grammar = format.grammar(ANSWER, is_open=False, specials=specials, budget=40)
    whole = vocabulary.encode(f"{format.opening} a b{format.closing}\nYes", specials)
    said = turn(grammar, tokens, vocabulary, whole, 50)
    assert read(format, said, is_open=False) == (" a b", "Yes" + " the" * 50)
    said = turn(grammar, tokens, vocabulary, vocabulary("Yes"), 50)
    assert read(format, said, is_open=False) == ("", "Yes" + " the" * 50)


def read(format: ReasoningFormat, said: str, *, is_open: bool) -> tuple[str, str]:
    """Thought and words of a turn."""
    parser = format.parser(None, is_open=is_open)
    events = [*parser.feed(said), *parser.finish()]
    kinds = (ReasoningDelta, ContentDelta)
    thought, words = (
        "".join(event.text for event in events if isinstance(event, kind)) for kind in kinds
    )
    return thought, words
