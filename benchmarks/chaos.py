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
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.machine import about_machine
from benchmarks.tiny_server import ARGS, FREE_PORTS, Server, serving, start, write_tiny_model
from octavo.client import AsyncOctavoClient, OctavoError, Priority, SamplingParams
from octavo.server.status import reason_of

NUM_SERVERS, NUM_READERS, NUM_ASKS = 3, 8, 48
LEAVING = 0.1
"""Share of streams whose reader leaves."""
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
FREED_S = 5.0
"""In which servers free what a front had that was killed."""
HANG_S = 90.0
FATAL_DEATHS = 3
"""Deaths of servers that a request need not outlive."""
SLACK = 16
"""Files and threads that a front may have beyond those that it had at first."""
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    {"temperature": 0.0, "structured_outputs": {"regex": "([a-d]{3,8} ){6,20}"}},
    {"temperature": 0.9, "n": 3, "ignore_eos": True},
    {"temperature": 0.0, "frequency_penalty": 0.6, "logprobs": 1, "ignore_eos": True},
    {"temperature": 0.7, "stop": ["q", "ZZ"], "min_tokens": 30, "repetition_penalty": 1.2},
)
EVENTS = {
    "kill": 8.0, "kill_all": 0.5, "stop": 2.0, "drain": 2.0, "replace": 1.0, "kill_front": 1.0,
}  # fmt: skip
"""What happens, and how often beside the others."""


class Ask(NamedTuple):
    """A request. The same number is the same request."""

    prompt: list[int]
    fields: dict[str, Any]
    priority: Priority

    @classmethod
    def of(cls, number: int) -> Ask:
        """The request of a number."""
        rng = random.Random(number)
        prompt = [rng.randrange(2, 250) for _ in range(rng.choice((6, 30, 150)))]
        fields = KINDS[number % len(KINDS)] | {"seed": number, "max_tokens": rng.randint(30, 160)}
        return cls(prompt, fields, rng.choice(tuple(Priority)))


@dataclass(slots=True)
class Choice:
    """What a reader has of a completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def begins(self, whole: Choice) -> bool:
        """Whether this may be the beginning of a whole completion, or is all of it."""
        if self.finish_reason is not None:
            return self == whole
        same = self.token_ids == whole.token_ids[: len(self.token_ids)]
        return same and whole.text.startswith(self.text)


Part = tuple[int, list[int], str, str | None]
"""A completion's number, its new tokens, their text, and how it ended."""


class Ended(Exception):
    """An answer ended in an error. Carries its kind and what it says."""


async def grpc_parts(front: Server, ask: Ask, is_stream: bool) -> AsyncGenerator[list[Part]]:
    """An answer by `GenerateStream` or `Generate`.

    Raises:
        Ended: it ended in an error.
    """
    params = SamplingParams(**ask.fields)
    async with AsyncOctavoClient(front.grpc, retry=None) as client:
        try:
            if not is_stream:
                whole = await client.generate(ask.prompt, params, priority=ask.priority)
                yield [(c.index, c.token_ids, c.text, c.finish_reason) for c in whole.outputs]
                return
            outputs = client.stream(ask.prompt, params, priority=ask.priority)
            async for output in outputs:
                yield [(c.index, c.token_ids, c.text, c.finish_reason) for c in output.outputs]
        except OctavoError as error:
            raise Ended(reason_of(type(error)).lower(), str(error)) from None


async def http_parts(front: Server, ask: Ask, is_stream: bool) -> AsyncGenerator[list[Part]]:
    """An answer of `/v1/completions`.

    Raises:
        Ended: it ended in an error.
    """
    body = {"model": "tiny", "prompt": ask.prompt, "stream": is_stream, "return_token_ids": True}
    body |= ask.fields | {"priority": ask.priority.name.lower()}
    is_done = not is_stream
    try:
        async with (
            httpx.AsyncClient(base_url=front.http, timeout=HANG_S, verify=False) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                is_done |= data == "[DONE]"
                if not data or data == "[DONE]":
                    continue
                content = json.loads(data)
                if "error" in content:
                    raise Ended(content["error"]["code"], content["error"]["message"])
                yield [
                    (c["index"], c.get("token_ids") or [], c["text"], c["finish_reason"])
                    for c in content["choices"]
                ]
    except httpx.TransportError as error:
        raise Ended("engine_dead", repr(error)) from None
    if not is_done:
        raise Ended("cut_off", "no [DONE]")


WAYS = {
    (protocol.__name__.removesuffix("_parts"), is_stream): protocol
    for protocol in (grpc_parts, http_parts)
    for is_stream in (True, False)
}


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


class Fleet:
    """Fronts, the servers behind them, and what happens to them.

    Args:
        folder: for logs, and the file that names servers to fronts.
        model: that servers serve.

    Attributes:
        events: how often what happened.
        faults: what must not be.
        num_kills: servers that were killed.
        deaths: when one or all of them died or stood still.
        outages: from when to when no server was there.
        front_deaths: when the second front was killed.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.places = [Place() for _ in range(NUM_SERVERS)]
        self.fronts: list[Server] = []
        self.events: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_kills = 0
        self.deaths: list[float] = []
        self.outages: list[tuple[float, float]] = []
        self.front_deaths: list[float] = []
        self._processes: list[Server] = []
        self._listed = folder / "servers"

    async def start(self) -> None:
        """Servers, then fronts."""
        await asyncio.gather(*(self._start_at(place) for place in self.places))
        self.fronts = [await self._start_front() for _ in range(2)]

    def end(self) -> None:
        """Ends every process, and looks through what they wrote."""
        for server in self._processes:
            server.popen.kill()
            server.popen.communicate()
            if "Traceback" in (text := server.log.read_text()):
                self.fault(f"{server.log.name}: {text[text.index('Traceback') :][:2000]}")

    async def disturb(self, rng: random.Random, num_kills: int, names: Sequence[str]) -> None:
        """Has things of these names happen until so many servers were killed, and are all back."""
        tasks = []
        while self.num_kills < num_kills:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            [event] = rng.choices(names, [EVENTS[name] for name in names])
            num_free = {"kill_all": NUM_SERVERS, "kill_front": 0}.get(event, 2)
            while len(free := self._free()) < num_free or len(self.fronts) < 2:
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
        await asyncio.gather(*(self._start_at(place, is_same=is_same) for place in places))
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
        self._settle(place)

    async def drain(self, rng: random.Random, place: Place) -> None:
        """A server is told to end, and another comes."""
        await self._end(place.server)
        await self._start_at(place, is_same=rng.random() < 0.5)

    async def replace(self, _: random.Random, place: Place) -> None:
        """Another server comes first, and fronts are told to let go of the one that was there."""
        before = place.server
        await self._start_at(place)
        await asyncio.sleep(UNLISTED_S)

        async def is_idle() -> bool:
            return (await load(before))["num_inflight"] == 0

        await self.until(f"the end of what {before.log.name} had", is_idle, HANG_S)
        await self._end(before)

    async def kill_front(self, _: random.Random) -> None:
        """The second front is killed, and another comes."""
        self.front_deaths.append(time.monotonic())
        self.fronts.pop().popen.kill()
        self.fronts.append(await self._start_front())

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

    def _free(self) -> list[Place]:
        now_s = time.monotonic()
        return [each for each in self.places if not each.is_hurt and now_s > each.settled_s]

    def _settle(self, place: Place) -> None:
        place.is_hurt, place.settled_s = False, time.monotonic() + SETTLED_S

    async def _start(self, *command: str) -> Server:
        log = self.folder / f"{command[1]}-{len(self._processes)}.log"
        server = await asyncio.to_thread(start, command, log)
        self._processes.append(server)
        return server

    async def _start_front(self) -> Server:
        backends = ("--backend", f"file:{self._listed}", "--backend-timeout-s", str(TIMEOUT_S))
        words = ("--model", str(self.model), *backends, *FREE_PORTS, "--log-level", "info")
        return await self._start("octavo.server.cli.main", "route", *words)

    async def _start_at(self, place: Place, *, is_same: bool = False) -> None:
        """Has a server stand at a place, at the address of the one before or at its own."""
        port = place.server.grpc.rpartition(":")[2] if is_same else "0"
        if is_same:
            await asyncio.to_thread(place.server.popen.wait)
        place.server = await self._start(
            "benchmarks.faulty_server", "--paced", "--quiet", "--model", str(self.model),
            *ARGS, *FREE_PORTS, "--grpc-port", port, "--warm-up", "coarse",
            "--drain-timeout-s", str(DRAIN_S),
        )  # fmt: skip
        listed = [each.server.grpc for each in self.places if hasattr(each, "server")]
        written = self._listed.with_suffix(".new")
        written.write_text("".join(f"{address}\n" for address in listed))
        written.rename(self._listed)
        self._settle(place)

    async def _end(self, server: Server) -> None:
        server.popen.terminate()
        status = await asyncio.to_thread(server.popen.wait, HANG_S)
        if status != 0:
            self.fault(f"{server.log.name} ended with {status}")


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

    async def learn(self, server: Server) -> None:
        """What each request gets when nothing happens, one after another."""
        for number in range(NUM_ASKS):
            choices: list[Choice] = []
            async for parts in grpc_parts(server, Ask.of(number), True):
                _take(choices, parts)
            assert all(choice.finish_reason for choice in choices), choices
            self._wanted.append(choices)

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

    async def read(self, number: int, which: int, rng: random.Random) -> None:
        """Reads one answer of a front and holds it to what it must be."""
        fleet, front, begun_s = self._fleet, self._fleet.fronts[which], time.monotonic()
        protocol, is_stream = rng.choice(tuple(WAYS))
        name = f"{protocol} {'stream' if is_stream else 'whole'}"
        leaves = rng.randint(1, 40) if is_stream and rng.random() < LEAVING else None
        choices: list[Choice] = []
        end, why, heard_s, pause_s = "whole", "", begun_s, 0.0
        parts = WAYS[protocol, is_stream](front, Ask.of(number), is_stream)
        try:
            async with asyncio.timeout(HANG_S), contextlib.aclosing(parts):
                async for part in parts:
                    now_s = time.monotonic()
                    pause_s, heard_s = max(pause_s, now_s - heard_s), now_s
                    _take(choices, part)
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
            fleet.fault(f"{name} {number}: {end}, {_difference(choices, wanted)}")
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


def _take(choices: list[Choice], parts: list[Part]) -> None:
    for index, token_ids, text, finish_reason in parts:
        choices += [Choice() for _ in range(index + 1 - len(choices))]
        choice = choices[index]
        choice.token_ids += token_ids
        choice.text += text
        choice.finish_reason = finish_reason or choice.finish_reason


def _difference(choices: list[Choice], wanted: list[Choice]) -> str:
    """Where two answers part."""
    for index, (got, whole) in enumerate(zip(choices, wanted, strict=False)):
        if got != whole:
            pairs = list(zip(got.token_ids, whole.token_ids, strict=False))
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
            sizes = f"{len(got.token_ids)} of {len(whole.token_ids)} tokens"
            ends = f"ended as {got.finish_reason}, not {whole.finish_reason}"
            texts = f"text {got.text[-40:]!r}, not {whole.text[-40:]!r}"
            return f"completion {index}: {sizes}, equal for {same}, {ends}; {texts}"
    return f"{len(choices)} of {len(wanted)} completions"


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


async def play(
    folder: Path, model: Path, num_kills: int, seed: int, names: Sequence[str]
) -> dict[str, Any]:
    """All of it, and what came of it."""
    fleet = Fleet(folder, model)
    readers, rng = Readers(fleet), random.Random(seed)
    with serving(model) as alone:
        await readers.learn(alone)
    try:
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
    finally:
        fleet.end()
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
            f"p{share:g}": round(
                pauses_s[min(int(share / 100 * len(pauses_s)), len(pauses_s) - 1)], 3
            )
            for share in (50, 90, 99, 100)
        },
        "front": {"at_first": before, "at_the_end": after},
        "faults": fleet.faults[:20],
        "num_faults": len(fleet.faults),
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
    with tempfile.TemporaryDirectory() as folder:
        (model := Path(folder) / "model").mkdir()
        write_tiny_model(model)
        names = args.only or tuple(EVENTS)
        played = play(Path(folder), model, args.kills, args.seed, names)
        only = "".join(f" --only {name}" for name in args.only or ())
        command = f"python -m benchmarks.chaos --kills {args.kills} --seed {args.seed}{only}"
        about = about_machine() | {"command": command, "load": os.getloadavg()[0]}
        result = about | asyncio.run(played)
    print(text := json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if result["num_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
