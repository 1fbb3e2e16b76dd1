"""What tools' schemas say holds in every format's grammar, with a thought before the call too."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from hypothesis import settings

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.assistant.formats import format_named
from octavo.engine.text.assistant.reasoning import REASONING_FORMATS, reasoning_named
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice
from octavo.engine.text.assistant.tool_grammar import MAX_TOOLS_CHARS, tool_grammar
from tests.engine.text.assistant.renderers import RENDERERS
from tests.engine.text.assistant.test_grammars import First
from tests.engine.text.assistant.turns import TOOLS, Call, said
from tests.engine.text.assistant.walks import matcher_of, specials_of, walk

IS_SOAK = settings.default.max_examples > 1000
NUM_WALKS = 60 if IS_SOAK else 2
REQUIRED = ToolChoice("required", is_parallel=False)


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


NODE = _object(["v"], v={"type": "integer"}, kids={"type": "array", "items": {"$ref": "#/$defs/n"}})
SCHEMAS: dict[str, Any] = {
    "nested": _object(["a", "b"], a={"type": "string"}, b=_object(["c"], c={"type": "integer"})),
    "pattern": _object(
        ["a"], a={"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"}, b={"pattern": "x+"}
    ),
    "reference": {**_object(["n"], n={"$ref": "#/$defs/n"}), "$defs": {"n": NODE}},
    "enum": _object(
        ["a"], a={"enum": ["x", "y z", 'q"u', "it's", 3, None, True]}, b={"const": "only"}
    ),
    "arrays": _object(
        ["a"],
        a={
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "minItems": 1,
            "maxItems": 3,
        },
    ),
    "bounds": _object(
        ["i", "x", "s"],
        i={"type": "integer", "minimum": 3, "maximum": 17},
        x={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        s={"type": "string", "minLength": 2, "maxLength": 5},
    ),
    "unions": _object(
        ["a", "b"],
        a={"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
        b={"type": ["string", "null"]},
        c={
            "anyOf": [
                _object(["k", "p"], k={"const": "p"}, p={"type": "integer"}),
                _object(["k", "q"], k={"const": "q"}, q={"type": "string"}),
            ]
        },
    ),
    "empty": {"type": "object", "properties": {}, "additionalProperties": False},
    "unicode": _object(["größe", "名前"], größe={"type": "integer"}, 名前={"type": "string"}),
    "formats": _object(
        ["day", "id"],
        day={"type": "string", "format": "date"},
        id={"type": "string", "format": "uuid"},
        host={"type": "string", "format": "ipv4"},
        mail={"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
    ),
    "digits": _object(["d"], d={"type": "string", "pattern": r"^\d{3}[\w.]\S/$"}),
    "tuples": _object(
        ["a", "b", "c"],
        a={
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"type": "integer"}],
            "items": False,
            "minItems": 2,
        },
        b={"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}},
        c={
            "type": "array",
            "prefixItems": [{"type": "null"}],
            "items": {"type": "integer"},
            "minItems": 3,
            "maxItems": 4,
        },
    ),
    "bounded unions": _object(
        ["a", "b", "c", "d"],
        a={"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        b={"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]},
        c={"anyOf": [{"type": "string", "minLength": 2, "maxLength": 4}, {"type": "number"}]},
        d={"anyOf": [{"enum": ["x", ""]}, {"type": "string", "pattern": "^y+$"}]},
    ),
    "demanded, not named": {
        **_object(["a", "b"], a={"type": "integer"}),
        "additionalProperties": {"type": "boolean"},
    },
    "named values": _object(["a"], a={"enum": [{"k": [1, "s", {}]}, ["s", None], [], "[", {}]}),
    "not unique": _object(
        ["a"], a={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": False}
    ),
    "quotes": _object(['a"b', "it's"], **{'a"b': {"type": "integer"}, "it's": {"type": "string"}}),
}
TWENTY = [
    FunctionTool(
        f"tool_{index}",
        _object(
            ["p0"],
            **{
                f"p{place}": [
                    {"type": "string"},
                    {"type": "integer"},
                    {"type": "boolean"},
                    {"type": "array", "items": _object([], z={"enum": ["a", "b"]})},
                ][place % 4]
                for place in range(12)
            },
        ),
    )
    for index in range(20)
]


FULL = RENDERERS if IS_SOAK else ("hermes", "pythonic", "gemma4", "qwen3_coder", "deepseek_v32")
"""Formats of which each has a grammar of values of its own."""


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("name", FULL)
def test_a_call_matches_its_schema(name, kind, vocabulary, tokens):
    for has_specials, is_strict in ((False, True), (True, False)):
        tool = FunctionTool("f", SCHEMAS[kind], is_strict=is_strict)
        specials = specials_of(name, vocabulary, has_specials=has_specials)
        if not all(map(format_named(name).can_name, SCHEMAS[kind]["properties"])):
            with pytest.raises(InvalidRequestError, match=rf"properties = .* format {name} can"):
                tool_grammar(format_named(name), [tool], REQUIRED, specials)
            continue
        grammar = tool_grammar(format_named(name), [tool], REQUIRED, specials)
        if grammar is None:
            assert name == "openai"
            continue
        first = matcher_of(grammar, tokens, vocabulary)
        rng = random.Random(kind)
        for _ in range(NUM_WALKS):
            text = walk(first.deep_copy(), vocabulary, rng, specials, [])
            if text is None:
                continue
            turn = said(format_named(name).parser([tool]), [text])
            assert [call.name for call in turn.calls] == ["f"], text
            assert turn.num_ended == 1, text
            validate(turn.calls[0].arguments, SCHEMAS[kind])


def validate(arguments: Any, schema: dict[str, Any]) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(arguments, schema, format_checker=checker)


@pytest.mark.parametrize("name", FULL)
def test_a_call_may_nest_as_a_schema_that_refers_to_itself(name, vocabulary, tokens):
    schema = _object(["kids"], kids={"type": "array", "items": {"$ref": "#"}, "maxItems": 2})
    grammar = tool_grammar(format_named(name), [FunctionTool("f", schema)], REQUIRED)
    first = matcher_of(grammar or "", tokens, vocabulary)
    for kids, is_allowed in (([{"kids": [{"kids": []}]}], True), ([[]], False), ([1], False)):
        text = RENDERERS[name](First(), [Call("f", {"kids": kids})])
        matcher = first.deep_copy()
        ids = vocabulary(text)
        assert (matcher.validate_tokens(ids) == len(ids)) == is_allowed, text


@pytest.mark.parametrize("has_specials", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize(
    "thoughts", [each.name for each in REASONING_FORMATS if not each.whole_turn]
)
def test_a_call_follows_a_thought(thoughts, has_specials, vocabulary, tokens):
    reasoning = reasoning_named(thoughts)
    name = {"qwen3": "hermes", "deepseek_r1": "deepseek_v3", "deepseek_v3": "deepseek_v31"}.get(
        thoughts, thoughts if thoughts in RENDERERS else "hermes"
    )
    specials = specials_of(name, vocabulary, has_specials=has_specials)
    answer = tool_grammar(format_named(name), TOOLS, ToolChoice("required"), specials)
    assert answer is not None
    rng = random.Random(thoughts)
    num_calls = 0
    for is_open in (False, True):
        grammar = reasoning.grammar(answer, is_open=is_open, specials=specials)
        first = matcher_of(grammar, tokens, vocabulary)
        for _ in range(4 * NUM_WALKS):
            begins = [reasoning.closing] if is_open else [reasoning.opening, *specials]
            text = walk(first.deep_copy(), vocabulary, rng, specials, begins)
            if text is None:
                continue
            calls = format_named(name).parser(TOOLS)
            turn = said(reasoning.parser(calls, is_open=is_open), [text])
            assert turn.calls, text
            assert turn.num_ended == len(turn.calls), text
            assert not turn.content, text
            num_calls += len(turn.calls)
    assert num_calls


@pytest.mark.parametrize("name", RENDERERS)
def test_twenty_tools_make_a_grammar(name, vocabulary, tokens):
    specials = specials_of(name, vocabulary, has_specials=True)
    for mode in ("required", "auto") if IS_SOAK else ("auto",):
        grammar = tool_grammar(format_named(name), TWENTY, ToolChoice(mode), specials)
        if grammar is not None:
            matcher_of(grammar, tokens, vocabulary)


def test_too_long_a_grammar_names_its_tools():
    long = FunctionTool("long", _object([], **{f"p{i}": {"enum": ["x" * 90]} for i in range(900)}))
    with pytest.raises(InvalidRequestError, match=r"tools = .*long \(\d+\), ping \(\d+\)"):
        tool_grammar(format_named("hermes"), [TOOLS[3], long], ToolChoice())
    assert len(tool_grammar(format_named("hermes"), TWENTY, ToolChoice()) or "") <= MAX_TOOLS_CHARS


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([], r"tools\.f\.parameters = .* a JSON schema of an object"),
        ({"type": "banana"}, r"tools\.f\.parameters = .* a JSON schema .*banana"),
        (_object([], a={"pattern": "("}), r"tools\.f\.parameters = .* a JSON schema .*regex"),
        ({"properties": {}, "required": 3}, r"tools\.f\.parameters = .*required"),
        (_object([], a={"$ref": "#/$defs/x"}), r"tools\.f\.parameters = .*\$defs/x"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder", "gemma4"])
def test_a_schema_that_cannot_be_a_grammar_is_named(name, parameters, message):
    with pytest.raises(InvalidRequestError, match=message):
        tool_grammar(format_named(name), [FunctionTool("f", parameters)], ToolChoice())


def test_a_choice_that_names_no_tool_is_refused():
    with pytest.raises(InvalidRequestError, match=r"tool_choice = 'g' .* f"):
        tool_grammar(format_named("hermes"), [FunctionTool("f")], ToolChoice("required", "g"))
