"""A fleet whose servers are killed, stopped, drained and replaced under readers.

    python -m benchmarks.chaos --kills 100 --out benchmarks/results/chaos-DATE.json

Two `octavo route` stand in front of three servers of a random two-layer model, which take 20 ms a
step. Readers ask both fronts over gRPC and HTTP, for streams and for whole answers: greedy and
sampled ones, with grammars, with several completions, of all priorities. Some leave early. Every
half to three seconds something happens to a server or to the second front, drawn by `--seed`,
until so many servers were killed.

It fails if an answer is not what a server said when nothing happened, or ends in an error that
what happened does not allow:

- `overloaded`, before it begins, where no server is there;
- `quarantined`, where three servers died while it was under way;
- `engine_dead`, where its front was killed.

At the end the servers free what a killed front had, servers and fronts hold nothing, and the first
front, which lives all the while, serves with as few files and threads as at first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos_answers import (
    HANG_S,
    KINDS,
    NUM_ASKS,
    WAYS,
    Ask,
    Choice,
    Ended,
    difference,
    grpc_parts,
    take,
)
from benchmarks.chaos_fleet import (
    EVENTS,
    SETTLED_S,
    TIMEOUT_S,
    Fleet,
    held_by,
    holds_nothing,
    load,
)
from benchmarks.machine import about_machine
from benchmarks.tiny_server import Server, serving, write_tiny_model

NUM_READERS = 8
LEAVING = 0.1
"""Share of streams whose reader leaves."""
FREED_S = 5.0
"""In which servers free what a front had that was killed."""
FATAL_DEATHS = 3
"""Deaths of servers that a request need not outlive."""
SLACK = 16
"""Files and threads that a front may have beyond those that it had at first."""


class Readers:
    """Ask a fleet, and hold it to what its answers must be.

    Attributes:
        ends: how answers ended, by the way that they were asked for.
        pauses_s: the longest time between two parts of each stream.
        num_tokens: that were told.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.ends: Counter[str] = Counter()
        self.pauses_s: list[float] = []
        self.num_tokens = 0
        self._fleet = fleet
        self._wanted: list[list[Choice]] = []
        self._quarantined: set[int] = set()

    @staticmethod
    async def answers_of(server: Server) -> list[list[Choice]]:
        """What each request gets when nothing happens, one after another."""
        wanted: list[list[Choice]] = []
        for number in range(NUM_ASKS):
            choices: list[Choice] = []
            async for parts in grpc_parts(server, Ask.of(number), True):
                take(choices, parts)
            assert all(choice.finish_reason for choice in choices), choices
            wanted.append(choices)
        return wanted

    def learn_from(self, wanted: list[list[Choice]]) -> None:
        """Takes over what each request must get."""
        self._wanted = wanted

    @contextlib.asynccontextmanager
    async def reading(self, rng: random.Random) -> AsyncGenerator[None]:
        """They ask all the while, until the block's end; all have ended then."""
        going_on, fronts = True, self._fleet.fronts

        async def read_on(rng: random.Random) -> None:
            while going_on:
                await self.read(rng.randrange(NUM_ASKS), rng.randrange(len(fronts)), rng)

        tasks = [
            asyncio.create_task(read_on(random.Random(rng.random()))) for _ in range(NUM_READERS)
        ]
        try:
            yield
        finally:
            going_on = False
            await asyncio.gather(*tasks)

    async def read(
        self,
        number: int,
        which: int,
        rng: random.Random,
        *,
        label: str | None = None,
        of: Server | None = None,
    ) -> None:
        """Reads one answer and holds it to what it must be.

        Args:
            number: of what is asked.
            which: of the fronts is asked.
            label: the request's id, where its reader gives one.
            of: a server that is asked itself, in place of a front.
        """
        fleet, front, begun_s = self._fleet, of or self._fleet.fronts[which], time.monotonic()
        protocol, is_stream = rng.choice(tuple(WAYS))
        name = f"{protocol} {'stream' if is_stream else 'whole'}"
        leaves = rng.randint(1, 40) if is_stream and rng.random() < LEAVING else None
        choices: list[Choice] = []
        end, why, heard_s, pause_s = "whole", "", begun_s, 0.0
        parts = WAYS[protocol, is_stream](front, Ask.of(number, label), is_stream)
        try:
            async with asyncio.timeout(HANG_S), contextlib.aclosing(parts):
                async for part in parts:
                    now_s = time.monotonic()
                    pause_s, heard_s = max(pause_s, now_s - heard_s), now_s
                    take(choices, part)
                    if leaves is not None and (leaves := leaves - 1) <= 0:
                        end = "left"
                        break
        except Ended as error:
            end, why = error.args
        except TimeoutError:
            end = "hung"
        self.ends[f"{name}: {end}"] += 1
        self.num_tokens += sum(len(choice.token_ids) for choice in choices)
        if is_stream and end == "whole":
            self.pauses_s.append(pause_s)
        wanted = self._wanted[number]
        is_right = all(map(Choice.begins, choices, wanted)) and (
            end != "whole" or choices == wanted
        )
        if not is_right:
            fleet.fault(f"{name} {number}: {end}, {difference(choices, wanted)}")
        if end not in ("whole", "left") and not self._allows(end, number, which, choices, begun_s):
            after_s = time.monotonic() - begun_s
            fleet.fault(f"{name} {number} of front {which}: {end} {after_s:.1f} s on, {why}")
        if end == "overloaded":
            await asyncio.sleep(0.5)

    def _allows(
        self, end: str, number: int, which: int, choices: list[Choice], begun_s: float
    ) -> bool:
        """Whether what happened allows that an answer ended so."""
        fleet = self._fleet
        if end == "engine_dead":
            return which == 1 and any(begun_s <= at_s for at_s in fleet.front_deaths)
        if end == "quarantined":
            num_deaths = sum(begun_s - TIMEOUT_S <= at_s for at_s in fleet.deaths)
            known = number in self._quarantined
            self._quarantined.add(number)
            return known or num_deaths >= FATAL_DEATHS
        if end == "overloaded":
            return not choices and any(begun_s <= until_s for _, until_s in fleet.outages)
        return False


async def play(fleet: Fleet, num_kills: int, seed: int, names: Sequence[str]) -> dict[str, Any]:
    """All of it, and what came of it."""
    readers, rng = Readers(fleet), random.Random(seed)
    with serving(fleet.model) as alone:
        readers.learn_from(await readers.answers_of(alone))
    await fleet.start()
    await asyncio.sleep(SETTLED_S)
    before, begun_s = held_by(fleet.fronts[0]), time.monotonic()
    async with readers.reading(rng):
        await fleet.disturb(rng, num_kills, names)
    seconds = time.monotonic() - begun_s
    await leave_all(fleet, readers)
    for server in (fleet.fronts[0], *(place.server for place in fleet.places)):
        await fleet.until(
            f"being empty of {server.log.name}", lambda s=server: holds_nothing(s), 2 * FREED_S
        )
    after = held_by(fleet.fronts[0])
    if after["files"] > before["files"] + SLACK or after["threads"] > before["threads"] + SLACK:
        fleet.fault(f"a front holds {after}, at first {before}")
    for number in range(len(KINDS)):
        await readers.read(number, 0, rng)
    pauses_s = sorted(readers.pauses_s)
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "kills": fleet.num_kills,
        "events": dict(fleet.events),
        "answers": sum(readers.ends.values()),
        "tokens": readers.num_tokens,
        "ends": dict(sorted(readers.ends.items())),
        "longest_pause_s": {
            f"p{share}": round(pauses_s[share * (len(pauses_s) - 1) // 100], 3)
            for share in (50, 90, 99, 100)
        },
        "front": {"at_first": before, "at_the_end": after},
    }


async def leave_all(fleet: Fleet, readers: Readers) -> None:
    """Kills the second front while it has requests; servers must free them."""
    rng = random.Random(0)
    reading = [asyncio.create_task(readers.read(number, 1, rng)) for number in range(NUM_READERS)]

    async def is_under_way() -> bool:
        return (await load(fleet.fronts[1]))["num_inflight"] > 0

    await fleet.until("requests of a front", is_under_way, HANG_S)
    fleet.front_deaths.append(time.monotonic())
    fleet.fronts.pop().popen.kill()
    for place in fleet.places:
        server = place.server
        await fleet.until(
            f"freeing what a killed front had of {server.log.name}",
            lambda s=server: holds_nothing(s),
            FREED_S,
        )
    await asyncio.gather(*reading)


def main() -> int:
    """Plays from the command line; 1 if anything slipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=EVENTS, action="append", help="nothing else happens")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = args.only or tuple(EVENTS)
    if not {"kill", "kill_all"} & set(names):
        parser.error("--only needs kill or kill_all: kills are counted")
    only = "".join(f" --only {name}" for name in args.only or ())
    command = f"python -m benchmarks.chaos --kills {args.kills} --seed {args.seed}{only}"
    about = about_machine() | {"command": command, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder) / "model").mkdir()
        fleet = Fleet(Path(folder), write_tiny_model(model))
        try:
            found = asyncio.run(play(fleet, args.kills, args.seed, names))
        finally:
            fleet.end()
    faults = {"faults": fleet.faults[:20], "num_faults": len(fleet.faults)}
    result = about | found | faults
    print(text := json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if result["num_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
