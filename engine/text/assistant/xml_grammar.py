"""Grammars of calls whose parameters stand between tags as bare text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.engine.text.assistant.grammars import json_of, one_of, words
from octavo.engine.text.assistant.json_text import dumps
from octavo.engine.text.assistant.schema_parts import (
    literals,
    object_schemas,
    strings_alone,
    union_pattern,
    with_definitions,
)
from octavo.engine.text.assistant.tool import FunctionTool
from octavo.engine.text.assistant.tool_schemas import arguments_schema
from octavo.engine.text.assistant.value_grammar import text_up_to
from octavo.engine.text.assistant.values import ALL, json_of_text, resolved, types_of

if TYPE_CHECKING:
    from octavo.engine.text.assistant.xml_calls import Tags

_STRING = frozenset({"string"})
_SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
_ANNOTATIONS = frozenset({"description", "title", "default", "examples", "deprecated"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def call_rules(
    name: str, tool: FunctionTool, tags: Tags, section_end: str, specials: Mapping[str, int]
) -> list[str]:
    """Rules of one tool's calls.

    Parameters come in the schema's order, each at most once. Those that the schema does not name
    come only if it names none. No text of a rule is another's beginning at the same place: the
    library does not go back to the shorter one.

    Args:
        name: of the first rule.
        tool: whose calls.
        tags: of the format.
        section_end: what ends a call in a format without a tag for it.
        specials: ids of special tokens by their text.
    """
    return list(_Rules(name, tool, tags, section_end, specials).rules())


class _Rules:
    def __init__(
        self,
        name: str,
        tool: FunctionTool,
        tags: Tags,
        section_end: str,
        specials: Mapping[str, int],
    ) -> None:
        self._name = name
        self._tool = tool
        self._tags = tags
        self._specials = specials
        self._root = arguments_schema(tool)
        self._pad = "\n" if tags.is_padded else ""
        end = tags.line + (tags.call_end or section_end)
        self._end = self._words(end)
        self._nothing = f" | {self._words(tags.nothing + end)}" if tags.nothing else ""

    def rules(self) -> Iterator[str]:
        """The rules, the call's first."""
        tags, name = self._tags, self._name
        kinds = object_schemas(self._root, self._root)
        parts = [f"{name}_args_{index}" for index in range(len(kinds))]
        line = tags.line if tags.call else ""
        first = self._words(line + tags.call + self._tool.name + tags.named)
        yield f"{name}: {first} ({one_of(parts)})"
        for part, schema in zip(parts, kinds, strict=True):
            yield from self._arguments(part, schema)

    def _arguments(self, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        properties = schema.get("properties")
        more = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not properties:
            if more is False:
                yield f"{name}: {self._end}{self._nothing}"
                return
            value = more if isinstance(more, Mapping) else {}
            yield f"{name}: {name}_any* {self._end}{self._nothing}"
            opened, rules = self._value(f"{name}_any", value)
            tags = self._tags
            before = self._words(tags.line + tags.key)
            yield f"{name}_any: {before} /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ {opened}"
            yield from rules
            return
        required = schema.get("required") or ()
        made = []
        for index, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{index}"
            made.append(rule if key in required else f"{rule}?")
            body, rules = self._value(rule, value)
            before = self._words(self._tags.line + self._tags.key + key)
            yield f"{rule}: {before} {body}"
            yield from rules
        nothing = "" if any(key in required for key in properties) else self._nothing
        yield f"{name}: {' '.join(made)} {self._end}{nothing}"

    def _value(self, name: str, schema: Any) -> tuple[str, list[str]]:
        """What follows a parameter's name, and the rules for it."""
        types = types_of(schema, self._root)
        schema = resolved(schema, self._root) if isinstance(schema, Mapping) else {}
        self._value_tag(is_string="string" in types and types != ALL)
        values = literals(schema, self._root)
        if values is not None:
            return self._one_of_values(values, types), []
        if "string" not in types:
            return self._json(schema), []
        if self._tags.types is not None and types not in (ALL, _STRING):
            text, rules = self._text(name, strings_alone(schema, self._root))
            string = f"{self._value_tag(is_string=True)} {self._words(self._pad)} {text}"
            return f"({one_of([string, self._json(_without_strings(schema, self._root))])})", rules
        if not self._is_free(schema, types):
            return self._json(_without_strings(schema, self._root)), []
        text, rules = self._text(name, schema)
        tag = self._value_tag(is_string=types == _STRING)
        return f"{tag} {self._words(self._pad)} {text}", rules

    def _json(self, schema: Mapping[str, Any]) -> str:
        """A value that is no string, and its tags."""
        body = json_of(with_definitions(schema, self._root))
        end = self._words(self._pad + self._tags.value_end)
        return f"{self._value_tag(is_string=False)} {self._words(self._pad)} {body} {end}"

    def _one_of_values(self, values: Sequence[Any], types: frozenset[str]) -> str:
        """One of some values, and its tags."""
        kinds = []
        for is_string in (True, False):
            texts = [
                # A string that would be read as another value stands in quotes.
                each if is_string and self._reads_as_string(each, types) else dumps(each)
                for each in values
                if isinstance(each, str) == is_string
            ]
            end = self._pad + self._tags.value_end
            written = [self._words(self._pad + text + end) for text in texts]
            if written:
                kinds.append(f"{self._value_tag(is_string=is_string)} ({one_of(written)})")
        return f"({one_of(kinds)})"

    def _reads_as_string(self, text: str, types: frozenset[str]) -> bool:
        return self._tags.types is not None or json_of_text(text, types) == dumps(text)

    def _text(self, name: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        """A rule for a string's text up to its closing tag, and what it needs."""
        pattern = union_pattern(schema, self._root)
        # Of all strings without a pattern there is one rule, for all tools.
        name = f"{name}_text" if pattern else "any_text"
        # The parser leaves out a line break before the tag if there is one.
        end = self._tags.value_end
        end = self._pad + end if pattern else end
        # For the parser a line with another tag ends the value as well.
        tags = self._tags
        never: tuple[str, ...] = ()
        if tags.is_padded:
            never = ("\n" + tags.key, "\n" + tags.call_end, *((tags.value_end,) if pattern else ()))
        return name, text_up_to(name, pattern, end, self._specials, never)

    def _is_free(self, schema: Mapping[str, Any], types: frozenset[str]) -> bool:
        """Whether any text of its types matches the schema, but for what it says of strings."""
        if types == ALL:
            return not schema.keys() - _ANNOTATIONS
        return types == _STRING or (
            types <= _SCALARS and not _keywords(schema, self._root) & _BOUNDS
        )

    def _value_tag(self, *, is_string: bool) -> str:
        tags = self._tags
        if tags.types is None:
            return self._words(tags.value)
        return self._words(next(text for text, says in tags.types.items() if says == is_string))

    def _words(self, text: str) -> str:
        return words(text, self._specials)


def _without_strings(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema's values that are not strings: a string beside them could be read as one."""
    made = dict(schema)
    for key in ("anyOf", "oneOf"):
        if isinstance(made.get(key), list):
            made[key] = [each for each in made[key] if types_of(each, root) != {"string"}]
            return made
    others = types_of(schema, root) - {"string"}
    return {**made, "type": sorted(others)}


def _keywords(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """What a schema and the choices in it say."""
    schema = resolved(schema, root)
    found = frozenset(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or () if isinstance(schema.get(key), list) else ():
            if isinstance(each, Mapping) and "$ref" not in each:
                found |= _keywords(each, root)
    return found
