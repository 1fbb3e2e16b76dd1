"""`octavo compile`: fills the persistent compile cache, so that a later start compiles nothing.

Builds the engines that the named uses would build, with the arguments given, and compiles all of
their programs. Run it where images are made, on the kind of device that will serve, with the
arguments that will be served with: another number of rows, tokens or pages is another program.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.server.cli.engine_args import add_engine_args, checked_engine_args
from octavo.server.cli.sizes import show_bytes

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.engine.execution.programs.compile_manager import CompileStats
    from octavo.engine.execution.step_spec import StepShape

USES = ("serve", "batch", "prompt")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "compile", help="fill the compile cache ahead", description=__doc__
    )
    parser.add_argument(
        "--for",
        dest="uses",
        action="append",
        choices=USES,
        help="what will start: `octavo serve` and AsyncEngine, LLM and large batches, or "
        "`octavo generate` with one prompt or a few; may be repeated (default: serve)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_args(parser, leave_out=("warm_up",))


def run(args: argparse.Namespace) -> int:
    """Compiles; 0.

    Raises:
        InvalidConfigError: there is no cache to fill.
    """
    arguments = checked_engine_args(args)
    from octavo.engine.errors import InvalidConfigError
    from octavo.engine.execution.programs.compile_cache import (
        cache_counts,
        open_compile_cache,
    )
    from octavo.engine.replicas.shares import own_cores

    begun_s, cores = time.perf_counter(), own_cores()
    directory = _configs("serve", arguments)[0].resolved_compile_cache_dir()
    cache = open_compile_cache(directory)
    if cache.directory is None:
        raise InvalidConfigError(
            "compile_cache_dir", directory or "", "a folder to fill that no other user can write to"
        )
    programs = []
    counts = cache_counts()
    for use in dict.fromkeys(args.uses or USES[:1]):
        for config in _configs(use, arguments):
            stats, num_pages = _compile(config, cores, show=not args.json)
            programs += [
                {
                    "use": use,
                    "program": name,
                    "seconds": round(seconds, 3),
                    "from_cache": name in stats.from_cache,
                    "num_kv_pages": num_pages,
                }
                for name, seconds in stats.seconds.items()
            ]
    num_bytes = cache.num_bytes
    report = {
        "directory": cache.directory,
        "bytes": num_bytes,
        "num_compiled": counts.num_compiled,
        "num_from_cache": counts.num_hits,
        "seconds": round(time.perf_counter() - begun_s, 3),
        "programs": programs,
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"{counts.num_compiled} programs compiled, {counts.num_hits} were there, small ones "
            f"counted: {report['seconds']:.1f} s; {show_bytes(num_bytes)} in {cache.directory}"
        )
    return 0


def _configs(use: str, arguments: dict[str, Any]) -> list[EngineConfig]:
    """The configuration of each engine that a use may build."""
    from octavo.engine.config import OFFLINE_BATCHED_TOKENS
    from octavo.engine.engine_arguments import engine_config
    from octavo.server.cli.generate import sized_for

    if use == "prompt":
        return [engine_config(None, sized_for(1, arguments))]
    config = engine_config(None, {"warm_up": "full"} | arguments)
    return [config.with_token_budget(OFFLINE_BATCHED_TOKENS) if use == "batch" else config]


def _compile(config: EngineConfig, cores: Sequence[int], *, show: bool) -> tuple[CompileStats, int]:
    """Builds one engine, telling of each program; its stats, and the pages it was built for.

    Args:
        cores: all of the host's that replicas share.
    """
    from octavo.engine.engine import Engine
    from octavo.engine.replicas.shares import make_starts
    from octavo.engine.replicas.worker import build

    def tell(program: str, seconds: float, from_cache: bool, done: int, total: int) -> None:
        state = "from the cache" if from_cache else "compiled"
        print(f"{done:3}/{total}  {program:32} {seconds:7.2f} s  {state}", flush=True)

    listener = tell if show else None
    if config.data_parallel_size > 1:  # all replicas run the same programs, which are of a part
        engine = build(make_starts(config, cores)[0], listener)
    else:
        engine = Engine(config, on_program=listener)
    executor, stats = engine.executor, engine.executor.programs.stats

    def tell_rest(shape: StepShape) -> None:
        name, total = str(shape), len(executor.lattice.shapes)
        if show:
            tell(name, stats.seconds[name], name in stats.from_cache, len(stats.seconds), total)

    try:
        if config.warm_up == "full":  # whoever starts early begins with others
            executor.programs.warm_up(executor.lattice.shapes, tell_rest)
        return stats, engine.limits.num_pages
    finally:
        engine.close()
