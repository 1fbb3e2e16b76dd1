"""Grammars of values that are not written as JSON, by their schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.text.assistant.grammars import json_of, one_of, words
from octavo.engine.text.assistant.schema_parts import (
    literals,
    object_schemas,
    pattern_of,
)
from octavo.engine.text.assistant.values import ALL, resolved, types_of


@dataclass(frozen=True, slots=True)
class Style:
    """How a format writes values.

    Attributes:
        separator: between the parts of an object or an array.
        keys: the texts of which an object's key is one, with the colon after it.
        any_key: a terminal of keys that no schema names, with the colon.
        literals: the texts of which a value that the schema names is one.
        quote: what a string stands between, if it is the same for all; no string holds it.
        strings: a terminal of strings, where there is no such quote: they have escapes.
    """

    separator: str
    keys: Callable[[str], list[str]]
    any_key: str
    literals: Callable[[Any], list[str]]
    quote: str = ""
    strings: str = ""


class ValueRules:
    """Rules for the values of one tool's schema.

    Args:
        name: what the rules' names begin with.
        root: schema of the arguments, in which references are looked up.
        style: of the format.
        specials: ids of special tokens by their text.

    Attributes:
        rules: those that were made so far.
    """

    def __init__(
        self, name: str, root: Mapping[str, Any], style: Style, specials: Mapping[str, int]
    ) -> None:
        self.rules: list[str] = []
        self._name = name
        self._root = root
        self._style = style
        self._specials = specials
        self._num_names = 0
        self._made: dict[str, str] = {}

    def arguments(self, key: Callable[[str], list[str]], any_key: str) -> str:
        """A rule for what stands in a call's parentheses or braces.

        Args:
            key: the texts of which an argument's name is one, with what follows it.
            any_key: a terminal of names that the schema does not have.
        """
        kinds = object_schemas(self._root, self._root)
        return _group([self._members(each, key, any_key) for each in kinds])

    def _members(
        self, schema: Mapping[str, Any], key: Callable[[str], list[str]], any_key: str
    ) -> str:
        """A rule for an object's parts in the schema's order.

        Those that the schema does not name come only if it names none.
        """
        name = self._new()
        properties = schema.get("properties")
        more = schema.get("additionalProperties", True)
        if isinstance(properties, Mapping) and properties:
            parts = []
            for each, value in properties.items():
                part = self._new()
                written = _group([self._words(text) for text in key(each)])
                self.rules.append(f"{part}: {written} {self._value(value)}")
                parts.append(part)
            needed = schema.get("required") or ()
            is_needed = [each in needed for each in properties]
            self.rules += in_order(name, parts, is_needed, self._style.separator)
        elif more is False:
            self.rules.append(f'{name}: ""')
        else:
            between = self._words(self._style.separator)
            self.rules.append(f"{name}: ({name}_any ({between} {name}_any)*)?")
            self.rules.append(f"{name}_any: {name.upper()}_KEY {self._value(more)}")
            self.rules.append(f"{name.upper()}_KEY: {any_key}")
        return name

    def _value(self, schema: Any) -> str:
        """A rule for a value of a schema."""
        schema = schema if isinstance(schema, Mapping) else {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._made:
                name = self._made[reference] = self._new()
                self.rules.append(f"{name}: {self._value(resolved(schema, self._root))}")
            return self._made[reference]
        values = literals(schema, self._root)
        if values is not None:
            texts = [text for value in values for text in self._style.literals(value)]
            return _group([self._words(text) for text in texts])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                rest = {name: value for name, value in schema.items() if name != key}
                parts = [{**rest, **each} for each in schema[key] if isinstance(each, Mapping)]
                return _group([self._value(part) for part in parts])
        types = types_of(schema, self._root)
        if types == ALL and not schema:
            return self._anything()
        return self._of_types(schema, types - {"integer"} if types == ALL else types)

    def _of_types(self, schema: Mapping[str, Any], types: frozenset[str]) -> str:
        kinds = []
        if "string" in types:
            kinds.append(self._string(schema))
        if "array" in types:
            kinds.append(self._array(schema))
        if "object" in types:
            members = [
                self._members(each, self._style.keys, self._style.any_key)
                for each in object_schemas(schema, self._root)
            ]
            kinds.append(f'"{{" {_group(members)} "}}"')
        constants: list[Any] = [True, False] if "boolean" in types else []
        constants += [None] if "null" in types else []
        kinds += [self._words(text) for value in constants for text in self._style.literals(value)]
        numbers = sorted(types & {"integer", "number"})
        if numbers:
            kinds.append(json_of({**schema, "type": numbers}))
        return _group(kinds)

    def _anything(self) -> str:
        """A rule for any value."""
        if "" not in self._made:
            name = self._made[""] = self._new()
            types = ALL - {"integer"}
            items: dict[str, Any] = {}
            self.rules.append(f"{name}: {self._of_types(items, types)}")
        return self._made[""]

    def _string(self, schema: Mapping[str, Any]) -> str:
        style = self._style
        pattern = pattern_of(schema)
        # Of all strings without a pattern there is one rule, for all tools.
        name = self._new() if pattern else "any_string"
        if style.strings:
            if pattern:
                return json_of({**schema, "type": "string"})
            self.rules += [f"{name}: {name.upper()}", f"{name.upper()}: {style.strings}"]
            return name
        self.rules.append(f"{name}: {self._words(style.quote)} {name}_rest")
        self.rules += text_up_to(f"{name}_rest", pattern, style.quote, self._specials)
        return name

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first, rest = schema.get("prefixItems"), schema.get("items", {})
        if isinstance(rest, list):  # as they stood before `prefixItems`
            first, rest = rest, schema.get("additionalItems", {})
        first = first if isinstance(first, list) else []
        if rest is False:
            most = min(len(first), len(first) if most is None else most)
        between = self._words(self._style.separator)
        parts = ""
        if most is None or most > len(first):
            name = self._new()
            self.rules.append(f"{name}: {self._value(rest)}")
            more = max(0, least - len(first))
            fewer = 0 if first else 1  # the first of all has nothing before it
            count = (
                f"{{{max(0, more - fewer)},{'' if most is None else most - len(first) - fewer}}}"
            )
            parts = f"({between} {name}){count}"
            if not first:
                parts = f"{name} {parts}" if least else f"({name} {parts})?"
        for index, each in reversed(list(enumerate(first[:most]))):
            one = f"{between if index else ''} {self._value(each)} {parts}"
            parts = one if index < least else f"({one})?"
        return f'"[" {parts} "]"'

    def _new(self) -> str:
        self._num_names += 1
        return f"{self._name}_{self._num_names}"

    def _words(self, text: str) -> str:
        return words(text, self._specials)


def text_up_to(
    name: str, pattern: str, end: str, specials: Mapping[str, int], never: Sequence[str] = ()
) -> list[str]:
    """Rules of a text and what ends it, which the text does not hold.

    Args:
        name: of the first rule.
        pattern: a terminal of such texts; "" for any.
        end: what ends them.
        specials: ids of special tokens by their text.
        never: what the text does not hold either.
    """
    upper = name.upper()
    if never:
        others = one_of([words(each, {}) for each in never])
        pattern = f"({pattern or _ANY} & ~({_ANY} ({others}) {_ANY}))"
    token = min((text for text in specials if text and text in end), key=end.index, default=None)
    if token is not None:
        # No text matches a special token: the text goes as far as the words before it.
        before, after = end[: end.index(token)], end[end.index(token) :]
        if before:
            whole = f"{pattern or _ANY} {words(before, {})}"
        else:
            whole = pattern or "/(?s:.+)/"
        mark = "" if before or pattern else "?"
        return [f"{name}: {upper}{mark} {words(after, specials)}", f"{upper}: {whole}"]
    last = words(end, {})
    whole = f"{pattern or _ANY} {last}"
    if pattern and not any(each in end for each in never):
        whole = f"({whole}) & ~({_ANY} {last} /(?s:.+)/)"
    return [f"{name}[lazy]: {upper}", f"{upper}: {whole}"]


def in_order(
    name: str, rules: Sequence[str], is_needed: Sequence[bool], separator: str
) -> Iterator[str]:
    """Rules of a list in which each part comes in its place or, if it is not needed, not at all.

    Args:
        name: of the rule to make.
        rules: of the parts.
        is_needed: for each.
        separator: between two that come.
    """
    between = words(separator, {})
    yield f"{name}: {name}_from_0"
    for index, (rule, needed) in enumerate(zip(rules, is_needed, strict=True)):
        skip = "" if needed else f" | {name}_from_{index + 1}"
        yield f"{name}_from_{index}: {rule} {name}_after_{index + 1}{skip}"
        mark = "" if needed else "?"
        if index:
            yield f"{name}_after_{index}: ({between} {rule}){mark} {name}_after_{index + 1}"
    yield f'{name}_from_{len(rules)}: ""'
    yield f'{name}_after_{len(rules)}: ""'


def _group(rules: Sequence[str]) -> str:
    return rules[0] if len(rules) == 1 else f"({one_of(rules)})"


_ANY = "/(?s:.*)/"
