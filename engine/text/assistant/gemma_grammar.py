"""Grammars of calls as Gemma's families write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.text.assistant.grammars import json_of, one_of, words
from octavo.engine.text.assistant.json_text import dumps
from octavo.engine.text.assistant.keyword_grammar import in_order
from octavo.engine.text.assistant.tool import FunctionTool
from octavo.engine.text.assistant.tool_schemas import arguments_schema
from octavo.engine.text.assistant.values import ALL, resolved, types_of
from octavo.engine.text.assistant.xml_grammar import (
    ANY_TEXT,
    literals,
    object_schemas,
    pattern_of,
    with_definitions,
)

_KEY = "/[a-zA-Z_][a-zA-Z0-9_]*:/"


def call_rules(name: str, tool: FunctionTool, quote: str, specials: Mapping[str, int]) -> list[str]:
    """Rules of one tool's calls.

    Arguments come in the schema's order. Those that the schema does not name come only if it names
    none.

    Args:
        name: of the first rule.
        tool: whose calls.
        quote: what a string begins and ends with.
        specials: ids of special tokens by their text.
    """
    made = _Rules(name, arguments_schema(tool), quote, specials)
    arguments = made.objects(made.root)
    return [f"{name}: {words(f'call:{tool.name}', specials)} {arguments}", *made.rules]


class _Rules:
    def __init__(
        self, name: str, root: Mapping[str, Any], quote: str, specials: Mapping[str, int]
    ) -> None:
        self.root = root
        self.rules: list[str] = []
        self._name = name
        self._quote = quote
        self._specials = specials
        self._names: list[str] = []
        self._made: dict[str, str] = {}

    def objects(self, schema: Mapping[str, Any]) -> str:
        """A rule for the objects of a schema."""
        local = schema if schema is self.root else with_definitions(schema, self.root)
        return one_of_rules([self._object(each) for each in object_schemas(local)])

    def _object(self, schema: Mapping[str, Any]) -> str:
        name = self._new()
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and properties:
            parts = []
            for key, value in properties.items():
                part = self._new()
                self.rules.append(f"{part}: {self._words(key + ':')} {self._value(value)}")
                parts.append(part)
            needed = schema.get("required") or ()
            self.rules += in_order(f"{name}_in", parts, [key in needed for key in properties], ",")
        elif schema.get("additionalProperties", True) is False:
            self.rules.append(f'{name}_in: ""')
        else:
            more = schema.get("additionalProperties", {})
            value = self._value(more)
            self.rules.append(f'{name}_in: ({name}_any ("," {name}_any)*)?')
            self.rules.append(f"{name}_any: {name.upper()}_KEY {value}")
            self.rules.append(f"{name.upper()}_KEY: {_KEY}")
        self.rules.append(f'{name}: "{{" {name}_in "}}"')
        return name

    def _value(self, schema: Any) -> str:
        """A rule for a value of a schema."""
        schema = schema if isinstance(schema, Mapping) else {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference in self._made:
                return self._made[reference]
            name = self._made[reference] = self._new()
            self.rules.append(f"{name}: {self._value(resolved(schema, self.root))}")
            return name
        values = literals(schema, self.root)
        if values is not None:
            return one_of_rules([self._literal(each) for each in values])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                rest = {name: value for name, value in schema.items() if name != key}
                parts = [{**rest, **each} for each in schema[key] if isinstance(each, Mapping)]
                return one_of_rules([self._value(part) for part in parts])
        types = types_of(schema, self.root)
        if types == ALL:
            types = frozenset({"string", "number", "boolean", "null"})
        kinds = []
        if "string" in types:
            kinds.append(self._string(schema))
        if "array" in types:
            kinds.append(self._array(schema))
        if "object" in types:
            kinds.append(self.objects(schema))
        bare = sorted(types - {"string", "array", "object"})
        if bare:
            kinds.append(json_of({**schema, "type": bare}))
        return one_of_rules(kinds)

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return self._words(self._quote + value + self._quote)
        return self._words(dumps(value))

    def _string(self, schema: Mapping[str, Any]) -> str:
        name = self._new()
        upper, pattern = f"{name.upper()}_TEXT", pattern_of(schema)
        quote = self._words(self._quote)
        if self._quote in self._specials:
            self.rules.append(f"{name}: {quote} {upper}? {quote}")
            self.rules.append(f"{upper}: {pattern}")
            return name
        whole = f"{upper}: ({pattern} {quote})"
        if pattern != ANY_TEXT:
            whole += f" & ~(/(?s:.*)/ {quote} /(?s:.+)/)"
        self.rules += [f"{name}: {quote} {name}_rest", f"{name}_rest[lazy]: {upper}", whole]
        return name

    def _array(self, schema: Mapping[str, Any]) -> str:
        name = self._new()
        item = self._value(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        self.rules.append(f"{name}_item: {item}")
        if most == 0:
            self.rules.append(f'{name}: "[" "]"')
            return name
        count = f"{{{max(0, least - 1)},{'' if most is None else max(0, most - 1)}}}"
        some = f'{name}_item ("," {name}_item){count}'
        self.rules.append(f'{name}: "[" {some if least else f"({some})?"} "]"')
        return name

    def _new(self) -> str:
        name = f"{self._name}_{len(self._names)}"
        self._names.append(name)
        return name

    def _words(self, text: str) -> str:
        return words(text, self._specials)


def one_of_rules(rules: list[str]) -> str:
    """Any one of some rules, as a part of another."""
    return f"({one_of(rules)})"
