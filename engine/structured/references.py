"""References of a schema that lead back to themselves with nothing in between.

`{"$ref": "#"}` says of a value that it is what it is. No value can be told from another by it, and
the library that makes grammars of schemas computes a mask for ever where it meets one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_SAME_VALUE = ("allOf", "anyOf", "oneOf")
"""Lists of schemas of one and the same value."""


def endless_reference(schema: Any) -> str | None:
    """A reference that leads back to itself through schemas of one value; None if there is none.

    A schema that refers to itself from a property or an item is good: a value lies in between.

    Args:
        schema: as JSON gives it.
    """
    nodes = list(_objects(schema))
    if not any("$ref" in node for node in nodes):
        return None
    anchors = {node["$anchor"]: node for node in nodes if isinstance(node.get("$anchor"), str)}
    base = schema.get("$id") if isinstance(schema, Mapping) else None
    done: set[int] = set()

    def parts(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        return _of_the_same_value(node, schema, anchors, base)

    return next(filter(None, (_cycle_from(node, parts, done) for node in nodes)), None)


def _cycle_from(
    node: Mapping[str, Any],
    parts: Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]],
    done: set[int],
) -> str | None:
    """The name of a part that leads back; depth first, and without recursion: chains may be long.

    Args:
        parts: named parts of a schema.
        done: schemas that lead nowhere back; those that are found are added.
    """
    if id(node) in done:
        return None
    path = {id(node)}
    stack = [(node, parts(node))]
    while stack:
        last, rest = stack[-1]
        name, part = next(rest, ("", None))
        if part is None:
            path.discard(id(last))
            done.add(id(last))
            stack.pop()
        elif id(part) in path:
            return name
        elif id(part) not in done:
            path.add(id(part))
            stack.append((part, parts(part)))
    return None


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object of a JSON value."""
    rest = [schema]
    while rest:
        item = rest.pop()
        if type(item) is dict:
            yield item
            rest += item.values()
        elif type(item) is list:
            rest += item


def _of_the_same_value(
    node: Mapping[str, Any], root: Any, anchors: Mapping[str, Any], base: object
) -> Iterator[tuple[str, Any]]:
    """Schemas that a schema's value has to match, too, each with a name for it."""
    reference = node.get("$ref")
    if isinstance(reference, str):
        target = _target(reference, root, anchors, base)
        if isinstance(target, Mapping):
            yield reference, target
    for name in _SAME_VALUE:
        parts = node.get(name)
        if isinstance(parts, list | tuple):
            for part in parts:
                if isinstance(part, Mapping):
                    yield name, part


def _target(reference: str, root: Any, anchors: Mapping[str, Any], base: object) -> Any:
    """What a reference points at; None if that is not in the schema."""
    if isinstance(base, str) and base:
        reference = reference.removeprefix(base.removesuffix("#")) or "#"
    if not reference.startswith("#"):
        return None
    pointer = unquote(reference[1:])
    if not pointer.startswith("/"):
        return anchors.get(pointer) if pointer else root
    target = root
    for part in pointer[1:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(key)
        elif isinstance(target, list | tuple) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            return None
    return target
