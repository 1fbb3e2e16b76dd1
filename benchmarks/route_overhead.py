"""What `octavo route` adds to the server behind it, measured where the device costs nothing.

    python -m benchmarks.route_overhead --out benchmarks/results/route-overhead-DATE.json

The server has the real engine over a clock (`paced_engine`), as in `server_overhead`. The same
requests, 32 streams at a time, go to it straight and through a front, in turns, so that both see
the same machine. What a stream's token takes is from its first to its last, as its reader sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.machine import about_machine, write_result
from benchmarks.paced_engine import num_tokens_of, prompt_of
from benchmarks.server_overhead import STREAM, Worker, working
from benchmarks.step_waits import percentiles
from benchmarks.tiny_server import FREE_PORTS, Server, start, write_tiny_model
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

NUM_STREAMS = 32


async def streams(address: str, num_requests: int) -> dict[str, Any]:
    """So many requests, `NUM_STREAMS` of them at a time."""
    token_s: list[float] = []
    ttft_s: list[float] = []
    num_messages = 0
    numbers = iter(range(num_requests))
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(STREAM)

        async def client() -> None:
            nonlocal num_messages
            for number in numbers:
                num_tokens = num_tokens_of(number)
                request = pb.GenerateRequest(
                    prompt_token_ids=pb.TokenIds(ids=prompt_of(number)),
                    sampling_params=pb.SamplingParams(
                        temperature=0.0, max_tokens=num_tokens, ignore_eos=True
                    ),
                ).SerializeToString()
                begun_s, first_s, raw = time.perf_counter(), 0.0, b""
                async for part in call(request):
                    raw = part
                    first_s = first_s or time.perf_counter()
                    num_messages += 1
                token_s.append((time.perf_counter() - first_s) / (num_tokens - 1))
                ttft_s.append(first_s - begun_s)
                assert pb.GenerateResponse.FromString(raw).usage.completion_tokens == num_tokens

        begun_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(client() for _ in range(NUM_STREAMS)))
        seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    num_tokens = sum(map(num_tokens_of, range(num_requests)))
    return {
        "tokens_per_s": round(num_tokens / seconds, 1),
        "tokens_per_message": round(num_tokens / num_messages, 2),
        "ms_per_token": percentiles(token_s),
        "ttft_ms": percentiles(ttft_s),
        "client_cpu_s": round(cpu_s, 3),
    }


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process took so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def pairs(model: Path, tokens_per_s: float, count: int, seconds: float) -> dict[str, Any]:
    """So many runs straight to a server and as many through a front, in turns."""
    num_requests = max(2 * NUM_STREAMS, int(seconds * tokens_per_s / 128))
    runs: list[dict[str, Any]] = []
    with working("--serve", model, NUM_STREAMS, tokens_per_s) as server:
        words = ("--model", str(model), "--backend", server.hello["address"], *FREE_PORTS)
        front = start(("octavo.server.cli.main", "route", *words), model / "front.log")
        try:
            for number in range(count + 1):
                run = _pair(server, front, num_requests, is_front_first=number % 2 == 1)
                if number:  # what is done once is done in the first
                    runs.append(run)
                print(f"{tokens_per_s:g} tokens/s: {_summary([run])}", file=sys.stderr)
        finally:
            front.end()
    return {"device_tokens_per_s": tokens_per_s, "requests": num_requests} | {
        **_summary(runs), "runs": runs,
    }  # fmt: skip


def _pair(
    server: Worker, front: Server, num_requests: int, *, is_front_first: bool
) -> dict[str, Any]:
    run: dict[str, Any] = {}
    for name in ("front", "straight") if is_front_first else ("straight", "front"):
        address = front.grpc if name == "front" else server.hello["address"]
        server.ask()
        before_s = cpu_s(front.popen.pid)
        run[name] = asyncio.run(streams(address, num_requests)) | server.ask()
        run[name]["front_cpu_s"] = round(cpu_s(front.popen.pid) - before_s, 2)
    return run


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of pairs: throughput through the front over that without, and milliseconds a token more."""
    shares = [run["front"]["tokens_per_s"] / run["straight"]["tokens_per_s"] for run in runs]
    added = [
        run["front"]["ms_per_token"]["p50"] - run["straight"]["ms_per_token"]["p50"] for run in runs
    ]
    return {
        name: {
            "median": round(statistics.median(values), 4),
            "least": round(min(values), 4),
            "most": round(max(values), 4),
        }
        for name, values in (("share", shares), ("added_ms_per_token", added))
    }


def main() -> int:
    """Measures from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens-per-s", type=float, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="that a run takes at best")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        result = about_machine() | {
            "streams": NUM_STREAMS,
            "rates": [pairs(model, rate, args.pairs, args.seconds) for rate in args.tokens_per_s],
        }
    write_result(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
