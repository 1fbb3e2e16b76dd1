"""Schemas whose objects have the properties that they name, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OBJECT = ("properties", "patternProperties")
_CLOSING = ("additionalProperties", "unevaluatedProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalItems", "contains", "additionalProperties", "unevaluatedItems")
_CHOICES = ("anyOf", "oneOf")
_ADDING = ("allOf", "if", "then", "else", "not", "dependentSchemas", "$ref")
"""With one of these, properties that stand elsewhere in the schema are the object's as well."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that names its properties and
    says nothing of others, as OpenAI's strict mode has them.

    An object that is put together from several schemas (`allOf`, properties beside `anyOf`) stays
    as it is: each of its parts would forbid what the others name.

    Args:
        schema: as JSON gives it, not nested beyond what recursion can follow; not changed.
    """
    parts = frozenset(_parts(schema))
    return _closed(schema, parts, "#", may_close=True)


def _closed(schema: Any, parts: frozenset[str], place: str, *, may_close: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    may_close = may_close and place not in parts
    made = dict(schema)
    for name in _MAPS:
        if isinstance(made.get(name), Mapping):
            made[name] = {
                key: _closed(inner, parts, f"{place}/{name}/{key}", may_close=True)
                for key, inner in made[name].items()
            }
    for name in _SCHEMAS:
        if name in made:
            made[name] = _closed(made[name], parts, f"{place}/{name}", may_close=True)
    for name in ("items", "prefixItems"):
        if isinstance(made.get(name), list):
            made[name] = [_closed(each, parts, "", may_close=True) for each in made[name]]
    alone = may_close and not _is_put_together(made)
    for name in (*_CHOICES, "allOf"):
        if isinstance(made.get(name), list):
            made[name] = [_closed(each, parts, "", may_close=alone) for each in made[name]]
    names_any = any(name in made for name in _OBJECT)
    if alone and names_any and not any(name in made for name in _CLOSING):
        made["additionalProperties"] = False
    return made


def _is_put_together(schema: Mapping[str, Any]) -> bool:
    """Whether its object's properties stand in several schemas."""
    own = any(name in schema for name in _OBJECT)
    others = [name for name in (*_ADDING, *_CHOICES) if name in schema]
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or len(others) + own > 1


def _parts(schema: Any) -> Iterator[str]:
    """Places of definitions that are a part of some object, by their references."""
    level = [(schema, False)]
    while level:
        inner: list[tuple[Any, bool]] = []
        for item, is_part in level:
            if isinstance(item, list):
                inner += [(each, is_part) for each in item]
            elif isinstance(item, Mapping):
                is_part = is_part or _is_put_together(item)
                if is_part and isinstance(item.get("$ref"), str):
                    yield item["$ref"]
                for name, value in item.items():
                    inner.append((value, is_part and name in (*_ADDING, *_CHOICES)))
        level = inner
