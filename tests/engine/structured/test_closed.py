"""Closed schemas refuse what nobody named, and nothing that was named."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from octavo.engine.structured.closed import closed
from octavo.engine.structured.params import StructuredOutputsParams

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    # schema, what matches it closed, what matched it before alone
    "an object": (A, [{}, {"a": 1}], [{"x": 1}, {"a": 1, "x": 1}]),
    "inside another": (
        {"properties": {"in": A}, "type": "object"}, [{"in": {"a": 1}}], [{"in": {"x": 1}}],
    ),
    "in a list": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"x": 1}]]),
    "in a tuple": ({"prefixItems": [A, B]}, [[{"a": 1}, {"b": 1}]], [[{"a": 1}, {"a": 1}]]),
    "one of two": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"x": 1}]),
    "by reference": (
        {"$defs": {"A": A}, "type": "object", "properties": {"in": {"$ref": "#/$defs/A"}}},
        [{"in": {"a": 1}}], [{"in": {"x": 1}}],
    ),
    "a property called properties": (
        {"type": "object", "properties": {"properties": A, "allOf": B, "$ref": B}},
        [{"properties": {"a": 1}, "allOf": {"b": 1}}], [{"properties": {"x": 1}}, {"x": 1}],
    ),
    "of all": ({"allOf": [A, B]}, [{"a": 1, "b": 1}, {"x": 1}], []),
    "of all by reference": (
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, [{"a": 1, "b": 1}], [],
    ),
    "of one": ({"allOf": [A]}, [{"a": 1}], [{"x": 1}]),
    "beside a choice": ({**A, "anyOf": [B, {"required": ["c"]}]}, [{"a": 1, "b": 2, "c": 3}], []),
    "that says so": ({**A, "additionalProperties": True}, [{"x": 1}], []),
    "of values": (
        {"type": "object", "additionalProperties": A}, [{"x": {"a": 1}}], [{"x": {"x": 1}}],
    ),
    "of patterns": (
        {"type": "object", "patternProperties": {"^k": {}}}, [{"k1": 1}], [{"x": 1}],
    ),
    "that names nothing": ({"type": "object"}, [{}, {"x": 1}], []),
    "a schema in a constant": ({"const": A}, [A], []),
    "itself": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        [{"next": {"next": {}}}], [{"next": {"next": {"x": 1}}}],
    ),
    "anything": (True, [{"x": 1}, 3], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_object_has_what_its_schema_names(name):
    schema, good, invented = CASES[name]
    before = copy.deepcopy(schema)
    made = closed(schema)
    assert schema == before
    for value in good:
        jsonschema.validate(value, schema)
        jsonschema.validate(value, made)
    for value in invented:
        jsonschema.validate(value, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, made)
    assert closed(made) == made


def test_two_ways_of_asking_are_two_grammars():
    plain, strict = (
        StructuredOutputsParams(json=A, disable_additional_properties=value)
        for value in (False, True)
    )
    assert plain != strict
    assert '"additionalProperties": false' in str(strict.json)
    assert "additionalProperties" not in str(plain.json)
    assert StructuredOutputsParams(**strict.given()) == strict
