"""Servers on a local Ray cluster that are killed under readers; Ray Serve starts others.

    tools/with_ray.sh .venv/bin/python -m benchmarks.chaos_ray --kills 100 --out FILE

`octavo deploy` runs three servers of a random two-layer model and a front. The readers of `chaos`
ask that front all the while. Again and again one or two servers are killed, or the replicas of
Ray's that keep them, or they are stopped, and nothing more happens until as many new ones serve:
nobody but Ray Serve sees to that. It fails if an answer is not what one server says when nothing
happens, or ends in an error, or if no new servers come within two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos import FREED_S, Readers
from benchmarks.chaos_fleet import DRAIN_S, SETTLED_S, TIMEOUT_S, holds_nothing
from benchmarks.machine import about_machine
from benchmarks.tiny_server import ARGS, Server, serving, write_tiny_model

NUM_SERVERS = 3
COMES_S = 120.0
"""In which a server comes for one that is lost."""
MARK = "OCTAVO_CHAOS_RAY"
CLI = "octavo.server.cli.main"
HOW = {"server": 6.0, "replica": 3.0, "stop": 1.0}
"""What is hurt, and how often beside the others."""


class RayFleet:
    """A cluster of this machine with servers and a front.

    Args:
        folder: for the front's log and what Ray writes.
        model: that is served.

    Attributes: those of `chaos_fleet.Fleet` that readers look at; also
        new_s: seconds until as many new servers served, of each time.
        events: servers lost, by what was hurt.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self.fronts: list[Server] = []
        self.faults: list[str] = []
        self.deaths: list[float] = []
        self.outages: list[tuple[float, float]] = []
        self.front_deaths: list[float] = []
        self.new_s: list[float] = []
        self.events: Counter[str] = Counter()
        self._log = folder / "front.log"
        self._environ = {
            **os.environ, MARK: uuid.uuid4().hex, "RAY_TMPDIR": str(folder), "HOME": str(folder),
            "RAY_enable_metrics_collection": "0", "JAX_PLATFORMS": "cpu",
        }  # fmt: skip

    def fault(self, what: str) -> None:
        """Something that must not be."""
        self.faults.append(what)
        print(what, file=sys.stderr, flush=True)

    def start(self) -> None:
        """Servers and a front, until all serve."""
        route = f"--grpc-port 0 --http-port 0 --backend-timeout-s {TIMEOUT_S:g} --log-level info"
        words = ("--start-cluster", "--replicas", str(NUM_SERVERS), "--cpus-per-replica", "0.1")
        serve = (*ARGS, "--warm-up", "coarse", "--drain-timeout-s", str(DRAIN_S))
        with self._log.open("w") as stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", CLI, "deploy", *words, "--route", route, str(self.model),
                 *serve],
                stdout=subprocess.PIPE, stderr=stderr, text=True, env=self._environ,
            )  # fmt: skip
        front = Server(popen, "", "", self._log)
        self.fronts.append(front)
        assert popen.stdout is not None
        lines = [popen.stdout.readline() for _ in range(3)]
        if not all(lines):
            raise RuntimeError(f"it did not start:\n{self._log.read_text()[-4000:]}")
        front.grpc, front.http = (line.split()[-1] for line in lines[1:])

    def end(self) -> None:
        """Ends the cluster with all that runs on it."""
        for front in self.fronts:
            front.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                front.popen.wait(COMES_S)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if "Traceback" in (text := self._log.read_text()):
            self.fault(text[text.index("Traceback") :][:2000])

    def processes(self, *words: str) -> list[int]:
        """The cluster's processes whose command line has these words."""
        mark, found = f"{MARK}={self._environ[MARK]}".encode(), []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if all(word in line for word in words):
                        found.append(int(folder.name))
        return found

    def num_served(self) -> int:
        """Servers that the front ever took in."""
        return sum(line.endswith(" serves") for line in self._log.read_text().splitlines())

    async def until_served(self, number: int, gone: Sequence[int] = ()) -> None:
        """Waits until the front took in so many, and these processes are no more."""
        end_s = time.monotonic() + COMES_S
        while self.num_served() < number or set(gone) & set(self.processes()):
            if time.monotonic() > end_s:
                self.fault(f"{number - self.num_served()} servers do not come; {gone} were lost")
                return
            await asyncio.sleep(0.2)

    async def hurt(self, rng: random.Random, most: int) -> int:
        """Loses some servers, and waits for others; how many."""
        [how] = rng.choices(list(HOW), list(HOW.values()))
        pids = self.processes("ray::ServeReplica" if how == "replica" else f"{CLI} serve")
        victims = rng.sample(pids, min(most, rng.randint(1, NUM_SERVERS - 1)))
        before, begun_s = self.num_served(), time.monotonic()
        self.deaths.append(begun_s)
        for pid in victims:
            os.kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        await self.until_served(before + len(victims), victims)
        self.new_s.append(time.monotonic() - begun_s)
        self.events[how] += len(victims)
        return len(victims)


async def play(fleet: RayFleet, num_kills: int, seed: int, seconds: float) -> dict[str, Any]:
    """All of it, and what came of it."""
    readers, rng = Readers(fleet), random.Random(seed)  # type: ignore[arg-type]
    with serving(fleet.model, ("--warm-up", "coarse")) as alone:
        readers.learn_from(await readers.answers_of(alone))
    await asyncio.to_thread(fleet.start)
    await fleet.until_served(NUM_SERVERS)
    begun_s, num_lost = time.monotonic(), 0
    async with readers.reading(rng):
        while num_lost < num_kills and time.monotonic() - begun_s < seconds:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            num_lost += await fleet.hurt(rng, num_kills - num_lost)
            print(f"{num_lost} servers lost so far, {dict(fleet.events)}", file=sys.stderr)
        await asyncio.sleep(SETTLED_S)
    try:
        async with asyncio.timeout(FREED_S):
            while not await holds_nothing(fleet.fronts[0]):  # as its servers said a moment ago
                await asyncio.sleep(0.1)
    except TimeoutError:
        fleet.fault("the front holds something at the end")
    new_s, pauses_s = sorted(fleet.new_s), sorted(readers.pauses_s)
    return {
        "seconds": round(time.monotonic() - begun_s, 1),
        "lost": dict(fleet.events),
        "answers": sum(readers.ends.values()),
        "tokens": readers.num_tokens,
        "ends": dict(sorted(readers.ends.items())),
        "new_servers_after_s": {f"p{share}": _at(new_s, share) for share in (0, 50, 100)},
        "longest_pause_s": {f"p{share}": _at(pauses_s, share) for share in (50, 90, 99, 100)},
    }


def _at(values: Sequence[float], share: int) -> float:
    return round(values[share * (len(values) - 1) // 100], 3) if values else 0.0


def main() -> int:
    """Plays from the command line; 1 if anything slipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=7200.0, help="after which none is killed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = f"python -m benchmarks.chaos_ray --kills {args.kills} --seed {args.seed}"
    command += f" --seconds {args.seconds:g}"
    about = about_machine() | {"command": command, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="octavo-ray-", dir="/tmp") as folder:
        (model := Path(folder) / "model").mkdir()
        fleet = RayFleet(Path(folder), write_tiny_model(model))
        try:
            found = asyncio.run(play(fleet, args.kills, args.seed, args.seconds))
        finally:
            fleet.end()
    faults = {"faults": fleet.faults[:20], "num_faults": len(fleet.faults)}
    print(text := json.dumps(about | found | faults, indent=1))
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if fleet.faults else 0


if __name__ == "__main__":
    sys.exit(main())
