"""Calls of agents' tools that a grammar binds, in every format of calls.

    python -m benchmarks.tool_calls                       all formats, a third of the tools for each
    python -m benchmarks.tool_calls --formats hermes --every 1
    python -m benchmarks.tool_calls --short               a tiny model that writes at random

For each format a live server of the packaged model, told to write calls like that.
`agent_tools.jsonl` holds tools as agents have them. Each call is asked for twice, streamed and not,
in turns by chats, Messages and Responses, by name, `required`, among tools of like names, as an
allowed one, and with several calls in a turn. Every call that the length did not cut off has to
match its schema, and the stream's pieces joined have to be the whole answer. Fails (status 1) where
one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from benchmarks.machine import about_machine
from benchmarks.tiny_server import serving, write_tiny_model
from benchmarks.tool_calls.asking import CHOICES, PATHS, Ask, Turn, streamed, whole
from octavo.engine.text.assistant.formats import FORMATS

TOOLS_FILE = Path(__file__).with_name("agent_tools.jsonl")
TEMPLATE = """\
{%- if tools %}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
"""Leaves the tools out: whether a call is the right one is not asked, and prompts are short."""
AT_ONCE = 8
TIMEOUT_S = 600
ARGS = (
    *("--max-num-seqs", "16", "--no-fail-on-compile"),
    *("--num-kv-pages", "2000", "--max-num-batched-tokens", "256", "--warm-up", "few"),
    *("--reasoning-parser", "qwen3", "--max-model-len", "1024"),
)
PACKAGED = ("--model", "smollm2-135m")
ENDS = "\"'}])<\n"
"""What ends strings and other values, made likelier for a model that writes at random."""
BIAS = 8.0
UNBOUND = frozenset({"openai"})
"""Formats whose special tokens these vocabularies have not: they bind no calls."""


def read_tools() -> list[dict[str, Any]]:
    """The agents' tools."""
    return [json.loads(line) for line in TOOLS_FILE.read_text().splitlines()]


def asks_of(tools: Sequence[dict[str, Any]], first: int, every: int) -> list[Ask]:
    """The calls to ask for, each API and choice in turns.

    Args:
        first: the first tool; formats begin with others.
        every: one of so many tools is asked for.
    """
    made = []
    ways = list(itertools.product(PATHS, CHOICES))
    for index, number in enumerate(range(first % every, len(tools), every)):
        # The step shares no factor with the number of ways: a format goes through all of them.
        api, choice = ways[(first + 4 * index) % len(ways)]
        name = tools[number]["name"]
        offered = [tools[number]]
        if choice != "required":
            # Names that begin alike, with another tool's parameters.
            other = tools[(number + 1) % len(tools)]
            offered += [{**other, "name": f"{name}_all"}, {**other, "name": f"{name[:2]}_"}]
        seed = first + number
        made.append(Ask(api, choice, offered, seed, thinks=seed % 4 == 0))
    return made


def faults_of(turn: Turn, ask: Ask) -> list[str]:
    """What is wrong with a turn. A call that the length cut off counts for nothing."""
    calls = turn.calls[:-1] if turn.is_cut else turn.calls
    known = {each["name"]: each.get("parameters", {}) for each in ask.tools}
    if ask.choice == "named" or (ask.choice == "allowed" and ask.api != "Messages"):
        known = {ask.tools[0]["name"]: known[ask.tools[0]["name"]]}
    found = []
    if turn.content.strip() and not turn.is_cut:
        found.append(f"words beside calls: {turn.content!r}")
    if not turn.is_cut and not calls:
        found.append("no call")
    if len(calls) > 1 and ask.choice != "parallel":
        found.append(f"{len(calls)} calls")
    for name, arguments in calls:
        try:
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            schema = {**known[name], "type": "object"}
            jsonschema.validate(json.loads(arguments), schema, format_checker=checker)
        except (KeyError, ValueError, jsonschema.ValidationError) as error:
            found.append(f"{name} {arguments!r}: {str(error)[:200]}")
    return found


def _same(one: Turn, other: Turn, ask: Ask) -> bool:
    if ask.api != "Messages":
        return one == other
    # Arguments are no text there, and none if the length cut them off.
    read = [
        [(name, json.loads(text or "{}")) for name, text in calls]
        for calls in (turn.calls[:-1] if turn.is_cut else turn.calls for turn in (one, other))
    ]
    return read[0] == read[1] and (one.content, one.is_cut) == (other.content, other.is_cut)


def _tokens(url: str, text: str) -> list[int]:
    answer = httpx.post(f"{url}/tokenize", json={"prompt": text, "add_special_tokens": False})
    return list(answer.json()["tokens"])


async def _check(url: str, asks: Sequence[Ask], tally: Counter[str]) -> list[str]:
    places = asyncio.Semaphore(AT_ONCE)
    found: list[str] = []

    async def check(client: httpx.AsyncClient, ask: Ask) -> None:
        async with places:
            label = f"{ask.api}, {ask.choice}, {ask.tools[0]['name']}"
            try:
                turns = await asyncio.gather(whole(client, ask), streamed(client, ask))
                if not _same(*turns, ask):
                    apart.append((ask, label))
                for turn in turns:
                    tally["calls"] += len(turn.calls) - turn.is_cut
                    tally["cut"] += turn.is_cut
                    found.extend(f"{label}: {fault}" for fault in faults_of(turn, ask))
            except (RuntimeError, AssertionError) as error:
                found.append(f"{label}: {error}")

    apart: list[tuple[Ask, str]] = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await asyncio.gather(*(check(client, ask) for ask in asks))
        # Beside others a draw may fall otherwise: another batch, another rounding.
        for ask, label in apart:
            turns = await whole(client, ask), await streamed(client, ask)
            if not _same(*turns, ask):
                found.append(f"{label}: whole {turns[0]}, streamed {turns[1]}")
    tally["turns"] += 2 * len(asks)
    tally["drawn otherwise"] += len(apart)
    return found


def main() -> int:
    """Checks from the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [each.name for each in FORMATS if each.name not in UNBOUND]
    parser.add_argument("--formats", nargs="+", choices=names, default=names)
    parser.add_argument("--every", type=int, default=3, help="one of so many tools")
    parser.add_argument("--short", action="store_true", help="a tiny model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tools = read_tools()
    result: dict[str, Any] = {"machine": about_machine(), "short": args.short, "formats": {}}
    total: Counter[str] = Counter()
    num_faults = 0
    for name in args.formats:
        asks = asks_of(tools, names.index(name), args.every)
        tally: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as directory:
            folder = write_tiny_model(Path(directory), context=1024)
            template = folder / "template.jinja"
            template.write_text(TEMPLATE)
            more = ("--tool-call-parser", name, "--chat-template", str(template))
            model = () if args.short else PACKAGED
            with serving(folder, (*ARGS, *more, *model)) as server:
                if args.short:
                    bias = {str(token): BIAS for token in _tokens(server.http, ENDS)}
                    asks = [replace(ask, bias=bias) for ask in asks]
                found = asyncio.run(_check(server.http, asks, tally))
        result["formats"][name] = {**tally, "faults": found}
        print(f"{name}: {dict(tally)}", *found, sep="\n  ", flush=True)
        total += tally
        num_faults += len(found)
    result["total"] = {**total, "faults": num_faults}
    print(f"{dict(total)}, {num_faults} faults, {len(tools)} schemas")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
