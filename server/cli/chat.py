"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args
from octavo.server.cli.generate import sized_for
from octavo.server.cli.sampling_args import add_sampling_args, sampling_params

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

DEFAULTS = {"max_tokens": 512, "temperature": 0.2, "top_p": 0.9}
HELP = "/reset forgets the conversation, /exit (or end of input) leaves"


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "chat", description=f"Talk to a model through its own chat template. {HELP}."
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no prompt signs")
    add_sampling_args(parser, DEFAULTS)
    add_engine_args(parser, leave_out=("seed",))


def run(args: argparse.Namespace) -> int:
    """Talks until the user leaves; 0."""
    params = sampling_params(args)
    if params.n != 1:
        raise InvalidRequestError("n", params.n, "1 in a conversation")
    # One conversation is one row.
    arguments = sized_for(1, checked_engine_args(args))
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.config import EngineConfig

    # Outside of the event loop, so that Ctrl-C ends the loading.
    engine = AsyncEngine(EngineConfig(**arguments), progress=not args.quiet)
    asyncio.run(_chat(engine, args, params.replace(output_kind=RequestOutputKind.DELTA)))
    return 0


class Conversation:
    """The messages so far, and how they become a prompt that fits.

    Args:
        system: the system message, or None.
    """

    def __init__(self, system: str | None) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self._turns.clear()

    def say(self, role: str, content: str) -> None:
        """Appends a turn."""
        self._turns.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Drops the newest turn, which got no answer."""
        self._turns.pop()

    def prompt(self, tokenizer: Any, max_tokens: int) -> list[int]:
        """Token ids of the prompt; the oldest turns are forgotten until they fit `max_tokens`.

        Raises:
            InvalidRequestError: the newest turn alone does not fit, or the model has no template.
        """
        for first in range(0, len(self._turns), 2):
            kept = self._turns[first:]
            token_ids: list[int] = tokenizer.encode_chat([*self._system, *kept])
            if len(token_ids) <= max_tokens:
                self._turns = kept
                return token_ids
        raise InvalidRequestError(
            "message", f"{len(token_ids)} tokens", f"at most {max_tokens} tokens"
        )


async def _chat(engine: AsyncEngine, args: argparse.Namespace, params: SamplingParams) -> None:
    conversation = Conversation(args.system)
    await engine.start()
    try:
        if not args.quiet:
            print(HELP, file=sys.stderr)
        while (line := await _read_line(args.quiet)) is not None:
            if line == "/reset":
                conversation.reset()
            elif line:
                try:
                    await _turn(engine, conversation, line, params)
                except InvalidRequestError as error:
                    print(f"octavo: {error}", file=sys.stderr)
    finally:
        await engine.shutdown()


async def _turn(
    engine: AsyncEngine, conversation: Conversation, line: str, params: SamplingParams
) -> None:
    """One question and its answer, printed as it comes."""
    # The answer gets what it may take, but never more than half of the context.
    answer = min(params.max_tokens or engine.max_model_len, engine.max_model_len // 2)
    conversation.say("user", line)
    try:
        prompt = conversation.prompt(engine.tokenizer, engine.max_model_len - answer)
        parts: list[str] = []
        params = params.replace(max_tokens=answer)
        stream: Any = engine.generate(prompt, params)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                parts.append(output.outputs[0].text)
                print(parts[-1], end="", flush=True)
    except BaseException:
        conversation.take_back()
        raise
    print(flush=True)
    conversation.say("assistant", "".join(parts))


async def _read_line(quiet: bool) -> str | None:
    """The user's next line, or None when there are no more."""
    if not quiet and sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = await asyncio.to_thread(sys.stdin.readline)
    text = line.strip()
    return None if not line or text == "/exit" else text
