"""A parser of options that says which one was likely meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

_OPTION_NAME = re.compile(r"^--\w[\w-]*(?==|$)")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as "; did you mean …?"; empty where none is near."""
    near = difflib.get_close_matches(name, sorted(known), 1, 0.7)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """One whose errors are a line: the usage of a command may be longer than a terminal."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with that line."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


def parse_args(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """As `parser.parse_args`, but for two things.

    An unknown option is refused by its own command, with the nearest. Names of options may have
    underscores for dashes, as vLLM's may.
    """
    argv = with_dashes(argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(_innermost(parser, argv), unknown)
    return args


def with_dashes(argv: Sequence[str]) -> list[str]:
    """The words, those before a lone "--" with dashes in the names of long options."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return [_OPTION_NAME.sub(_dashed, word) for word in argv[:end]] + list(argv[end:])


def _dashed(name: re.Match[str]) -> str:
    return name[0].replace("_", "-")


def _refuse(command: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Ends the process with a line about the words that a command does not know."""
    options = [option for option in command._option_string_actions if option.startswith("--")]
    words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    near = [suggestion(word, options) for word in words]
    if "--model" in options and not unknown[0].startswith("-"):
        near.append(f"; did you mean --model {unknown[0]}?")
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
