"""The sane clients beside a hostile one: a greedy stream over gRPC, and a probe of /health.

    python -m benchmarks.hostile.watch HTTP GRPC TOKEN    until its standard input ends

In a process of its own, so that a busy attacker is not taken for a slow server. For each line on
standard input it prints a JSON line: what was seen since the last one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import grpc

from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

STREAM = "/octavo.v1.OctavoService/GenerateStream"
NUM_TOKENS = 256
PROBE_S = 0.05


@dataclass(slots=True)
class Seen:
    """What they saw.

    Attributes:
        gaps: between messages of a stream: when each ended, in seconds of the machine's monotonic
            clock, and its milliseconds.
        health_ms: of probes, each over a connection of its own.
        late_ms: how late this process itself came to run, at worst: the machine's part of a gap.
        faults: what must not be.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    late_ms: float = 0.0
    faults: list[str] = field(default_factory=list)

    def and_then(self, later: Seen) -> Seen:
        """Both together."""
        return Seen(
            self.gaps + later.gaps,
            self.health_ms + later.health_ms,
            max(self.late_ms, later.late_ms),
            self.faults + later.faults,
        )


async def _stream(address: str, token: str, seen: Seen) -> None:
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[40, 41, 42, 43]),
        priority=pb.PRIORITY_REALTIME,
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    ).SerializeToString()
    async with grpc.aio.insecure_channel(address) as channel:
        while True:
            last_s = None
            call = channel.unary_stream(STREAM)(
                request, metadata=[("authorization", f"Bearer {token}")]
            )
            try:
                async for _ in call:
                    now_s = time.monotonic()
                    if last_s is not None:
                        seen.gaps.append((now_s, (now_s - last_s) * 1e3))
                    last_s = now_s
            except grpc.aio.AioRpcError as error:
                is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                if is_full and last_s is None:
                    await asyncio.sleep(1.0)  # not begun: a full server may refuse whoever comes
                    continue
                seen.faults.append(f"the stream ended: {error.code().name} {error.details()}")
                await asyncio.sleep(0.1)


async def _probe(url: str, seen: Seen) -> None:
    where = urlsplit(url)
    while True:
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(30):
                reader, writer = await asyncio.open_connection(where.hostname, where.port)
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                line = await reader.readline()
                writer.close()
            if b" 200 " not in line:
                seen.faults.append(f"/health says {line!r}")
        except (OSError, TimeoutError) as error:
            seen.faults.append(f"/health: {error!r}")
        took_s = time.monotonic() - begun_s
        seen.health_ms.append(took_s * 1e3)
        await asyncio.sleep(max(0.0, PROBE_S - took_s))


async def _tick(seen: Seen) -> None:
    while True:
        begun_s = time.monotonic()
        await asyncio.sleep(0.005)
        seen.late_ms = max(seen.late_ms, (time.monotonic() - begun_s - 0.005) * 1e3)


async def main(url: str, address: str, token: str) -> None:
    """Watches until standard input ends."""
    seen = Seen()
    work = [_stream(address, token, seen), _probe(url, seen), _tick(seen)]
    tasks = [asyncio.create_task(part) for part in work]
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(asdict(seen)), flush=True)
        seen.gaps.clear()
        seen.health_ms.clear()
        seen.faults.clear()
        seen.late_ms = 0.0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
