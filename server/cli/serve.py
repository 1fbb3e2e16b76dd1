"""`octavo serve`: a model over gRPC and HTTP."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.hosts.hosts_config import HostsConfig
from octavo.server.cli.dataclass_args import add_dataclass_args, given_args
from octavo.server.cli.vllm_options import (
    ALIASES,
    ENGINE_ALIASES,
    add_vllm_options,
    check_vllm_options,
)
from octavo.server.event_loop import new_event_loop

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.logs import LogConfig
    from octavo.server.serve import Addresses
    from octavo.server.serve_config import ServeConfig

_PREFIX = "setting_"
_ALIASES = {"drain_timeout_s": ("--drain-timeout", "--drain-s")} | ALIASES
CONFIG_VARIABLE = "OCTAVO_CONFIG"


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    from octavo.server.logs import LogConfig
    from octavo.server.serve_config import ServeConfig

    parser = subparsers.add_parser(
        "serve",
        description="Serve a model over gRPC and, with --http-port, over OpenAI's HTTP API. Prints "
        "a line with each bound address when ready. SIGTERM or SIGINT drains, a second one stops "
        "at once. Every setting may also stand in the environment (OCTAVO_MAX_NUM_SEQS for "
        "--max-num-seqs) and in a YAML file (max_num_seqs); an option goes before the environment, "
        "the environment before the file.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--record", metavar="FILE",
        help="write every request, plan and result there, for `octavo simulate --replay`; "
        "it holds prompts",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    serving = parser.add_argument_group("serving")
    add_dataclass_args(serving, ServeConfig, prefix=_PREFIX, aliases=_ALIASES)
    add_dataclass_args(parser.add_argument_group("logging"), LogConfig, prefix=_PREFIX)
    engine = parser.add_argument_group("engine")
    add_dataclass_args(engine, EngineConfig, prefix=_PREFIX, aliases=ENGINE_ALIASES)
    add_vllm_options(engine)
    add_dataclass_args(parser.add_argument_group("several hosts"), HostsConfig, prefix=_PREFIX)


def run(args: argparse.Namespace) -> int:
    """Serves until told to stop, or follows a leader until it ends; 0."""
    from octavo.engine.config import of_one_engine
    from octavo.engine.early_checks import check_early
    from octavo.engine.process.own_process import prepare_to_compute
    from octavo.server.cli.settings import SECTIONS, read_settings
    from octavo.server.logs import start_logging

    given: dict[str, Any] = {}
    for kind in SECTIONS:
        given |= given_args(args, kind, _PREFIX)
    if args.model is not None and given.setdefault("model", args.model) != args.model:
        raise InvalidConfigError(
            "MODEL", args.model, f"one model, not --model {given['model']} too"
        )
    settings = read_settings(given, os.environ, args.config or os.environ.get(CONFIG_VARIABLE))
    start_logging(settings.log)
    check_vllm_options(args)
    check_early(settings.engine)
    of_one_engine(settings.engine, "record", args.record)
    for name in ("otlp_traces_endpoint", "profile_dir", "kv_events"):
        of_one_engine(settings.engine, name, getattr(settings.serve, name) or None)

    place = settings.hosts.found(os.environ, settings.engine.tensor_parallel_size)
    if place.is_group:
        of_one_engine(settings.engine, "num_hosts", place.num_hosts)
        place.token()
    if not place.is_leader:
        from octavo.engine.hosts.group import follow

        prepare_to_compute(os.environ)
        follow(place, settings.engine)
        return 0

    def make_engine() -> AsyncEngine:
        from octavo.engine.async_engine import AsyncEngine

        if settings.engine.data_parallel_size == 1:  # replicas' workers see to themselves
            prepare_to_compute(os.environ)
        if place.is_group:
            from octavo.engine.hosts.group import leading_engine

            engine = leading_engine(place, settings.engine, progress=not args.quiet)
        else:
            engine = AsyncEngine(settings.engine, progress=not args.quiet)
        engine.engine.prepare_grammars()
        if args.record is not None:
            from octavo.engine.any_engine import engine_of_this_process
            from octavo.engine.observability.event_log import start_log

            recorded = engine_of_this_process(engine.engine, "record", args.record)
            start_log(recorded.core, settings.engine, args.record)
        return engine

    # Seconds, in which Ctrl-C is to end the process: a runner would put it off.
    importlib.import_module("octavo.server.serve")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve_until_told(make_engine, settings.serve, settings.log))
    return 0


async def serve_until_told(
    make_engine: Callable[[], AsyncEngine], config: ServeConfig, log: LogConfig
) -> None:
    """Serves what `make_engine` makes until told to stop."""
    from octavo.server.serve import Ending, serve

    ending = await serve(make_engine, config, announce=_announce, log_prompts=log.log_prompts)
    if ending is not Ending.WHOLE:
        # A thread in a step or in the compiler would keep the interpreter from exiting, too.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1 if ending is Ending.HANGING else 0)


def _announce(addresses: Addresses, engine: AsyncEngine) -> None:
    lines = [f"octavo: serving {engine.model_name} over gRPC on {addresses.grpc}"]
    if addresses.http is not None:
        lines.append(f"octavo: serving {engine.model_name} over HTTP on {addresses.http}")
    print("\n".join(lines), flush=True)
