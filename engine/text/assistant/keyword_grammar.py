"""Grammars of calls whose arguments are written `key=value`, separated by commas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from octavo.engine.text.assistant.grammars import json_of, one_of, words
from octavo.engine.text.assistant.tool import FunctionTool
from octavo.engine.text.assistant.tool_format import NO_SPECIALS
from octavo.engine.text.assistant.tool_schemas import arguments_schema
from octavo.engine.text.assistant.xml_grammar import object_schemas, with_definitions


def keyword_rules(name: str, tool: FunctionTool, before: str, after: str) -> list[str]:
    """Rules of one tool's calls, with values in JSON.

    Arguments come in the schema's order. Those that the schema does not name come only if it names
    none.

    Args:
        name: of the first rule.
        tool: whose calls.
        before: text before the first argument.
        after: text after the last.
    """
    root = arguments_schema(tool)
    kinds = object_schemas(root)
    parts = [f"{name}_args_{index}" for index in range(len(kinds))]
    first, last = words(before, NO_SPECIALS), words(after, NO_SPECIALS)
    rules = [f"{name}: {first} ({one_of(parts)}) {last}"]
    for part, schema in zip(parts, kinds, strict=True):
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and properties:
            values: list[str] = []
            for key, value in properties.items():
                rule = f"{part}_{len(values)}"
                values.append(rule)
                rules.append(f'{rule}: "{key}=" {json_of(with_definitions(value, root))}')
            needed = schema.get("required") or ()
            rules += in_order(part, values, [key in needed for key in properties], ", ")
            continue
        more = schema.get("additionalProperties", True)
        if more is False:
            rules.append(f'{part}: ""')
            continue
        rules.append(f'{part}: ({part}_any (", " {part}_any)*)?')
        rules.append(f"{part}_any: {part.upper()}_KEY {json_of(with_definitions(more, root))}")
        rules.append(f"{part.upper()}_KEY: /[a-zA-Z_][a-zA-Z0-9_]*=/")
    return rules


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
    between = words(separator, NO_SPECIALS)
    yield f"{name}: {name}_from_0"
    for index, (rule, needed) in enumerate(zip(rules, is_needed, strict=True)):
        skip = "" if needed else f" | {name}_from_{index + 1}"
        yield f"{name}_from_{index}: {rule} {name}_after_{index + 1}{skip}"
        mark = "" if needed else "?"
        if index:
            yield f"{name}_after_{index}: ({between} {rule}){mark} {name}_after_{index + 1}"
    yield f'{name}_from_{len(rules)}: ""'
    yield f'{name}_after_{len(rules)}: ""'
