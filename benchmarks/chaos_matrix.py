"""Every way to hurt every part of a fleet, so many times, under readers who check every token.

    python -m benchmarks.chaos_matrix --times 50 --out benchmarks/results/chaos-matrix-DATE.json

The parts are the rows of `chaos_rows`: a front, its router's connections, the leader and the
follower of a group of hosts, the replica for prompts, that for decoding, and a request that moves
between these. Each is killed, hangs, is slow, hears or says something twice, and is parted from
the others, at moments that `--seed` draws. Readers are those of `benchmarks.chaos`, and hold
answers to the same. After each cell no server may hold a request or a page, and each proves that
every page and row is accounted for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.chaos import Readers
from benchmarks.chaos_fleet import SETTLED_S, holds_nothing
from benchmarks.chaos_rows import FAULTS, ROWS, Row
from benchmarks.machine import about_machine
from benchmarks.tiny_server import serving, write_tiny_model

PARTS = tuple(part for row in ROWS for part in row.parts)
EMPTY_S = 15.0
"""In which what a cell left is freed."""


async def play_cell(
    row: Row, part: str, fault: str, times: int, seconds: float, rng: random.Random
) -> dict[str, Any]:
    """Hurts a part so many times, or for so long, and says what came of it."""
    row.faults, row.readers.ends = [], Counter()
    hurt, num_done, begun_s = getattr(row, fault), 0, time.monotonic()
    async with row.readers.reading(rng):
        while num_done < times and time.monotonic() < begun_s + seconds:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            await row.until_settled()
            await hurt(part, rng)
            num_done += 1
        await row.until_settled()
    for server in (*row.fronts, *(place.server for place in row.places)):
        what = f"{fault} {part}: being empty of {server.log.name}"
        await row.until(what, lambda s=server: holds_nothing(s), EMPTY_S)
    for place in row.places:
        if (answer := await place.order("check")) != "done":
            row.fault(f"{fault} {part}: {place.server.log.name} has {answer}")
    ends: Counter[str] = Counter()
    for name, count in row.readers.ends.items():
        ends[name.rpartition(" ")[2]] += count
    found = {
        "times": num_done,
        "seconds": round(time.monotonic() - begun_s, 1),
        "answers": sum(ends.values()),
        "ends": dict(sorted(ends.items())),
        "faults": row.faults,
    }
    print(f"{fault} {part}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


async def play(
    row: Row, cells: list[tuple[str, str]], args: argparse.Namespace, wanted: Any
) -> dict[str, Any]:
    """The cells of one row's fleet."""
    row.readers.learn_from(wanted)
    await row.start()
    await asyncio.sleep(SETTLED_S)
    return {
        f"{fault} {part}": await play_cell(
            row, part, fault, args.times, args.seconds, random.Random(f"{args.seed} {fault} {part}")
        )
        for part, fault in cells
    }


def main() -> int:
    """Plays from the command line; 1 if anything slipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600.0, help="of a cell, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append", help="these alone")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="these alone")
    parser.add_argument("--logs", type=Path, help="keep what processes wrote there")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = f"python -m benchmarks.chaos_matrix {' '.join(sys.argv[1:])}".strip()
    about = about_machine() | {"command": command, "load": os.getloadavg()[0]}
    cells: dict[str, Any] = {}
    ends: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        (model := Path(scratch) / "model").mkdir()
        write_tiny_model(model)
        wanted = asyncio.run(learn(model))
        for kind in ROWS:
            chosen = [
                (part, fault)
                for part in kind.parts
                for fault in FAULTS
                if part in (args.part or PARTS) and fault in (args.fault or FAULTS)
            ]
            if not chosen:
                continue
            (folder := (args.logs or Path(scratch)) / kind.parts[0]).mkdir(parents=True)
            row = kind(folder, model, Readers)
            try:
                cells |= asyncio.run(play(row, chosen, args, wanted))
            finally:
                row.faults = []
                row.end()
                ends += row.faults
    num_faults = len(ends) + sum(len(cell["faults"]) for cell in cells.values())
    times = sum(cell["times"] for cell in cells.values())
    answers = sum(cell["answers"] for cell in cells.values())
    totals = {"times": times, "answers": answers, "faults": ends, "num_faults": num_faults}
    print(text := json.dumps(about | totals | {"cells": cells}, indent=1))
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if num_faults else 0


async def learn(model: Path) -> Any:
    """What each request gets when nothing happens."""
    with serving(model) as alone:
        return await Readers.answers_of(alone)


if __name__ == "__main__":
    sys.exit(main())
