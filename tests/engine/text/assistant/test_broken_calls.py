"""A turn that breaks its format off raises nothing, hides no words, and takes no long."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.reasoning import REASONING_FORMATS
from octavo.engine.text.assistant.tool_format import ToolFormat
from tests.engine.text.assistant.renderers import RENDERERS
from tests.engine.text.assistant.turns import TOOLS, Said, random_call, random_words, said

IS_SOAK = settings.default.max_examples > 1000
NUM_BROKEN = 5_000 if IS_SOAK else 60
JUNK = (
    "",
    "{",
    "}",
    '"',
    "\\",
    "<",
    "[",
    "]",
    ",",
    ":",
    "null",
    "01",
    "\n",
    "'",
    "=",
    "\\u12",
    "🙂",
)


def broken(name: str, rng: random.Random) -> str:
    """A rendered turn of which a part is missing, doubled, or something else."""
    calls = [random_call(rng) for _ in range(rng.randint(1, 2))]
    text = random_words(rng) + "\n" + RENDERERS[name](rng, calls)
    for _ in range(rng.choice([1, 1, 2, 5])):
        first = rng.randrange(len(text))
        last = min(len(text), first + rng.choice([0, 1, 2, 5, 30]))
        part = rng.choice([*JUNK, text[first:last] * 2, text[:40], text[-20:]])
        text = text[:first] + part + text[last:]
    return text[: rng.randrange(len(text))] if rng.random() < 0.3 else text


@pytest.mark.parametrize("name", RENDERERS)
def test_a_broken_turn_says_the_same_for_every_cut(name):
    tool_format = format_named(name)
    rng = random.Random(1)
    for _ in range(NUM_BROKEN):
        text = broken(name, rng)
        whole = said(tool_format.parser(TOOLS), [text])
        assert said(tool_format.parser(TOOLS), list(text)) == whole, text
        cut = rng.randrange(len(text) + 1)
        assert said(tool_format.parser(TOOLS), [text[:cut], text[cut:]]) == whole, text


@pytest.mark.parametrize("name", RENDERERS)
def test_a_text_without_calls_is_content_as_it_is(name):
    rng = random.Random(2)
    text = f" {random_words(rng)}\n\n{random_words(rng)} \n"
    assert said(format_named(name).parser(TOOLS), [text]) == Said([("content", "", text)])
    assert said(format_named(name).parser(TOOLS), list(text)) == Said([("content", "", text)])


@pytest.mark.parametrize("name", [name for name in RENDERERS if name != "openai"])
def test_an_opening_without_a_call_is_content(name):
    opening = RENDERERS[name](random.Random(3), [random_call(random.Random(3))])[:8]
    for text in (opening, f"{opening}{opening}", f"a {opening} is no call", f"{opening}\n\n"):
        whole = said(format_named(name).parser(TOOLS), list(text))
        assert whole == Said([("content", "", text)]), text


def work(tool_format: ToolFormat, pieces: Sequence[str]) -> int:
    """Functions that are called to read a turn: the time that it takes, whatever the machine."""
    count = 0

    def tally(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    parser = tool_format.parser(TOOLS)
    sys.setprofile(tally)
    try:
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


def hostile(name: str) -> list[str]:
    """Texts that keep a parser in doubt, to be repeated."""
    rng = random.Random(4)
    opening = RENDERERS[name](rng, [random_call(rng)])
    return [
        opening[:6],
        opening[: len(opening) // 2],
        opening[:-1],
        "<",
        "[{",
        '{"',
        " ",
        "\\",
        "`",
    ]


@pytest.mark.parametrize("name", RENDERERS)
def test_work_grows_as_the_text_does(name):
    tool_format = format_named(name)
    for part in hostile(name):
        small, large = (work(tool_format, [part * n]) for n in (25, 100))
        assert large < 5 * small + 500, (part, small, large)
        # Character by character: nothing is read again and again.
        pieces = list(part * 400)[:1000]
        small, large = (work(tool_format, pieces[:n]) for n in (250, 1000))
        assert large < 5 * small + 500, (part, small, large)


@pytest.mark.parametrize("name", RENDERERS)
def test_deep_arguments_are_no_call(name):
    for deep in ("[", '{"a":', "{a:", "("):
        rng = random.Random(5)
        opening = RENDERERS[name](rng, [random_call(rng)])
        for at in range(0, len(opening), 7):
            text = opening[:at] + deep * 500
            assert said(format_named(name).parser(TOOLS), [text]).num_ended <= 1


@pytest.mark.parametrize("each", REASONING_FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_broken_thought_says_the_same_for_every_cut(each, is_open):
    rng = random.Random(6)
    for _ in range(NUM_BROKEN):
        parts = [
            each.opening,
            each.closing,
            *each.also_ended_by,
            "\n",
            "\n\n",
            " ",
            "hm",
            "<",
            "🙂",
        ]
        text = "".join(rng.choices(parts, k=rng.randint(0, 6)))
        whole = said(each.parser(None, is_open=is_open), [text])
        assert said(each.parser(None, is_open=is_open), list(text)) == whole, text
