"""The parts of a fleet that `chaos_matrix` hurts, and how each is hurt.

A row has two servers behind two fronts. What happens, happens to the second front, to the second
front's connections, or to the second server: to a group of two hosts, or to a server with a replica
for prompts and one for decoding. Each row's methods are the columns: kill, hang, delay, duplicate
and partition.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.chaos_answers import NUM_ASKS
from benchmarks.chaos_fleet import TIMEOUT_S, Fleet, Place
from benchmarks.chaos_relay import DOWN, UP, Relay
from benchmarks.tiny_server import Server
from octavo.engine.hosts.leader import LOST_STATUS

if TYPE_CHECKING:
    from benchmarks.chaos import Readers

DELAY_S, DELAYED_FOR_S = 0.15, 3.0
"""Longest time that a piece is kept on a slow connection, and for how long it is slow."""
ENDED_S = 10.0
"""In which every host of a group ends once one is lost: 5 s, and what a busy machine takes."""
KNOWN_S = 2.0
"""In which a front finds again a server that it can reach."""
REPLICA_TIMEOUT_S = 3.0
REPLICAS = {"prefill": 0, "decode": 1}
"""By index."""


class Row(Fleet):
    """A fleet, and what is done to it.

    Attributes:
        parts: what it can hurt.
        readers: who ask it.
        num_labels: requests that were asked twice.
    """

    parts: tuple[str, ...] = ()

    def __init__(self, folder: Path, model: Path, readers: type[Readers]) -> None:
        super().__init__(folder, model, [Place(), self.make_place()])
        self.readers = readers(self)
        self.num_labels = 0

    def make_place(self) -> Place:
        """Where the second server stands."""
        return Place()

    async def until_settled(self) -> None:
        """Waits until every server takes requests again, and every front knows."""
        while len(self.free()) < len(self.places):
            await asyncio.sleep(0.1)

    async def slow_down(self, *relays: Relay, ways: tuple[str, ...] = (UP, DOWN)) -> None:
        """Has connections be slow for a while."""
        for seconds in (DELAY_S, 0.0):
            for relay in relays:
                relay.delay_s |= dict.fromkeys(ways, seconds)
            await asyncio.sleep(DELAYED_FOR_S if seconds else 0.0)

    async def part(self, rng: random.Random, *relays: Relay, ways: tuple[str, ...]) -> None:
        """Nothing passes for less time than fronts wait, or for more; then all of it does, or every
        connection turns out to be broken."""
        for relay in relays:
            relay.hold(*ways)
        await asyncio.sleep(rng.uniform(0.2, 2 * TIMEOUT_S))
        self.lost()
        for relay in relays:
            if rng.random() < 0.5:
                relay.sever()
            relay.let_go()

    def lost(self) -> None:
        """Notes that a server, or the way to it, was lost."""
        self.deaths.append(time.monotonic())

    async def duplicate(self, part: str, rng: random.Random) -> None:
        """A reader asks three times at once under one id: both fronts, and the second server."""
        self.num_labels += 1
        number, label = rng.randrange(NUM_ASKS), f"twice-{self.num_labels}"
        server = self.places[1].server
        await asyncio.gather(
            *(
                self.readers.read(number, which, random.Random(rng.random()), label=label, of=of)
                for which, of in ((0, None), (1, None), (1, server))
            )
        )


class FrontRow(Row):
    """The second front, and its readers' connections to it."""

    parts = ("front",)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.relays = Relay(), Relay()

    async def start_front(self, number: int) -> Server:
        """As of `Fleet`; the second one is reached by relays."""
        server = await super().start_front(number)
        if number == 0:
            return server
        of_grpc, of_http = self.relays
        for relay in self.relays:
            if not relay.address:
                await relay.open()
        of_grpc.target, of_http.target = server.grpc, server.http.removeprefix("http://")
        http = f"http://{of_http.address}"
        return dataclasses.replace(server, grpc=of_grpc.address, http=http)

    async def kill(self, part: str, rng: random.Random) -> None:
        """It is killed, and another comes."""
        await self.kill_front(rng)

    async def hang(self, part: str, rng: random.Random) -> None:
        """It stands still for longer than it would wait for a server."""
        popen = self.fronts[1].popen
        popen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(TIMEOUT_S + 1, 2 * TIMEOUT_S))
        popen.send_signal(signal.SIGCONT)

    async def delay(self, part: str, rng: random.Random) -> None:
        """Its readers' connections are slow."""
        await self.slow_down(*self.relays)

    async def partition(self, part: str, rng: random.Random) -> None:
        """Its readers and it do not hear of each other."""
        await self.part(rng, *self.relays, ways=(UP, DOWN))

    def lost(self) -> None:
        """Notes that readers' connections may break."""
        self.front_deaths.append(time.monotonic())


class RelayedPlace(Place):
    """A server that the second front reaches by a relay."""

    def __init__(self) -> None:
        super().__init__()
        self.relay = Relay()

    async def start(self, fleet: Fleet, *, is_same: bool = False) -> None:
        """As of `Place`."""
        await super().start(fleet, is_same=is_same)
        if not self.relay.address:
            await self.relay.open()
        self.relay.target = self.server.grpc

    def shown_to(self, front: int) -> str:
        """See `Place`."""
        return self.relay.address if front == 1 else self.server.grpc


class RouterRow(Row):
    """Connections of the second front's router to a server."""

    parts = ("router",)

    def make_place(self) -> RelayedPlace:
        """See `Row`."""
        return RelayedPlace()

    @property
    def relay(self) -> Relay:
        """Between the second front and the second server."""
        place = self.places[1]
        assert isinstance(place, RelayedPlace)
        return place.relay

    async def kill(self, part: str, rng: random.Random) -> None:
        """They break."""
        self.lost()
        self.relay.sever()
        await asyncio.sleep(KNOWN_S)

    async def hang(self, part: str, rng: random.Random) -> None:
        """The server hears the front, and is not heard, for longer than the front waits."""
        self.lost()
        self.relay.hold(DOWN)
        await asyncio.sleep(rng.uniform(TIMEOUT_S + 1, 2 * TIMEOUT_S))
        self.relay.let_go()
        await asyncio.sleep(KNOWN_S)

    async def delay(self, part: str, rng: random.Random) -> None:
        """They are slow."""
        await self.slow_down(self.relay)

    async def partition(self, part: str, rng: random.Random) -> None:
        """Nothing passes."""
        self.lost()
        await self.part(rng, self.relay, ways=(UP, DOWN))
        await asyncio.sleep(KNOWN_S)


class GroupPlace(Place):
    """A group of two hosts whose connections go by relays.

    Attributes:
        follower: the second host's process.
        of_mesh, of_log: before JAX's coordinator, and before the log of commands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.follower: subprocess.Popen[bytes]
        self.of_mesh, self.of_log = Relay(), Relay(of_frames=True)

    async def start(self, fleet: Fleet, *, is_same: bool = False) -> None:
        """As of `Place`; always at new addresses."""
        for relay in (self.of_mesh, self.of_log):
            if relay.address:
                relay.close()
        self.of_mesh, self.of_log = Relay(), Relay(of_frames=True)
        port, relayed = _two_ports(), _two_ports()
        self.of_mesh.target, self.of_log.target = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
        await self.of_mesh.open(relayed)
        await self.of_log.open(relayed + 1)
        args = (*fleet.serve_args, "--tensor-parallel-size", "2", "--num-hosts", "2")
        program = ("octavo.server.cli.main", "serve")
        follows = ("--host-id", "1", "--coordinator", f"127.0.0.1:{relayed}")
        with (fleet.folder / f"follower-{relayed}.log").open("w") as log:
            self.follower = subprocess.Popen(
                [sys.executable, "-m", *program, *args, *follows], stderr=log
            )
        leads = ("--host-id", "0", "--coordinator", f"127.0.0.1:{port}")
        self.server = await fleet.start_process("benchmarks.chaos_server", *args, *leads)


def _two_ports() -> int:
    """A free port whose next one is free."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


class GroupRow(Row):
    """The hosts of a group, and what they tell each other: `leader` is also what it says, and
    `follower` what that one says."""

    parts = ("leader", "follower")

    def make_place(self) -> GroupPlace:
        """See `Row`."""
        return GroupPlace()

    @property
    def group(self) -> GroupPlace:
        """The group."""
        place = self.places[1]
        assert isinstance(place, GroupPlace)
        return place

    def end(self) -> None:
        """As of `Fleet`."""
        if hasattr(self.group, "follower"):
            self.group.follower.kill()
            self.group.follower.wait()
        super().end()

    async def kill(self, part: str, rng: random.Random) -> None:
        """A host is killed."""
        await self.lose(part, signal.SIGKILL)

    async def hang(self, part: str, rng: random.Random) -> None:
        """A host stands still for ever."""
        await self.lose(part, signal.SIGSTOP)

    async def lose(self, part: str, how: signal.Signals) -> None:
        """Has a host lost, and another group come."""
        self.lost()
        hosts = {"leader": self.group.server.popen, "follower": self.group.follower}
        hosts.pop(part).send_signal(how)
        await self.until_ended(*hosts)

    async def until_ended(self, *parts: str) -> None:
        """Waits until hosts have ended by themselves as they should, and starts another group."""
        place = self.group
        place.is_hurt = True
        self.lost_groups.add(place.server.log)
        hosts = {"leader": place.server.popen, "follower": place.follower}
        for part in parts:
            try:
                status = await asyncio.to_thread(hosts[part].wait, ENDED_S)
            except subprocess.TimeoutExpired:
                self.fault(f"a {part} did not end")
            else:
                # JAX aborts a process that sees the loss first.
                if status not in (LOST_STATUS, -signal.SIGABRT, 1):
                    self.fault(f"a {part} ended with {status}")
        for popen in hosts.values():
            popen.kill()
            await asyncio.to_thread(popen.wait)
        await self.start_at(place)

    async def delay(self, part: str, rng: random.Random) -> None:
        """What a host tells the others comes late, and they go on."""
        await self.slow_down(self.group.of_log, ways=(self.way_of(part),))
        for popen in (self.group.server.popen, self.group.follower):
            if (status := popen.poll()) is not None:
                self.fault(f"a host ended with {status} of a slow connection")

    async def duplicate(self, part: str, rng: random.Random) -> None:
        """A request comes twice; what a host tells the others does."""
        await super().duplicate(part, rng)
        self.lost()
        self.group.of_log.num_repeats[self.way_of(part)] = 1
        await self.until_ended("leader", "follower")

    async def partition(self, part: str, rng: random.Random) -> None:
        """A host is not heard."""
        self.lost()
        self.group.of_log.hold(self.way_of(part))
        await self.until_ended("follower" if part == "leader" else "leader")

    @staticmethod
    def way_of(part: str) -> str:
        """By which a host speaks."""
        return DOWN if part == "leader" else UP


class ApartPlace(Place):
    """A server with a replica for prompts and one for decoding."""

    async def start(self, fleet: Fleet, *, is_same: bool = False) -> None:
        """As of `Place`."""
        roles = ("--data-parallel-size", "2", "--replica-roles", "prefill,decode")
        tier = ("--host-kv-memory-bytes", str(16 << 20))
        times = ("--replica-timeout-s", str(REPLICA_TIMEOUT_S))
        self.server = await fleet.start_process(
            "benchmarks.chaos_server", *fleet.serve_args, *roles, *tier, *times
        )


class ApartRow(Row):
    """Replicas for prompts and for decoding, and requests that move between them."""

    parts = ("prefill", "decode", "moving")

    def make_place(self) -> ApartPlace:
        """See `Row`."""
        return ApartPlace()

    async def orders(self, *words: object) -> None:
        """Has the server do something to itself."""
        if (answer := await self.places[1].order(*words)) != "done":
            self.fault(f"{' '.join(map(str, words))}: {answer}")

    async def hurt(self, part: str, rng: random.Random, *what: object) -> None:
        """Has a replica hurt, one of both while pages move, and waits until it serves again."""
        self.lost()
        name = rng.choice(tuple(REPLICAS)) if part == "moving" else part
        moving = ("moving",) if part == "moving" else ()
        kind, *seconds = what
        await self.orders(*moving, kind, REPLICAS[name], *seconds)

    async def kill(self, part: str, rng: random.Random) -> None:
        """Its process is killed."""
        await self.hurt(part, rng, "kill")

    async def hang(self, part: str, rng: random.Random) -> None:
        """Its process stands still until it is killed."""
        self.lost()
        await self.hurt(part, rng, "stop", 4 * REPLICA_TIMEOUT_S)

    async def delay(self, part: str, rng: random.Random) -> None:
        """Its process stands still for a moment."""
        await self.hurt(part, rng, "stop", round(rng.uniform(0.05, 1.0), 3))

    async def duplicate(self, part: str, rng: random.Random) -> None:
        """A request comes twice; so do its pages, where it moves."""
        await super().duplicate(part, rng)
        if part == "moving":
            await self.orders("moving", "twice")

    async def partition(self, part: str, rng: random.Random) -> None:
        """Nothing passes between it and the others; pages do not arrive."""
        if part == "moving":
            await self.orders("moving", "lose")
        else:
            await self.hurt(part, rng, "hold", round(rng.uniform(0.2, 2 * REPLICA_TIMEOUT_S), 3))


ROWS: tuple[type[Row], ...] = (FrontRow, RouterRow, GroupRow, ApartRow)
FAULTS = ("kill", "hang", "delay", "duplicate", "partition")
