"""`octavo serve`: a model over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import logging
from typing import TYPE_CHECKING, Any

from octavo.server.cli.engine_args import add_engine_args, engine_args

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "serve",
        description="Serve a model over gRPC. Prints one line with the bound address when ready. "
        "SIGTERM or SIGINT drains, a second one stops at once.",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: %(default)s)"
    )
    parser.add_argument(
        "--grpc-port", type=int, default=50051, help="0 takes a free port (default: %(default)s)"
    )
    parser.add_argument(
        "--max-message-bytes", type=int, default=4 * 1024 * 1024,
        help="largest request accepted (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--drain-s", type=float, default=30.0,
        help="seconds that requests in flight get to finish (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error"),
        help="(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--record", metavar="FILE",
        help="write every request, plan and result there, for `octavo simulate --replay`; "
        "it holds prompts",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_engine_args(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until told to stop; 0."""
    from octavo.engine.config import EngineConfig
    from octavo.server.serve import ServeConfig, serve

    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    engine_config = EngineConfig(**engine_args(args))
    config = ServeConfig(
        host=args.host,
        grpc_port=args.grpc_port,
        max_message_bytes=args.max_message_bytes,
        drain_s=args.drain_s,
    )

    def make_engine() -> AsyncEngine:
        from octavo.engine.async_engine import AsyncEngine

        engine = AsyncEngine(engine_config, progress=not args.quiet)
        if args.record is not None:
            from octavo.engine.event_log import start_log

            start_log(engine.engine.core, engine_config, args.record)
        return engine

    asyncio.run(serve(make_engine, config, announce=_announce))
    return 0


def _announce(address: str, engine: AsyncEngine) -> None:
    print(f"octavo: serving {engine.model_name} over gRPC on {address}", flush=True)
