"""docs/api.md, written from the public names, their signatures and their docstrings.

Run `python -m octavo.server.cli.api_reference > docs/api.md` after changing one.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = ("octavo", "octavo.client")
"""Modules whose `__all__` is public."""
WIDTH = 96
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_HEAD = """# Python interface

What `octavo` and `octavo.client` export; everything else may change without notice. The gRPC
interface is in [grpc.md](grpc.md), HTTP in [http.md](http.md), settings in
[settings.md](settings.md).

This page is generated: `python -m octavo.server.cli.api_reference > docs/api.md`.
"""


def render() -> str:
    """The page."""
    lines = [_HEAD]
    shown: dict[Any, str] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        lines += [f"## {name}", ""]
        for public in sorted(public_names(module), key=str.lower):
            item, path = getattr(module, public), f"{name}.{public}"
            if item in shown:
                lines += [f"### {path}", "", f"The same class as `{shown[item]}`: see there.", ""]
            else:
                lines += _entry(path, item)
            shown.setdefault(item, path)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def public_names(module: ModuleType) -> tuple[str, ...]:
    """Classes and functions that a module exports."""
    return tuple(
        name
        for name in module.__all__
        if inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name))
    )


def _entry(path: str, item: Any) -> list[str]:
    lines = [f"### {path}", ""]
    if not inspect.isclass(item):
        return [*lines, *_code(path.rpartition(".")[2], item), *_text(item)]
    if issubclass(item, Exception):
        own = "__init__" in vars(item)
        return [*lines, *(_code(item.__name__, item) if own else ()), *_text(item)]
    if issubclass(item, enum.Enum):
        return [*lines, *_text(item), *(f"- `{member.name}`" for member in item), ""]
    lines += [*_code(item.__name__, item), *_text(item)]
    for name, method in _methods(item):
        lines += [f"#### {item.__name__}.{name}", ""]
        if isinstance(method, property):
            lines += ["A property.", "", *_text(method)]
        else:
            lines += [*_code(name, method), *_text(method)]
    return lines


def _methods(item: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that say what they do, in the source's order; then
    those that it inherits from Octavo's own classes."""
    members: dict[str, Any] = {}
    for base in item.__mro__:
        if base.__module__.startswith("octavo."):
            members = members | {
                name: value for name, value in vars(base).items() if name not in members
            }
    for name, value in members.items():
        method = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_shown = inspect.isfunction(method) or isinstance(method, property)
        if is_shown and not name.startswith("_") and inspect.getdoc(method):
            yield name, method


def _code(name: str, item: Any) -> list[str]:
    """The signature as a block of code."""
    signature = inspect.signature(item)
    parameters = [
        re.sub(r"<(\w+\.\w+): .*?>", r"\1", re.sub(r": '([^']*)'", r": \1", str(parameter)))
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    kinds = [p.kind for p in signature.parameters.values() if p.name not in ("self", "cls")]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = signature.return_annotation
    text = "" if result is signature.empty or inspect.isclass(item) else f" -> {result}"
    prefix = "async " if inspect.iscoroutinefunction(item) else ""
    line = f"{prefix}{name}({', '.join(parameters)}){text}"
    if len(line) > WIDTH:
        inner = "".join(f"    {parameter},\n" for parameter in parameters)
        line = f"{prefix}{name}(\n{inner}){text}"
    return ["```text", *line.split("\n"), "```", ""]


def _text(item: Any) -> list[str]:
    """The docstring: paragraphs as they are, sections as lists."""
    lines: list[str] = []
    section = None
    for line in (inspect.getdoc(item) or "").split("\n"):
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            section = line.rstrip(":")
            lines += [f"**{section}**", ""]
        elif section is None or not line.startswith("    "):
            section = None if line else section
            lines.append(line)
        elif not line.startswith("     "):
            head, colon, rest = line.strip().partition(": ")
            is_named = colon and section in ("Args", "Attributes", "Raises")
            lines.append(f"- `{head}`: {rest}" if is_named else f"- {line.strip()}")
        else:
            lines.append(f"  {line.strip()}")
    return [*lines, ""]


if __name__ == "__main__":
    print(render(), end="")
