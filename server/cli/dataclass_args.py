"""Options from a dataclass: one for each field, described by its docstring."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any


def add_dataclass_args(
    group: Any,
    kind: type,
    *,
    prefix: str,
    leave_out: Collection[str] = (),
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Adds an option for each field; what is not given leaves no trace in the namespace.

    Args:
        group: a parser or a group of one.
        kind: a dataclass whose docstring describes its fields under "Attributes:".
        prefix: of the options' destinations, so that they meet no other option of the same name.
        leave_out: fields that get no option.
        aliases: field -> further spellings of its option.
    """
    descriptions = descriptions_of(kind)
    for field in dataclasses.fields(kind):
        if field.name in leave_out:
            continue
        options = ["--" + field.name.replace("_", "-"), *(aliases or {}).get(field.name, ())]
        text = descriptions.get(field.name, "").replace("%", "%%")
        if field.default is not None:
            text += f" (default: {field.default})"
        common: dict[str, Any] = {
            "dest": prefix + field.name,
            "default": argparse.SUPPRESS,
            "help": text,
        }
        value_kind = kind_of(kind, field.name)
        if value_kind is bool:
            group.add_argument(*options, action=argparse.BooleanOptionalAction, **common)
        else:
            metavar = value_kind.__name__.upper()
            group.add_argument(*options, type=value_kind, metavar=metavar, **common)


def given_args(args: argparse.Namespace, kind: type, prefix: str) -> dict[str, Any]:
    """The fields that were given, by name."""
    names = [field.name for field in dataclasses.fields(kind)]
    given = vars(args)
    return {name: given[prefix + name] for name in names if prefix + name in given}


def kind_of(kind: type, name: str) -> type:
    """The type of a field's value: int of `int | None`, str of a `Literal` of names."""
    hint = typing.get_type_hints(kind)[name]
    if typing.get_origin(hint) is typing.Literal:
        return str
    kinds = [item for item in typing.get_args(hint) or (hint,) if item is not type(None)]
    assert len(kinds) == 1, hint
    found: type = kinds[0]
    return found


def is_optional(kind: type, name: str) -> bool:
    """Whether a field may be None."""
    return type(None) in typing.get_args(typing.get_type_hints(kind)[name])


def descriptions_of(kind: type) -> dict[str, str]:
    """Field -> its entry under "Attributes:" in the class's docstring."""
    text = inspect.getdoc(kind) or ""
    entries = re.findall(
        r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", text.partition("Attributes:")[2], re.M
    )
    return {
        name: " ".join(entry.split()).rstrip(".")
        for names, entry in entries
        for name in names.split(", ")
    }
