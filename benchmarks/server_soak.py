"""Keeps a live server at 1.5 times its capacity, and holds it to what must never slip.

    python -m benchmarks.server_soak --seconds 1800 --out benchmarks/results/server-soak-DATE.json

A random two-layer model is served by a process of its own, on a device that takes 20 ms a step
(`benchmarks.faulty_server --paced`): it must be the device that is short, as the clients' own time
would otherwise be what is measured. What it can do is measured first by as many clients as it has
rows. Then requests come at 1.5 times that rate, as they please (Poisson): some leave, some have
deadlines. It fails if a request does not end in exactly one way, a status says that the server is
at fault, memory in the last third of the time is more than 2% above the second's, refusals take
longer than 50 ms (p99), anything is held at the end, or health was ever not SERVING.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.tiny_server import Server, held_at_the_end, serving, write_tiny_model
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

STREAM = "/octavo.v1.OctavoService/GenerateStream"
HONEST = frozenset(("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED"))
LIMIT = 64
"""Requests that the server takes at once: what comes above is refused."""
MEMORY_SLACK = 1.02
REFUSAL_MS = 50.0
"""For 99 of 100 refusals."""


@dataclass(slots=True)
class Tally:
    """What became of requests.

    Attributes:
        ends: how requests ended.
        refused_ms: how long refusals took.
        faults: what must not be.
        memory: (seconds, resident bytes) of the server.
    """

    ends: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} tells no VmRSS")


class Soak:
    """One server under load."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._channel = grpc.aio.insecure_channel(server.grpc)
        self.tally = Tally()

    async def capacity(self, seconds: float, clients: int = 16) -> float:
        """Requests a second that the server ends when it always has some waiting."""
        end_s, count = time.monotonic() + seconds, 0

        async def client() -> None:
            nonlocal count
            while time.monotonic() < end_s:
                await self._one(patient=True)
                count += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        return count / seconds

    async def overload(self, rate: float, seconds: float) -> None:
        """Requests at a rate, until the time is over and all have ended."""
        self.tally = Tally()
        tasks: set[asyncio.Task[None]] = set()
        begun_s = next_s = time.monotonic()
        watching = asyncio.create_task(self._watch(begun_s))
        while next_s < begun_s + seconds:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            task = asyncio.create_task(self._one(patient=False))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            next_s += self._rng.expovariate(rate)
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if held := await held_at_the_end(self._channel):
            self.tally.faults.append(held)
        await self._channel.close()

    async def _one(self, patient: bool) -> None:
        rng = self._rng
        num_output = rng.randint(4, 48)
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(
                ids=[rng.randrange(2, 250) for _ in range(rng.randint(4, 120))]
            ),
            priority=rng.randint(1, 4),
            sampling_params=pb.SamplingParams(
                max_tokens=num_output, ignore_eos=True, temperature=rng.choice((0.0, 0.8))
            ),
        )
        leaves = not patient and rng.random() < 0.1
        if not patient and rng.random() < 0.1:
            request.timeout_s = rng.uniform(0.05, 2.0)
        begun_s, num_tokens, num_ends = time.monotonic(), 0, 0
        call = self._channel.unary_stream(STREAM)(request.SerializeToString())
        try:
            async for raw in call:
                answer = pb.GenerateResponse.FromString(raw)
                num_tokens += len(answer.outputs[0].token_ids)
                num_ends += answer.finished
                if leaves and num_tokens > num_output // 2:
                    call.cancel()
                    break
            end = "left" if leaves and not num_ends else "finished"
        except asyncio.CancelledError:
            end = "left"
        except grpc.aio.AioRpcError as error:
            end = error.code().name
            if end == "RESOURCE_EXHAUSTED":
                self.tally.refused_ms.append((time.monotonic() - begun_s) * 1e3)
            if end not in HONEST:
                self.tally.faults.append(f"{end}: {error.details()}")
        if end == "finished" and (num_ends != 1 or num_tokens != num_output):
            self.tally.faults.append(f"{num_ends} ends, {num_tokens} of {num_output} tokens")
        self.tally.ends[end] += 1

    async def _watch(self, begun_s: float) -> None:
        health = health_pb2_grpc.HealthStub(self._channel)
        while True:
            self.tally.memory.append(
                (time.monotonic() - begun_s, resident_bytes(self._server.popen.pid))
            )
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                self.tally.faults.append("health was not SERVING")
            await asyncio.sleep(1.0)


def memory_of_thirds(memory: list[tuple[float, int]]) -> list[float]:
    """Median resident megabytes in each third of the time."""
    total_s = memory[-1][0] or 1.0
    thirds: list[list[int]] = [[], [], []]
    for at_s, size in memory:
        thirds[min(2, int(3 * at_s / total_s))].append(size)
    return [round(statistics.median(third or [0]) / 1e6, 2) for third in thirds]


def report(tally: Tally, rate: float, seconds: float) -> dict[str, Any]:
    """What goes into the result file."""
    thirds = memory_of_thirds(tally.memory)
    refused = sorted(tally.refused_ms)
    faults = list(tally.faults)
    if thirds[2] > thirds[1] * MEMORY_SLACK:
        faults.append(f"memory grew: {thirds} MB")
    refused_p99_ms = refused[int(len(refused) * 0.99)] if refused else 0.0
    if refused_p99_ms > REFUSAL_MS:
        faults.append(f"refusals took {refused_p99_ms:.0f} ms")
    return {
        "seconds": seconds,
        "capacity_per_s": round(rate, 1),
        "offered_per_s": round(sum(tally.ends.values()) / seconds, 1),
        "ends": dict(sorted(tally.ends.items())),
        "refused_p99_ms": round(refused_p99_ms, 2),
        "memory_mb_by_third": thirds,
        "faults": faults[:20],
        "num_faults": len(faults),
    }


def main() -> int:
    """Soaks from the command line; 1 if anything slipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--load", type=float, default=1.5, help="times the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    async def soak(server: Server) -> tuple[Tally, float]:
        soaked = Soak(server, args.seed)
        await soaked.capacity(3.0)
        rate = await soaked.capacity(10.0)
        await soaked.overload(args.load * rate, args.seconds)
        return soaked.tally, rate

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        limit = ("--max-concurrent-requests", str(LIMIT))
        with serving(model, ("--paced", *limit), ("benchmarks.faulty_server",)) as server:
            tally, rate = asyncio.run(soak(server))
            if server.popen.poll() is not None:
                tally.faults.append(f"the server ended: {server.popen.returncode}")
    result = report(tally, rate, args.seconds)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
