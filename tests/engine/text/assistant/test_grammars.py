"""What a format's grammar lets a model write is a call that its parser reads and that is valid."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import settings

from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice
from tests.engine.text.assistant.renderers import RENDERERS
from tests.engine.text.assistant.turns import TOOLS, random_call, said
from tests.engine.text.assistant.walks import BEGINS, matcher_of, specials_of, walk

IS_SOAK = settings.default.max_examples > 1000
NUM_WALKS = 200 if IS_SOAK else 5
NUM_EXAMPLES = 200 if IS_SOAK else 10
CHOICES = {
    "required": ToolChoice("required"),
    "named": ToolChoice("required", "get_weather", is_parallel=False),
    "auto": ToolChoice("auto"),
    "auto, one call": ToolChoice("auto", is_parallel=False),
}


def schema_of(tools: Sequence[FunctionTool], name: str) -> Mapping[str, Any]:
    return next(tool.parameters or {} for tool in tools if tool.name == name)


@pytest.mark.parametrize("has_specials", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", RENDERERS)
def test_what_a_grammar_allows_is_read_as_valid_calls(name, has_specials, vocabulary, tokens):
    tool_format = format_named(name)
    specials = specials_of(name, vocabulary, has_specials=has_specials)
    rng = random.Random(0)
    num_ended = num_calls = 0
    for choice in CHOICES.values():
        grammar = tool_format.grammar(TOOLS, choice, specials)
        if grammar is None:
            assert name == "openai"
            continue
        begins = [*specials, *tool_format.markers, *BEGINS] if choice.mode == "auto" else []
        first = matcher_of(grammar, tokens, vocabulary)
        for _ in range(NUM_WALKS):
            text = walk(first.deep_copy(), vocabulary, rng, specials, begins)
            if text is None:
                continue
            num_ended += 1
            turn = said(tool_format.parser(TOOLS), [text])
            num_calls += len(turn.calls)
            assert turn.num_ended == len(turn.calls), text
            for call in turn.calls:
                jsonschema.validate(call.arguments, schema_of(TOOLS, call.name))
                assert choice.name in (None, call.name)
            if choice.mode == "required":
                assert turn.calls, text
                assert not turn.content, text
            if not choice.is_parallel:
                assert len(turn.calls) <= 1, text
    # Not every walk comes to an end: objects in objects may go on for long.
    assert num_ended >= NUM_WALKS or name == "openai"
    assert num_calls >= 3 or name == "openai"


@pytest.mark.parametrize("has_specials", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", RENDERERS)
def test_a_grammar_allows_what_the_template_renders(name, has_specials, vocabulary, tokens):
    tool_format = format_named(name)
    specials = specials_of(name, vocabulary, has_specials=has_specials)
    for kind in ("required", "auto"):
        grammar = tool_format.grammar(TOOLS, CHOICES[kind], specials)
        if grammar is None:
            continue
        first = matcher_of(grammar, tokens, vocabulary)
        for seed in range(NUM_EXAMPLES):
            rng = random.Random(seed)
            calls = [random_call(rng) for _ in range(1 if name == "openai" else rng.randint(1, 2))]
            text = RENDERERS[name](First(), calls)
            if "\x7f" in text:  # which the library's JSON has not
                continue
            if kind == "auto" and name not in ("pythonic", "openai"):
                text = f"So: {text}"
            text = text.removesuffix("<|call|>")
            ids = vocabulary.encode(text, specials)
            num_taken = first.deep_copy().validate_tokens(ids)
            rest = vocabulary.decode(ids[num_taken:])
            assert not rest, (kind, text, grammar)
            matcher = first.deep_copy()
            assert matcher.consume_tokens(ids)
            assert matcher.is_accepting(), text


class First(random.Random):
    """Chooses the first of everything: a template in its main form."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 0.9
