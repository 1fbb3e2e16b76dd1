"""Grammars of calls whose parameters stand between tags as bare text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from octavo.engine.text.assistant.grammars import json_of, one_of, words
from octavo.engine.text.assistant.json_text import dumps
from octavo.engine.text.assistant.tool import FunctionTool
from octavo.engine.text.assistant.tool_schemas import arguments_schema
from octavo.engine.text.assistant.values import ALL, resolved, types_of

if TYPE_CHECKING:
    from octavo.engine.text.assistant.xml_calls import Tags

_DEFINITIONS = ("$defs", "definitions")
_SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def call_rules(name: str, tool: FunctionTool, tags: Tags, specials: Mapping[str, int]) -> list[str]:
    """Rules of one tool's calls.

    Parameters come in the schema's order, each at most once. Those that the schema does not name
    come only if it names none.

    Args:
        name: of the first rule.
        tool: whose calls.
        tags: of the format.
        specials: ids of special tokens by their text.
    """
    return list(_Rules(name, tool, tags, specials).rules())


def object_schemas(root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects of which a schema of arguments is one, each with all that it says of them."""
    top = dict(resolved(root, root))
    for part in top.pop("allOf", []):
        top = _merged(top, resolved(part, root))
    for key in ("anyOf", "oneOf"):
        if isinstance(top.get(key), list) and top[key]:
            parts = top.pop(key)
            return [_merged(top, resolved(part, root)) for part in parts]
    return [top]


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema that stands alone: with what its references point at."""
    if not isinstance(schema, Mapping):
        return schema
    found = {key: root[key] for key in _DEFINITIONS if key in root}
    return {**found, **schema}


class _Rules:
    def __init__(
        self, name: str, tool: FunctionTool, tags: Tags, specials: Mapping[str, int]
    ) -> None:
        self._name = name
        self._tool = tool
        self._tags = tags
        self._specials = specials
        self._root = arguments_schema(tool)
        self._pad = "\n" if tags.is_padded else ""

    def rules(self) -> Iterator[str]:
        """The rules, the call's first."""
        tags, name = self._tags, self._name
        kinds = object_schemas(self._root)
        parts = [f"{name}_args_{index}" for index in range(len(kinds))]
        end = self._words(tags.line + tags.call_end) if tags.call_end else self._words(tags.line)
        first = self._words(tags.call + self._tool.name + tags.named)
        yield f"{name}: {first} ({one_of(parts)}) {end}"
        for part, schema in zip(parts, kinds, strict=True):
            yield from self._arguments(part, schema)

    def _arguments(self, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        properties = schema.get("properties")
        more = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not properties:
            if more is False:
                yield f'{name}: ""'
                return
            value = more if isinstance(more, Mapping) else {}
            yield f"{name}: {name}_any*"
            opened, rules = self._value(f"{name}_any", value)
            tags = self._tags
            before = self._words(tags.line + tags.key)
            yield f"{name}_any: {before} /[a-zA-Z_][a-zA-Z0-9_]*/ {opened}"
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
        yield f"{name}: {' '.join(made)}"

    def _value(self, name: str, schema: Any) -> tuple[str, list[str]]:
        """What follows a parameter's name, and the rules for it."""
        types = types_of(schema, self._root)
        schema = resolved(schema, self._root) if isinstance(schema, Mapping) else {}
        value_tag = self._value_tag(is_string="string" in types and types != ALL)
        values = literals(schema, self._root)
        end = self._pad + self._tags.value_end
        if values is not None:
            texts = [each if isinstance(each, str) else dumps(each) for each in values]
            written = [self._words(self._pad + text + end) for text in texts]
            return f"{value_tag} ({one_of(written)})", []
        if "string" not in types or not self._is_free(schema, types):
            shown = schema
            if "string" in types:
                shown = _without_strings(schema, self._root)
            body = json_of(with_definitions(shown, self._root))
            tag = self._value_tag(is_string=False)
            return f"{tag} {self._words(self._pad)} {body} {self._words(end)}", []
        return f"{value_tag} {self._words(self._pad)} {name}_text", self._text(name, schema)

    def _text(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """A string's text up to its closing tag."""
        upper = f"{name}_TEXT".upper()
        pattern = pattern_of(schema)
        end = self._tags.value_end
        if end in self._specials:
            tail = f"{self._words(self._pad)} " if self._pad else ""
            return [f"{name}_text: {upper}? {tail}{self._words(end)}", f"{upper}: {pattern}"]
        whole = f"{upper}: ({pattern} {self._words(self._pad + end)})"
        if pattern == ANY_TEXT:
            # The parser leaves out a line break before the tag if there is one.
            whole = f"{upper}: {pattern} {self._words(end)}"
        else:
            whole += f" & ~(/(?s:.*)/ {self._words(end)} /(?s:.+)/)"
        return [f"{name}_text[lazy]: {upper}", whole]

    def _is_free(self, schema: Mapping[str, Any], types: frozenset[str]) -> bool:
        """Whether any text of its types matches the schema, but for what it says of strings."""
        if types == ALL:
            return not schema.keys() - _ANNOTATIONS
        return types <= _SCALARS and not _keywords(schema, self._root) & _BOUNDS

    def _value_tag(self, *, is_string: bool) -> str:
        tags = self._tags
        if tags.types is None:
            return self._words(tags.value)
        return self._words(next(text for text, says in tags.types.items() if says == is_string))

    def _words(self, text: str) -> str:
        return words(text, self._specials)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    properties = {**(first.get("properties") or {}), **(second.get("properties") or {})}
    required = [*(first.get("required") or ()), *(second.get("required") or ())]
    made = {**first, **second}
    if properties:
        made["properties"] = properties
    if required:
        made["required"] = required
    return made


def literals(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    """The values of which a schema's is one, if it names them."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [literals(resolved(each, root), root) for each in schema[key]]
            if all(part is not None for part in parts):
                return [value for part in parts for value in part or ()]
    return None


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


def pattern_of(schema: Mapping[str, Any]) -> str:
    """A terminal of the texts that match a string's schema."""
    parts = []
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        first = "" if pattern.startswith("^") else "(?s:.*)"
        last = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner if last else inner[:-1]
        parts.append(f"/{first}(?:{_in_slashes(inner)}){last}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    return f"({' & '.join(parts)})" if parts else ANY_TEXT


def _in_slashes(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)


ANY_TEXT = "/(?s:.*)/"
_ANNOTATIONS = frozenset({"description", "title", "default", "examples", "deprecated"})
