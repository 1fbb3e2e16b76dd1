"""Engine arguments as options: one for each field of EngineConfig, with its own description."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Collection
from typing import Any

from octavo.engine.config import EngineConfig

_PREFIX = "engine_"
"""Of the options' destinations, so that they meet no other option of the same name."""


def add_engine_args(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Adds an option for each engine argument; what is not given keeps EngineConfig's default.

    Args:
        leave_out: fields that get no option (a request's own --seed takes the engine's place).
    """
    group = parser.add_argument_group("engine arguments")
    descriptions = _descriptions()
    kinds = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name in leave_out:
            continue
        option = "--" + field.name.replace("_", "-")
        text = descriptions.get(field.name, "").replace("%", "%%")
        if field.default is not None:
            text += f" (default: {field.default})"
        common: dict[str, Any] = {
            "dest": _PREFIX + field.name,
            "default": argparse.SUPPRESS,
            "help": text,
        }
        if kinds[field.name] is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, **common)
        else:
            kind = _kind(kinds[field.name])
            metavar = kind.__name__.upper()
            group.add_argument(option, type=kind, metavar=metavar, **common)


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments that were given, by name."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    given = vars(args)
    return {name: given[_PREFIX + name] for name in names if _PREFIX + name in given}


def _kind(hint: Any) -> type:
    """int of `int | None`, str of a `Literal` of names."""
    if typing.get_origin(hint) is typing.Literal:
        return str
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    assert len(kinds) == 1, hint
    kind: type = kinds[0]
    return kind


def _descriptions() -> dict[str, str]:
    """Field -> its entry under "Attributes:" in EngineConfig's docstring."""
    text = inspect.getdoc(EngineConfig) or ""
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text.partition("Attributes:")[2], re.M)
    return {name: " ".join(entry.split()).rstrip(".") for name, entry in entries}
