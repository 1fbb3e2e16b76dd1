"""Entry point of the `octavo` command.

A subcommand is a module of this package with ``add_parser(subparsers)``, which adds its parser, and
``run(args) -> int``, which does it and returns the exit status. Only the module of the command that
was asked for is imported, so that `octavo --help` is quick. A module of a command imports JAX and
the engine inside `run`, so that its own help and its argument errors are quick too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from octavo import __version__
from octavo.engine.errors import InvalidConfigError, InvalidRequestError, OctavoError
from octavo.server.cli.suggesting_parser import Parser, parse_args, suggestion

COMMANDS = {
    "generate": "generate text from prompts",
    "chat": "talk to a model",
    "serve": "serve a model over gRPC and HTTP",
    "route": "serve what other servers generate, and go on elsewhere if one dies",
    "deploy": "run servers of a model on a Ray cluster",
    "compile": "fill the compile cache ahead, for images",
    "admin": "drain a server, flush its cache, profile it, trace its schedule",
    "convert": "write a checkpoint of the same numbers, faster to open or smaller",
    "models": "list packaged models and supported architectures",
    "plan": "size KV cache and memory from a model's config alone",
    "bench": "measure throughput and goodput",
    "simulate": "play traffic through the scheduler under a virtual clock",
    "profile": "measure this machine for simulations of it",
    "tune": "measure block sizes of attention on this device",
}
"""Command -> its line in the help; module `octavo.server.cli.<command>`."""

BAD_ARGUMENTS = 2
FAILED = 1
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns: the exit status: 2 for bad arguments, 1 for what else went wrong, 0 if all is well.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    module = importlib.import_module(f"{__package__}.{chosen}") if chosen in COMMANDS else None
    parser = Parser(prog="octavo", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    if chosen is not None and chosen not in COMMANDS:
        near = suggestion(chosen, COMMANDS) or f": one of {', '.join(COMMANDS)}"
        parser.error(f"unknown command {chosen!r}{near}")
    for name, summary in COMMANDS.items():
        if module is not None and name == chosen:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    args = parse_args(parser, argv)
    assert module is not None, args
    try:
        return int(module.run(args) or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; Python must not complain again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if os.environ.get("OCTAVO_DEBUG") == "1":
            raise
        return _report(error)


def _report(error: Exception) -> int:
    """One line on stderr; the exit status."""
    if isinstance(error, (OctavoError, OSError)):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error} (OCTAVO_DEBUG=1 shows where)"
    print(f"octavo: error: {' '.join(text.split())}", file=sys.stderr)
    bad = isinstance(error, (InvalidConfigError, InvalidRequestError, OSError))
    return BAD_ARGUMENTS if bad else FAILED


def entry() -> NoReturn:
    """Runs the process's command, and ends the process.

    One that was interrupted ends at once: threads that compile, or that read a line, would keep the
    interpreter from exiting.
    """
    status = main()
    if status == INTERRUPTED:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    entry()
