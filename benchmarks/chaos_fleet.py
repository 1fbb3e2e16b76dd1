"""A fleet of server processes behind two fronts, and what happens to them."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos_answers import HANG_S
from benchmarks.tiny_server import ARGS, FREE_PORTS, Server, start

NUM_SERVERS = 3
TIMEOUT_S = 3.0
"""After which a front takes a silent server for lost."""
DRAIN_S = 1.0
"""For which a server that is to end waits for what it has: many requests take longer."""
SETTLED_S = 4.0
"""In which every front knows of a server that has come."""
EXPLAINED_S = 10.0
"""For which a time without servers explains refusals."""
UNLISTED_S = 5.0
"""In which every front knows that a server is none of its own any more."""
EVENTS = {
    "kill": 8.0, "kill_all": 0.5, "stop": 2.0, "drain": 2.0, "replace": 1.0, "kill_front": 1.0,
}  # fmt: skip
"""What happens, and how often beside the others."""


class Place:
    """Where a server of the fleet stands, one after another.

    Attributes:
        server: the one that stands there, or stood there last.
        is_hurt: whether something happens to it.
        settled_s: from when on fronts know of it.
    """

    def __init__(self) -> None:
        self.server: Server
        self.is_hurt = True
        self.settled_s = 0.0

    async def start(self, fleet: Fleet, *, is_same: bool = False) -> None:
        """Has a server stand here, at the address of the one before or at its own."""
        port = self.server.grpc.rpartition(":")[2] if is_same else "0"
        if is_same:
            await asyncio.to_thread(self.server.popen.wait)
        self.server = await fleet.start_process(
            "benchmarks.chaos_server", *fleet.serve_args, "--grpc-port", port
        )

    def shown_to(self, front: int) -> str:
        """The address by which a front, by its number, reaches the server."""
        return self.server.grpc

    async def order(self, *words: object) -> str:
        """Has the server do what `chaos_server` can; "done", or what went wrong."""
        popen = self.server.popen
        assert popen.stdin is not None
        assert popen.stdout is not None
        try:
            popen.stdin.write(" ".join(map(str, words)) + "\n")
            popen.stdin.flush()
        except OSError as error:
            return repr(error)
        while (line := await asyncio.to_thread(popen.stdout.readline)).startswith("[Gloo]"):
            pass
        return line.strip()


class Fleet:
    """Fronts, the servers behind them, and what happens to them.

    Args:
        folder: for logs, and the file that names servers to fronts.
        model: that servers serve.
        places: where they stand; None is `NUM_SERVERS` of the plain kind.

    Attributes:
        serve_args: options of every server.
        events: how often what happened.
        faults: what must not be.
        num_kills: servers that were killed.
        deaths: when one or all of them died or stood still.
        outages: from when to when no server was there.
        front_deaths: when the second front was killed.
        lost_groups: logs of servers whose other hosts were lost on purpose: they may tell of it.
    """

    def __init__(self, folder: Path, model: Path, places: Sequence[Place] | None = None) -> None:
        self.folder, self.model = folder, model
        self.places = places or [Place() for _ in range(NUM_SERVERS)]
        self.serve_args = (
            "--quiet", "--model", str(model), *ARGS, *FREE_PORTS, "--warm-up", "coarse",
            "--drain-timeout-s", str(DRAIN_S),
        )  # fmt: skip
        self.fronts: list[Server] = []
        self.events: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_kills = 0
        self.deaths: list[float] = []
        self.outages: list[tuple[float, float]] = []
        self.front_deaths: list[float] = []
        self.lost_groups: set[Path] = set()
        self._processes: list[Server] = []

    async def start(self) -> None:
        """Servers, then fronts."""
        await asyncio.gather(*(self.start_at(place) for place in self.places))
        self.fronts = list(await asyncio.gather(*map(self.start_front, range(2))))

    def end(self) -> None:
        """Ends every process, and looks through what they wrote."""
        for server in self._processes:
            server.popen.kill()
            server.popen.communicate()
            text = "" if server.log in self.lost_groups else server.log.read_text()
            if "Traceback" in text:
                self.fault(f"{server.log.name}: {text[text.index('Traceback') :][:2000]}")

    async def disturb(self, rng: random.Random, num_kills: int, names: Sequence[str]) -> None:
        """Has things of these names happen until so many servers were killed, and are all back."""
        tasks = []
        while self.num_kills < num_kills:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            [event] = rng.choices(names, [EVENTS[name] for name in names])
            num_free = {"kill_all": NUM_SERVERS, "kill_front": 0}.get(event, 2)
            while len(free := self.free()) < num_free or len(self.fronts) < 2:
                await asyncio.sleep(0.1)
            places = free if event == "kill_all" else rng.sample(free, min(1, num_free))
            for place in places:
                place.is_hurt = True
            what: Callable[..., Coroutine[Any, Any, None]] = getattr(self, event)
            tasks.append(asyncio.create_task(what(random.Random(rng.random()), *places)))
            self.events[event] += 1
            print(f"{event}, {self.num_kills} servers killed so far", file=sys.stderr, flush=True)
            for task in tasks:
                if task.done():
                    task.result()
        await asyncio.gather(*tasks)

    def fault(self, what: str) -> None:
        """Something that must not be."""
        self.faults.append(what)
        print(what, file=sys.stderr, flush=True)

    # What happens. Each is given a source of chance and the places that it happens to.

    async def kill(self, rng: random.Random, *places: Place) -> None:
        """Servers are killed; others come at their addresses, or at new ones."""
        begun_s = time.monotonic()
        for place in places:
            place.server.popen.kill()
        self.num_kills += len(places)
        self.deaths.append(begun_s)
        is_outage, is_same = len(places) == len(self.places), rng.random() < 0.5
        if is_outage:
            self.outages.append((begun_s, math.inf))
        await asyncio.gather(*(self.start_at(place, is_same=is_same) for place in places))
        if is_outage:
            self.outages[-1] = (begun_s, time.monotonic() + EXPLAINED_S)

    kill_all = kill

    async def stop(self, rng: random.Random, place: Place) -> None:
        """A server stands still, for less than fronts wait or for more."""
        place.server.popen.send_signal(signal.SIGSTOP)
        for_s = rng.uniform(0.1, 2 * TIMEOUT_S)
        self.deaths.append(time.monotonic())
        await asyncio.sleep(for_s)
        place.server.popen.send_signal(signal.SIGCONT)
        self.settle(place)

    async def drain(self, rng: random.Random, place: Place) -> None:
        """A server is told to end, and another comes."""
        await self.end_one(place.server)
        await self.start_at(place, is_same=rng.random() < 0.5)

    async def replace(self, _: random.Random, place: Place) -> None:
        """Another server comes first, and fronts are told to let go of the one that was there."""
        before = place.server
        await self.start_at(place)
        await asyncio.sleep(UNLISTED_S)

        async def is_idle() -> bool:
            return (await load(before))["num_inflight"] == 0

        await self.until(f"the end of what {before.log.name} had", is_idle, HANG_S)
        await self.end_one(before)

    async def kill_front(self, _: random.Random) -> None:
        """The second front is killed, and another comes."""
        self.front_deaths.append(time.monotonic())
        self.fronts.pop().popen.kill()
        self.fronts.append(await self.start_front(1))

    # How.

    async def until(
        self, what: str, condition: Callable[[], Awaitable[bool]], limit_s: float
    ) -> None:
        """Waits for a condition; a fault if it does not come in time."""
        end_s = time.monotonic() + limit_s
        while not await condition():
            if time.monotonic() > end_s:
                self.fault(f"{what} took more than {limit_s:g} s")
                return
            await asyncio.sleep(0.1)

    def free(self) -> list[Place]:
        now_s = time.monotonic()
        return [each for each in self.places if not each.is_hurt and now_s > each.settled_s]

    def settle(self, place: Place) -> None:
        place.is_hurt, place.settled_s = False, time.monotonic() + SETTLED_S

    async def start_process(self, *command: str) -> Server:
        """A server or a front that is ready, and ends with the fleet."""
        log = self.folder / f"{command[1].strip('-')}-{len(self._processes)}.log"

        def start_one() -> Server:
            self._processes.append(server := start(command, log))
            return server

        return await asyncio.to_thread(start_one)

    async def start_front(self, number: int) -> Server:
        """A front of this number, which knows servers by the addresses that are shown to it."""
        listed = f"file:{self._listed(number)}"
        words = ("--model", str(self.model), "--backend", listed, *FREE_PORTS)
        times = ("--backend-timeout-s", str(TIMEOUT_S), "--log-level", "info")
        return await self.start_process("octavo.server.cli.main", "route", *words, *times)

    def _listed(self, front: int) -> Path:
        return self.folder / f"servers-{front}"

    async def start_at(self, place: Place, *, is_same: bool = False) -> None:
        """Has a server stand at a place, and tells fronts."""
        await place.start(self, is_same=is_same)
        for front in range(2):
            listed = [each.shown_to(front) for each in self.places if hasattr(each, "server")]
            written = self._listed(front).with_suffix(".new")
            written.write_text("".join(f"{address}\n" for address in listed))
            written.rename(self._listed(front))
        self.settle(place)

    async def end_one(self, server: Server) -> None:
        server.popen.terminate()
        status = await asyncio.to_thread(server.popen.wait, HANG_S)
        if status != 0:
            self.fault(f"{server.log.name} ended with {status}")


async def load(server: Server) -> dict[str, Any]:
    """Its figures."""
    async with httpx.AsyncClient(base_url=server.http, timeout=HANG_S, verify=False) as client:
        figures: dict[str, Any] = (await client.get("/v1/load")).json()
        page = (await client.get("/metrics")).text
    [inflight] = re.findall(r"^octavo:num_requests_inflight (\S+)$", page, re.MULTILINE)
    return figures | {"metric_inflight": float(inflight)}


async def holds_nothing(server: Server) -> bool:
    """Whether a server, or a front of such, has no request and no page in use."""
    found = await load(server)
    names = ("num_running", "num_waiting", "num_inflight", "metric_inflight")
    return not any(found[name] for name in names) and (
        found["num_free_pages"] == found["num_total_pages"]
    )


def held_by(front: Server) -> Counter[str]:
    """Files, threads and memory of a process (Linux)."""
    folder = Path(f"/proc/{front.popen.pid}")
    status = (folder / "status").read_text()
    figures = {
        name: int(re.findall(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[0])
        for name in ("Threads", "VmRSS")
    }
    return Counter(
        files=len(os.listdir(folder / "fd")),
        threads=figures["Threads"],
        resident_mb=figures["VmRSS"] // 1024,
    )
