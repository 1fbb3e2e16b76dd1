"""One sane client in a process of its own: the same greedy stream over and over.

    python -m benchmarks.fuzz_watch ADDRESS      until its standard input ends; prints a JSON line

Beside whoever fuzzes, in another process, so that a slow fuzzer is not taken for a slow server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field

import grpc

from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

STREAM = "/octavo.v1.OctavoService/GenerateStream"
NUM_TOKENS = 64


@dataclass(slots=True)
class Watched:
    """What the client saw.

    Attributes:
        streams: whole ones.
        gaps_ms: waits between two messages of a stream, or from its begin to its first.
        first_ms: the latter alone.
        late_ms: how late this process itself came to run in the worst case of each second: what
            of the gaps may be the machine's.
        faults: what must not be.
    """

    streams: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


async def watch(address: str, until: asyncio.Event) -> Watched:
    """Streams until told to end."""
    seen = Watched()
    ticking = asyncio.create_task(_tick(seen))
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=[40, 41, 42, 43]),
        priority=pb.PRIORITY_REALTIME,
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    ).SerializeToString()
    reference: list[int] | None = None
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(STREAM)
        while not until.is_set():
            token_ids: list[int] = []
            last_s = time.monotonic()
            try:
                async for raw in call(request):
                    now_s = time.monotonic()
                    seen.gaps_ms.append((now_s - last_s) * 1e3)
                    last_s = now_s
                    if not token_ids:
                        seen.first_ms.append(seen.gaps_ms[-1])
                    token_ids += pb.GenerateResponse.FromString(raw).outputs[0].token_ids
            except grpc.aio.AioRpcError as error:
                seen.faults.append(f"the well-behaved stream ended: {error.details()}")
                break
            reference = reference or token_ids
            if token_ids != reference or len(token_ids) != NUM_TOKENS:
                seen.faults.append("the well-behaved stream got other tokens")
            seen.streams += 1
    ticking.cancel()
    return seen


async def _tick(seen: Watched, every_s: float = 0.005) -> None:
    while True:
        worst_s, end_s = 0.0, time.monotonic() + 1.0
        while (begun_s := time.monotonic()) < end_s:
            await asyncio.sleep(every_s)
            worst_s = max(worst_s, time.monotonic() - begun_s - every_s)
        seen.late_ms.append(worst_s * 1e3)


async def main(address: str) -> None:
    """Watches until standard input ends."""
    until = asyncio.Event()
    watching = asyncio.create_task(watch(address, until))
    await asyncio.to_thread(sys.stdin.read)
    until.set()
    print(json.dumps(asdict(await watching)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
