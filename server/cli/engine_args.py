"""Engine arguments as options: one for each field of EngineConfig, with its own description."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.server.cli.dataclass_args import add_dataclass_args, given_args

_PREFIX = "engine_"


def add_engine_args(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Adds an option for each engine argument; what is not given keeps EngineConfig's default.

    Args:
        leave_out: fields that get no option (a request's own --seed takes the engine's place).
    """
    group = parser.add_argument_group("engine arguments")
    add_dataclass_args(group, EngineConfig, prefix=_PREFIX, leave_out=leave_out)


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments that were given, by name."""
    return given_args(args, EngineConfig, _PREFIX)
