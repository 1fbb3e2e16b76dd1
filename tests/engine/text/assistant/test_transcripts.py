"""Calls that templates render are read as they were meant, however the text is cut."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings

from octavo.engine.text.assistant.formats import FORMATS, format_named
from tests.engine.text.assistant.renderers import RENDERERS
from tests.engine.text.assistant.turns import TOOLS, Call, random_call, random_words, said

IS_SOAK = settings.default.max_examples > 1000
NUM_TRANSCRIPTS = 2_000 if IS_SOAK else 200
NUM_CUTS = 10_000 if IS_SOAK else 50
ALONE = ("pythonic",)
"""Formats in which a turn has either words or calls."""


def transcript(name: str, seed: int) -> tuple[str, str, list[Call]]:
    """A turn's text, its words before the calls, and the calls."""
    rng = random.Random(seed)
    calls = [random_call(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    words = "" if name in ALONE or rng.random() < 0.4 else random_words(rng)
    text = RENDERERS[name](rng, calls)
    if words and name == "openai":
        start = "<|channel|>commentary<|message|>"
        return f"{start}{words}<|end|><|start|>assistant{text}", words, calls
    space = rng.choice(["\n", "\n\n", " "]) if words else ""
    return words + space + text, words, calls


def test_every_format_has_a_renderer():
    assert {each.name for each in FORMATS} == RENDERERS.keys()


@pytest.mark.parametrize("name", RENDERERS)
def test_calls_are_read_as_the_template_renders_them(name):
    tool_format = format_named(name)
    for seed in range(NUM_TRANSCRIPTS):
        text, words, calls = transcript(name, seed)
        whole = said(tool_format.parser(TOOLS), [text])
        assert whole.content == words, text
        assert whole.calls == calls, text
        assert whole.num_ended == len(calls), text
        if IS_SOAK or seed % 4 == 0:
            assert said(tool_format.parser(TOOLS), list(text)) == whole, text


@pytest.mark.parametrize("name", RENDERERS)
def test_no_cut_changes_what_a_turn_says(name):
    tool_format = format_named(name)
    texts = [transcript(name, seed)[0] for seed in range(NUM_TRANSCRIPTS)]
    rng = random.Random(0)
    for _ in range(NUM_CUTS):
        text = rng.choice(texts)
        num_cuts = min(rng.randint(2, 64), len(text))
        places = [0, *sorted(rng.choices(range(len(text)), k=num_cuts)), len(text)]
        pieces = [text[first:last] for first, last in itertools.pairwise(places)]
        expected = said(tool_format.parser(TOOLS), [text])
        assert said(tool_format.parser(TOOLS), pieces) == expected, pieces
    shortest = sorted(texts, key=len)
    for text in shortest[: 50 if IS_SOAK else 1]:
        whole = said(tool_format.parser(TOOLS), [text])
        for first, last in itertools.combinations(range(len(text) + 1), 2):
            pieces = [text[:first], text[first:last], text[last:]]
            assert said(tool_format.parser(TOOLS), pieces) == whole, pieces
