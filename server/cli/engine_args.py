"""Engine arguments as options: one for each field of EngineConfig, with its own description.

As for `octavo serve`, what is not given as an option is taken from the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Collection
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.early_checks import check_early
from octavo.engine.process.own_process import prepare_to_compute
from octavo.server.cli.dataclass_args import add_dataclass_args, given_args
from octavo.server.cli.settings import read_environment
from octavo.server.cli.vllm_options import ENGINE_ALIASES, add_vllm_options, check_vllm_options

_PREFIX = "engine_"


def add_engine_args(parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()) -> None:
    """Adds an option for each engine argument; what is not given keeps EngineConfig's default.

    Args:
        leave_out: fields that get no option (a request's own --seed takes the engine's place).
    """
    group = parser.add_argument_group("engine arguments")
    add_dataclass_args(
        group, EngineConfig, prefix=_PREFIX, leave_out=leave_out, aliases=ENGINE_ALIASES
    )
    add_vllm_options(group)
    parser.set_defaults(engine_args_left_out=frozenset(leave_out))


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments that were given, by name: as options, or else in the environment.

    Raises:
        InvalidConfigError: a variable's text is no value of its setting, or an option of vLLM asks
            for what is not served.
    """
    check_vllm_options(args)
    names = {field.name for field in dataclasses.fields(EngineConfig)} - args.engine_args_left_out
    heard = read_environment(os.environ, dict.fromkeys(names, EngineConfig))
    return heard | given_args(args, EngineConfig, _PREFIX)


def checked_engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """As `engine_args`, for a command that builds an engine of them.

    What cannot work at all is refused before JAX is imported. The process is the command's own,
    and is made ready for the engine to compute in.

    Raises:
        InvalidConfigError: as for `engine_args`, or a value that cannot work.
        ModelLoadError: there is no such model.
    """
    given = engine_args(args)
    config = EngineConfig(**given)
    check_early(config)
    if config.data_parallel_size == 1:  # replicas' workers see to themselves
        prepare_to_compute(os.environ)
    return given
