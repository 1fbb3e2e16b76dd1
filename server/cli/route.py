"""`octavo route`: a front over servers elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.server.cli.dataclass_args import add_dataclass_args, given_args
from octavo.server.cli.vllm_options import ALIASES

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

_PREFIX = "setting_"
CHAT_OPTIONS = ("chat_template", "tool_call_parser", "reasoning_parser")
TIMEOUT_S, MOST_TIMEOUT_S = 10.0, 3600.0


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    from octavo.engine.config import DEFAULT_ROUTER
    from octavo.server.logs import LogConfig
    from octavo.server.serve_config import ServeConfig

    parser = subparsers.add_parser(
        "route",
        description="Serve over gRPC and HTTP what other Octavo servers generate. Each request "
        "goes to the server that has done with it first, and on to another if that one dies "
        "or goes away: its reader sees a pause.",
    )  # fmt: skip
    parser.add_argument(
        "--backend", metavar="HOST:PORT", action="append", default=[], required=True,
        help="gRPC address of a server; given once for each. dns:NAME:PORT is every address of a "
        "name, file:PATH a file with one a line, and ray:NAME what `octavo deploy` runs: they are "
        "looked at again every 2 s",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODEL", required=True,
        help="folder with the model's config.json and tokenizer, a GGUF file, or the name of a "
        "packaged model; no weights are read",
    )  # fmt: skip
    for option in CHAT_OPTIONS:
        words = option.replace("_", " ")
        parser.add_argument(
            f"--{option.replace('_', '-')}", metavar="NAME", help=f"{words}, as of `octavo serve`"
        )
    parser.add_argument(
        "--router", metavar="NAME", default=DEFAULT_ROUTER,
        help="which server takes a request: least_work (that has done with it first), forecast "
        "(where it is in time at the least harm), round_robin, power_of_two or prefix_affinity, "
        "with parameters if need be "
        f"({DEFAULT_ROUTER})",
    )  # fmt: skip
    parser.add_argument(
        "--backend-token-file", metavar="FILE", help="its first line is shown to the servers"
    )
    parser.add_argument(
        "--backend-ca", metavar="FILE",
        help="certificates that sign the servers', PEM; without, they are spoken to in plain text",
    )  # fmt: skip
    parser.add_argument(
        "--backend-timeout-s", metavar="S", type=float, default=TIMEOUT_S,
        help=f"seconds without a word after which a server is taken for lost ({TIMEOUT_S:.0f})",
    )  # fmt: skip
    serving = parser.add_argument_group("serving")
    add_dataclass_args(serving, ServeConfig, prefix=_PREFIX, aliases=ALIASES)
    add_dataclass_args(parser.add_argument_group("logging"), LogConfig, prefix=_PREFIX)


def run(args: argparse.Namespace) -> int:
    """Serves until told to stop; 0."""
    from octavo.engine.errors import InvalidConfigError
    from octavo.engine.routing.policies import get_live_policy
    from octavo.server.auth import first_token
    from octavo.server.cli.serve import serve_until_told
    from octavo.server.event_loop import new_event_loop
    from octavo.server.logs import LogConfig, start_logging
    from octavo.server.route.membership import Membership
    from octavo.server.serve_config import ServeConfig

    serve_config = ServeConfig(**given_args(args, ServeConfig, _PREFIX))
    log_config = LogConfig(**given_args(args, LogConfig, _PREFIX))
    if serve_config.kv_events:
        allowed = "false at a front, which has no cache: given to its servers"
        raise InvalidConfigError("kv_events", True, allowed)
    membership = Membership(args.backend)
    get_live_policy(args.router, "router")
    if not 0 < args.backend_timeout_s <= MOST_TIMEOUT_S:
        allowed = f"more than 0, at most {MOST_TIMEOUT_S:.0f} seconds"
        raise InvalidConfigError("backend_timeout_s", args.backend_timeout_s, allowed)
    path = args.backend_token_file
    token = None if path is None else first_token(path, "backend_token_file")
    ca = _file("backend_ca", args.backend_ca)
    start_logging(log_config)

    def make_engine() -> AsyncEngine:
        import grpc

        from octavo.engine.async_engine import AsyncEngine
        from octavo.server.route.backend import Backend
        from octavo.server.route.routed_engine import RoutedEngine

        credentials = None if ca is None else grpc.ssl_channel_credentials(ca)
        backend = Backend(target="", token=token, credentials=credentials)
        chat = {name: getattr(args, name) for name in CHAT_OPTIONS}
        engine = RoutedEngine(
            args.model,
            membership,
            backend,
            runner.get_loop(),
            timeout_s=args.backend_timeout_s,
            router=args.router,
            **chat,
        )
        engine.prepare_grammars()
        return AsyncEngine(engine=engine)

    # Seconds, in which Ctrl-C is to end the process: a runner would put it off.
    importlib.import_module("octavo.server.serve")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve_until_told(make_engine, serve_config, log_config))
    return 0


def _file(name: str, path: str | None) -> bytes | None:
    from octavo.engine.errors import InvalidConfigError

    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfigError(name, path, f"a file that can be read ({error})") from None
