"""The process of the hostile clients: runs one case after another, as it is told.

    python -m benchmarks.hostile.attack HTTP GRPC TOKEN    until its standard input ends

In a process of its own, which the kernel may stop for longer than the server and the sane clients
(`NICENESS`): the attack is to be on the server, not on the cores that all of them share here. A
client on another machine would take none of them. TOKEN is for
the honest clients of a case. For each JSON line on standard input, a case's name and a token or
null, it prints one: what must not have happened.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys

from benchmarks.hostile.case import Addresses, Case
from benchmarks.hostile.connection_cases import CASES
from octavo.engine.process.file_limit import raise_file_limit

CASE_S = 60.0
NICENESS = 10
"""About a tenth of a core's time where the server wants all of it, and all that it leaves."""


def all_cases() -> list[Case]:
    """The cases of every module of this folder that is there."""
    cases = list(CASES)
    for name in ("call_cases", "text_cases", "tool_cases", "embed_cases"):
        if importlib.util.find_spec(f"benchmarks.hostile.{name}") is not None:
            cases += importlib.import_module(f"benchmarks.hostile.{name}").CASES
    return cases


async def _faults(case: Case, to: Addresses) -> list[str]:
    try:
        async with asyncio.timeout(CASE_S):
            await case.send(to)
    except AssertionError as error:
        return [f"an answer that must not be: {error}"]
    except TimeoutError:
        return [f"not over after {CASE_S:g} s"]
    return []


async def main(http: str, grpc: str, paying: str) -> None:
    """Attacks until standard input ends."""
    cases = {case.name: case for case in all_cases()}
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, token = json.loads(line)
        to = Addresses(http=http, grpc=grpc, token=token, paying=paying)
        faults = await _faults(cases[name], to)
        print(json.dumps(faults), flush=True)


if __name__ == "__main__":
    raise_file_limit()
    os.nice(NICENESS)  # before any library makes a thread, which keeps what it was born with
    asyncio.run(main(*sys.argv[1:]))
