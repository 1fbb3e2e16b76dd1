"""Every kind of fault over and over, under a server whose clients must hardly notice.

    python -m benchmarks.server_faults --times 100 --out benchmarks/results/server-faults-DATE.json

A random two-layer model is served by a process of its own, whose steps fail when they are told to
(`benchmarks.faulty_server`). Eight clients stream greedy requests all the while, and every token of
theirs is held to what the same request got when nothing happened. Each fault comes `--times` times.
It fails if a token is wrong, a stream ends in another way than its fault allows or not at all,
health is untrue for longer than a second, or anything is held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.tiny_server import Server, serving, write_tiny_model
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

STREAM = "/octavo.v1.OctavoService/GenerateStream"
SERVING = health_pb2.HealthCheckResponse.SERVING
FAULTY = ("benchmarks.faulty_server",)
NUM_CLIENTS, NUM_PROMPTS = 8, 24
POISON = 200
STUCK_S, SLOW_S = 0.8, 1.4
"""A turn of twice `STUCK_S` would be given up for good."""
APART_S = 0.4
TRUTH_S = 1.0
"""Health may be untrue for so long."""
HANG_S = 60.0
HOST_FULL_S = 900.0
"""The host's tier is full only when several wait at once: so long until it often enough was."""


def message(number: int, num_tokens: int | None = None, poison: bool = False) -> bytes:
    """A greedy request; the same number is the same request."""
    rng = random.Random(number)
    ids = [rng.randrange(2, POISON) for _ in range(rng.randint(4, 60))]
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[*ids, POISON, 3] if poison else ids),
        sampling_params=pb.SamplingParams(
            temperature=0.0, max_tokens=num_tokens or rng.randint(20, 90), ignore_eos=True,
            logit_bias={POISON: -100.0},
        ),
    ).SerializeToString()  # fmt: skip


class Faults:
    """Clients of one server, and what became of their requests.

    Attributes:
        ends: how requests ended: "whole", or a status.
        faults: what must not be.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.channel = grpc.aio.insecure_channel(server.grpc)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []
        self._wanted: dict[int, list[int]] = {}

    async def ask(self, raw: bytes) -> tuple[str, list[int]]:
        """How a stream ended, and the tokens that it gave."""
        token_ids: list[int] = []
        try:
            async with asyncio.timeout(HANG_S):
                async for data in self.channel.unary_stream(STREAM)(raw):
                    token_ids += pb.GenerateResponse.FromString(data).outputs[0].token_ids
        except grpc.aio.AioRpcError as error:
            return error.code().name, token_ids
        except TimeoutError:
            self.faults.append("a stream hung")
            return "HUNG", token_ids
        return "whole", token_ids

    async def learn(self) -> None:
        """What each request gets when nothing happens, one after another."""
        for number in range(NUM_PROMPTS):
            end, self._wanted[number] = await self.ask(message(number))
            assert end == "whole", end

    async def check(self, number: int, allowed: frozenset[str] = frozenset()) -> None:
        """Streams one request and holds it to what it must get."""
        end, token_ids = await self.ask(message(number))
        wanted = self._wanted[number]
        self.ends[end] += 1
        if end == "whole" and token_ids != wanted:
            self.faults.append(f"wrong tokens of request {number}")
        elif end != "whole" and (end not in allowed or token_ids != wanted[: len(token_ids)]):
            self.faults.append(f"request {number} ended as {end}")

    @contextlib.asynccontextmanager
    async def clients(self, allowed: frozenset[str] = frozenset()) -> AsyncIterator[None]:
        """Streams meanwhile; afterwards everything must have been given back."""
        going_on = True

        async def client(number: int) -> None:
            rng = random.Random(number)
            while going_on:
                await self.check(rng.randrange(NUM_PROMPTS), allowed)

        tasks = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            going_on = False
            await asyncio.gather(*tasks)

    async def load(self) -> dict[str, Any]:
        """The engine's figures."""
        async with httpx.AsyncClient(base_url=self.server.http, timeout=HANG_S) as client:
            figures: dict[str, Any] = (await client.get("/v1/load")).json()
            return figures

    async def until(
        self, what: str, condition: Callable[[], Awaitable[bool]], limit_s: float
    ) -> float:
        """Seconds until a condition holds; a fault if it takes longer than allowed."""
        begun_s = time.monotonic()
        while not await condition():
            if time.monotonic() - begun_s > HANG_S:
                break
            await asyncio.sleep(0.02)
        took_s = time.monotonic() - begun_s
        if took_s > limit_s:
            self.faults.append(f"{what} took {took_s:.2f} s")
        return took_s

    async def is_serving(self) -> bool:
        """What health says."""
        answer = await self.health.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
        return bool(answer.status == SERVING)

    async def is_not_serving(self) -> bool:
        """What health says, the other way round."""
        return not await self.is_serving()

    async def is_empty(self) -> bool:
        """Whether no request and no page is held."""
        load = await self.load()
        return bool(
            load["num_running"] == load["num_waiting"] == load["num_inflight"] == 0
            and load["num_free_pages"] == load["num_total_pages"]
        )

    def order(self, line: str) -> None:
        """Tells the server of a fault to come."""
        assert self.server.popen.stdin is not None
        self.server.popen.stdin.write(line + "\n")
        self.server.popen.stdin.flush()

    # Faults. Each comes so many times.

    async def clients_killed(self, times: int) -> None:
        """Processes that end by SIGKILL in the middle of their stream."""
        raw = message(1000, num_tokens=400)
        with tempfile.NamedTemporaryFile() as body:
            body.write(b"\0" + len(raw).to_bytes(4, "big") + raw)
            body.flush()
            for _ in range(times):
                popen = await asyncio.create_subprocess_exec(
                    "curl", "--silent", "--no-buffer", "--http2-prior-knowledge",
                    "--header", "content-type: application/grpc", "--header", "te: trailers",
                    "--data-binary", f"@{body.name}", f"http://{self.server.grpc}{STREAM}",
                    stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                assert popen.stdout is not None
                if not await popen.stdout.read(64):
                    self.faults.append("a client to be killed got nothing")
                popen.kill()
                await popen.communicate()
                self.ends["killed"] += 1

    async def steps_raise(self, times: int) -> None:
        """Steps that raise, at their dispatch and at their result by turns."""
        for number in range(times):
            before = (await self.load())["num_step_failures"]
            self.order(f"raise {('dispatch', 'result')[number % 2]}")

            async def has_failed(before: int = before) -> bool:
                return bool((await self.load())["num_step_failures"] > before)

            await self.until("a step's failure", has_failed, HANG_S)
            # Those of the failed step are tried apart: another fault now is held against them.
            await asyncio.sleep(APART_S)
            if not await self.is_serving():
                self.faults.append("health is NOT_SERVING after a failed step")

    async def numbers_not_finite(self, times: int) -> None:
        """Requests whose own numbers are NaN."""
        for number in range(times):
            end, token_ids = await self.ask(message(2000 + number, 8, poison=True))
            self.ends[f"poisoned: {end}"] += 1
            if end != "INTERNAL" or token_ids:
                self.faults.append(f"a poisoned request ended as {end} with {len(token_ids)}")

    async def slow_steps(self, times: int) -> None:
        """Steps in which the engine hangs for longer than it may."""
        for _ in range(times):
            self.order(f"slow {SLOW_S}")
            await self.until("NOT_SERVING", self.is_not_serving, STUCK_S + TRUTH_S)
            await self.until("SERVING", self.is_serving, SLOW_S - STUCK_S + TRUTH_S)

    async def host_full(self, times: int) -> None:
        """Requests that give way while the host has no room for their pages."""
        end_s = time.monotonic() + HOST_FULL_S
        while time.monotonic() < end_s:
            load = await self.load()
            if min(load["num_swaps"], load["num_preemptions"] - load["num_swaps"]) >= times:
                return
            await asyncio.sleep(0.2)
        self.faults.append(f"too few gave way: {load['num_swaps']} of {load['num_preemptions']}")


ROUNDS: dict[str, tuple[str, ...]] = {
    "clients_killed": (),
    "steps_raise": (),
    "numbers_not_finite": (),
    "slow_steps": ("--stuck-after-s", str(STUCK_S)),
    # Eight rows of up to ten pages do not fit 40, and the host has room for about two.
    "host_full": ("--cheap-copies", "--num-kv-pages", "40", "--host-kv-memory-bytes", "20000"),
}


async def play(server: Server, kind: str, times: int) -> dict[str, Any]:
    """One kind of fault, and what came of it."""
    faults = Faults(server)
    await faults.learn()
    begun_s = time.monotonic()
    async with faults.clients():
        await getattr(faults, kind)(times)
    await faults.until("being empty", faults.is_empty, 10.0)
    load = await faults.load()
    await faults.channel.close()
    if server.popen.poll() is not None:
        faults.faults.append(f"the server ended: {server.popen.returncode}")
    names = ("num_step_failures", "num_quarantined", "num_preemptions", "num_swaps")
    return {
        "times": times,
        "seconds": round(time.monotonic() - begun_s, 1),
        "ends": dict(sorted(faults.ends.items())),
        "engine": {name: load[name] for name in names},
        "faults": faults.faults[:20],
        "num_faults": len(faults.faults),
    }


def processes(model: Path, times: int) -> dict[str, Any]:
    """Servers that are ended under load, by SIGTERM and SIGKILL by turns, and started again."""
    found: dict[str, Any] = {"SIGTERM": 0, "SIGKILL": 0, "ends": Counter(), "faults": []}
    wanted: dict[int, list[int]] = {}

    async def end(server: Server, number: int) -> None:
        faults = Faults(server)
        if not await faults.is_serving():
            faults.faults.append("a server that says it is ready is NOT_SERVING")
        if not wanted:
            await faults.learn()
            wanted.update(faults._wanted)
        faults._wanted = wanted
        how = signal.SIGKILL if number % 2 else signal.SIGTERM
        allowed = frozenset(("UNAVAILABLE",) if how is signal.SIGKILL else ())
        begun = [
            asyncio.create_task(faults.check(n % NUM_PROMPTS, allowed))
            for n in range(number, number + NUM_CLIENTS)
        ]
        await asyncio.sleep(random.Random(number).uniform(0.0, 0.1))
        # What has not reached the server yet would be refused, rightly.
        while (await faults.load())["num_inflight"] + sum(faults.ends.values()) < NUM_CLIENTS:
            await asyncio.sleep(0.002)
        server.popen.send_signal(how)
        if how is signal.SIGTERM:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it may have gone already
                await faults.until("NOT_SERVING", faults.is_not_serving, TRUTH_S)
        await asyncio.gather(*begun)
        status = await asyncio.to_thread(server.popen.wait, HANG_S)
        if status != (0 if how is signal.SIGTERM else -signal.SIGKILL):
            faults.faults.append(f"{how.name}: exit status {status}")
        await faults.channel.close()
        found[how.name] += 1
        found["ends"].update({f"{how.name}: {k}": v for k, v in faults.ends.items()})
        found["faults"] += faults.faults

    begun_s = time.monotonic()
    for number in range(times):
        with serving(model, ("--warm-up", "coarse")) as server:
            asyncio.run(end(server, number))
    found["num_faults"], found["faults"] = len(found["faults"]), found["faults"][:20]
    return found | {"seconds": round(time.monotonic() - begun_s, 1)}


def main() -> int:
    """Plays from the command line; 1 if anything slipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--only", choices=(*ROUNDS, "processes"), action="append")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder), poison=POISON)
        for kind, options in ROUNDS.items():
            if args.only is None or kind in args.only:
                with serving(model, options, FAULTY) as server:
                    result[kind] = asyncio.run(play(server, kind, args.times))
                print(kind, json.dumps(result[kind]), flush=True)
        if args.only is None or "processes" in args.only:
            result["processes"] = processes(model, 2 * args.times)
            print("processes", json.dumps(result["processes"]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(round["num_faults"] for round in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
