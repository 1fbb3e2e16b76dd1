"""Arguments that mean something beside another one alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from octavo.engine.errors import InvalidConfigError


def check_left_out(
    args: argparse.Namespace, add_args: Callable[[argparse.ArgumentParser], None], with_: str
) -> None:
    """Refuses arguments that would be ignored.

    Args:
        args: what was given.
        add_args: adds them to a parser.
        with_: the option that they need, which was not given.

    Raises:
        InvalidConfigError: names the first of them that differs from its default.
    """
    parser = argparse.ArgumentParser()
    add_args(parser)
    for name, default in vars(parser.parse_args([])).items():
        if getattr(args, name) != default:
            raise InvalidConfigError(name, getattr(args, name), f"given with {with_} alone")
