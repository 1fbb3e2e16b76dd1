"""Calls that templates render are read as they were meant, however the text is cut."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings

from octavo.engine.text.assistant.formats import FORMATS, format_named
from tests.engine.text.assistant.foreign_renderers import FOREIGN_RENDERERS
from tests.engine.text.assistant.renderers import RENDERERS
from tests.engine.text.assistant.turns import TOOLS, Call, random_call, random_words, said

IS_SOAK = settings.default.max_examples > 1000
NUM_TRANSCRIPTS = 2_000 if IS_SOAK else 200
NUM_CUTS = 10_000 if IS_SOAK else 50
ALONE = ("pythonic",)
"""Formats in which a turn has either words or calls."""


SOURCES = {"template": RENDERERS, "elsewhere": FOREIGN_RENDERERS}


def transcript(source: str, name: str, seed: int) -> tuple[str, str, list[Call]]:
    """A turn's text, its words before the calls, and the calls."""
    rng = random.Random(seed)
    calls = [random_call(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    words = "" if name in ALONE or rng.random() < 0.4 else random_words(rng)
    text = SOURCES[source][name](rng, calls)
    if words and name == "openai":
        start = "<|channel|>commentary<|message|>"
        return f"{start}{words}<|end|><|start|>assistant{text}", words, calls
    space = rng.choice(["\n", "\n\n", " "]) if words else ""
    return words + space + text, words, calls


def test_every_format_has_a_renderer():
    assert {each.name for each in FORMATS} == RENDERERS.keys() == FOREIGN_RENDERERS.keys()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", RENDERERS)
def test_calls_are_read_as_they_were_meant(name, source):
    tool_format = format_named(name)
    for seed in range(NUM_TRANSCRIPTS):
        text, words, calls = transcript(source, name, seed)
        whole = said(tool_format.parser(TOOLS), [text])
        assert whole.content == words, text
        assert whole.calls == calls, text
        assert whole.num_ended == len(calls), text
        if IS_SOAK or seed % 8 == 0:
            assert said(tool_format.parser(TOOLS), list(text)) == whole, text


@pytest.mark.parametrize("name", RENDERERS)
def test_no_cut_changes_what_a_turn_says(name):
    tool_format = format_named(name)
    texts = [
        transcript(source, name, seed)[0] for source in SOURCES for seed in range(NUM_TRANSCRIPTS)
    ]
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


TAGS = {
    "qwen3_coder": "</parameter>",
    "seed_oss": "</parameter>",
    "glm45": "</arg_value>",
    "minimax_m2": "</parameter>",
    "deepseek_v32": "</｜DSML｜parameter>",
}


@pytest.mark.parametrize("name", TAGS)
def test_json_may_hold_the_tag_that_ends_it(name):
    tag = TAGS[name]
    arguments = {
        "query": "q", "filters": {"html": f'a {tag} "b\\', tag: [f"{tag}{tag}", "\\"]},
        "tags": [f"[{tag}", tag], "exact": True,
    }  # fmt: skip
    calls = [Call("search_docs", arguments), Call("ping", {})]
    text = RENDERERS[name](random.Random(1), calls)
    whole = said(format_named(name).parser(TOOLS), [text])
    assert whole.calls == calls
    for num_chars in (1, 3, 7):
        pieces = [text[at : at + num_chars] for at in range(0, len(text), num_chars)]
        assert said(format_named(name).parser(TOOLS), pieces) == whole


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("broken", ['["a', "['it\"s']", '{"a": "b'])
def test_broken_json_ends_at_the_first_tag(name, broken):
    call = Call("search_docs", {"query": "q", "tags": ["TAGS"], "exact": True})
    text = RENDERERS[name](random.Random(1), [call])
    first, last = text.index('["TAGS"'), text.index("]", text.index('["TAGS"')) + 1
    text = text[:first] + broken + text[last:]
    whole = said(format_named(name).parser(TOOLS), [text])
    assert whole.calls == [Call("search_docs", {"query": "q", "tags": broken, "exact": True})]
    assert said(format_named(name).parser(TOOLS), list(text)) == whole
