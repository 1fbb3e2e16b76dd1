"""`octavo chat`: a conversation in the terminal, with tools whose results the user types."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_defaults import sampling_defaults
from octavo.engine.sampling_params import RequestOutputKind
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args
from octavo.server.cli.generate import sized_for
from octavo.server.cli.sampling_args import add_sampling_args, sampling_params

DEFAULTS = {"max_tokens": 512, "temperature": 0.2, "top_p": 0.9}
COMMANDS = {
    "/help": "lists these",
    "/reset": "forgets the conversation; the system message stays",
    "/system": "sets the system message to what follows it; alone, removes it",
    "/exit": "leaves, as the end of input does",
}
HINT = "/help lists what else there is to type; /exit (or end of input) leaves"


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    told = "; ".join(f"{name} {text}" for name, text in COMMANDS.items())
    parser = subparsers.add_parser(
        "chat",
        description="Talk to a model through its own chat template, with the sampling parameters "
        f"of its generation_config.json if it has some. {told}.",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--tools",
        metavar="FILE",
        type=Path,
        help="a JSON list of functions that the model may call, as OpenAI's API has them; you are "
        "asked for what each call returns",
    )
    parser.add_argument(
        "--plain", action="store_true", help="text as the model writes it, and no colours"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no prompt signs")
    add_sampling_args(parser, DEFAULTS)
    add_engine_args(parser, leave_out=("seed",))


def run(args: argparse.Namespace) -> int:
    """Talks until the user leaves; 0."""
    if (n := sampling_params(args).n) != 1:
        raise InvalidRequestError("n", n, "1 in a conversation")
    # One conversation is one row.
    config = EngineConfig(**sized_for(1, checked_engine_args(args)))
    params = sampling_params(args, sampling_defaults(config))
    from octavo.server.cli.chat_loop import Chat, read_tools_file
    from octavo.server.cli.chat_screen import open_screen
    from octavo.server.cli.conversation import Conversation

    use = None if args.tools is None else read_tools_file(args.tools)
    from octavo.engine.async_engine import AsyncEngine

    # Outside of the event loop, so that Ctrl-C ends the loading.
    engine = AsyncEngine(config, progress=not args.quiet)
    params = params.replace(output_kind=RequestOutputKind.DELTA)
    chat = Chat(engine, params, use, open_screen(is_plain=args.plain), is_quiet=args.quiet)
    asyncio.run(chat.talk(Conversation(args.system)))
    return 0
