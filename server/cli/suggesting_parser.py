"""A parser of options that says which one was likely meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as "; did you mean …?"; empty where none is near."""
    near = difflib.get_close_matches(name, sorted(known), 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


def parse_args(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """As `parser.parse_args`; an unknown option is refused by its own command, with the nearest."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(_innermost(parser, argv), unknown)
    return args


def _refuse(command: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Ends the process with a line about the words that a command does not know."""
    options = [option for option in command._option_string_actions if option.startswith("--")]
    words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    near = [suggestion(word, options) for word in words]
    command.error(f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, near), '')}")


def _innermost(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that the words name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            named = next((word for word in argv if word in action.choices), None)
            if named is not None:
                rest = argv[list(argv).index(named) + 1 :]
                found: argparse.ArgumentParser = action.choices[named]
                return _innermost(found, rest)
    return parser
