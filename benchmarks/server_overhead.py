"""What the gRPC server adds to the engine, measured where the device costs nothing.

    python -m benchmarks.server_overhead --out benchmarks/results/server-overhead-DATE.json

The engine is the real one with a tiny model's tokenizer; in the place of the device stands a clock
(`paced_engine`) that ends 20,000 tokens a second, without using a core meanwhile. The same requests
go through `LLM.generate` in one process and through gRPC streams into another, in turns, so that
both see the same machine: all at once for the throughput, as many as rows at a time for the times
that are added. Their lengths differ, as in life: of one length, 32 streams would end and begin in
one step for ever. Beside each run stands what the engine's thread waited for (`step_waits`). Then
1,000 streams are opened, most of which wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.machine import about_machine, write_result
from benchmarks.paced_engine import (
    NUM_REQUESTS,
    NUM_TOKENS,
    all_tokens,
    make_engine,
    num_tokens_of,
    prompt_of,
)
from benchmarks.server_soak import resident_bytes
from benchmarks.step_waits import CollectorPauses, percentiles
from benchmarks.tiny_server import write_tiny_model
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

STREAM = "/octavo.v1.OctavoService/GenerateStream"


# In the processes that have an engine.


def direct(model: Path, rows: int, tokens_per_s: float) -> None:
    """All requests through `LLM.generate`, once for each line read."""
    from octavo.engine.llm import LLM
    from octavo.engine.sampling_params import SamplingParams

    llm = LLM.__new__(LLM)
    llm.engine = make_engine(model, rows, tokens_per_s)
    prompts = [prompt_of(number) for number in range(NUM_REQUESTS)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_tokens_of(number), ignore_eos=True)
        for number in range(NUM_REQUESTS)
    ]
    waits = llm.engine.executor.waits  # type: ignore[attr-defined]
    collector = CollectorPauses()
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        waits.clear()
        collector.clear()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        seconds = time.perf_counter() - begun_s
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == all_tokens()
        answer = {
            "tokens_per_s": round(all_tokens() / seconds, 1),
            "cpu_s": round(time.process_time() - cpu_s, 3),
            "engine_thread": waits.summary(),
            "collector": collector.summary(),
        }
        print(json.dumps(answer), flush=True)
    llm.close()


async def serve(model: Path, rows: int, tokens_per_s: float) -> None:
    """A gRPC server over such an engine; a line read is answered with what was since the last."""
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.serve import OctavoServer
    from octavo.server.serve_config import ServeConfig

    engine = make_engine(model, rows, tokens_per_s)
    server = OctavoServer(ServeConfig(grpc_port=0))
    addresses = await server.bind()
    served = AsyncEngine(engine=engine)
    await server.attach(served)
    assert served._thread is not None
    clock = time.pthread_getcpuclockid(served._thread.ident or 0)

    def cpu_s() -> dict[str, float]:
        return {
            "process": time.process_time(),
            "engine_thread": time.clock_gettime(clock),
            "event_loop": time.thread_time(),
        }

    print(json.dumps({"address": addresses.grpc}), flush=True)
    loop = asyncio.get_running_loop()
    collector = CollectorPauses()
    before = cpu_s()
    while await loop.run_in_executor(None, sys.stdin.readline):
        after = cpu_s()
        answer = {
            "server_cpu_s": {name: round(after[name] - before[name], 3) for name in after},
            "engine_thread": engine.executor.waits.summary() if engine.executor.waits.turns else {},
            "collector": collector.summary(),
        }
        collector.clear()
        engine.executor.waits.clear()
        before = cpu_s()
        print(json.dumps(answer), flush=True)


class Worker:
    """A process with an engine in it that answers lines."""

    def __init__(self, kind: str, model: Path, rows: int, tokens_per_s: float) -> None:
        command = [sys.executable, "-m", "benchmarks.server_overhead", kind, str(model)]
        command += ["--rows", str(rows), "--tokens-per-s", str(tokens_per_s)]
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hello = self._read()

    def ask(self) -> dict[str, Any]:
        """Sends a line and waits for its answer."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        answer: dict[str, Any] = json.loads(self.popen.stdout.readline())
        return answer


@contextlib.contextmanager
def working(kind: str, model: Path, rows: int, tokens_per_s: float) -> Iterator[Worker]:
    """A worker until the block's end."""
    worker = Worker(kind, model, rows, tokens_per_s)
    try:
        yield worker
    finally:
        worker.popen.kill()
        worker.popen.communicate()


# In the client's process.


async def streams(address: str, at_once: int) -> dict[str, Any]:
    """The same requests over so many streams at a time."""
    ttft_s: list[float] = []
    token_s: list[float] = []
    num_messages = 0
    requests = iter(
        [
            (
                pb.GenerateRequest(
                    prompt_token_ids=pb.TokenIds(ids=prompt_of(number)),
                    sampling_params=pb.SamplingParams(
                        temperature=0.0, max_tokens=num_tokens_of(number), ignore_eos=True
                    ),
                ).SerializeToString(),
                num_tokens_of(number),
            )
            for number in range(NUM_REQUESTS)
        ]
    )
    last: list[tuple[float, float, float, int, bytes]] = []

    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(STREAM)

        async def client() -> None:
            nonlocal num_messages
            for request, num_tokens in requests:
                begun_s = time.perf_counter()
                first_s, raw = 0.0, b""
                async for part in call(request):
                    raw = part
                    first_s = first_s or time.perf_counter()
                    num_messages += 1
                last.append((begun_s, first_s, time.perf_counter(), num_tokens, raw))

        begun_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(client() for _ in range(at_once)))
        seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    for begun_s, first_s, end_s, num_tokens, raw in last:
        answer = pb.GenerateResponse.FromString(raw)
        assert answer.usage.completion_tokens == num_tokens
        timings = answer.timings
        ttft_s.append(first_s - begun_s - timings.first_token_s)
        engine_s = timings.last_token_s - timings.first_token_s
        token_s.append((end_s - first_s - engine_s) / (num_tokens - 1))
    return {
        "streams_at_once": at_once,
        "tokens_per_s": round(all_tokens() / seconds, 1),
        "tokens_per_message": round(all_tokens() / num_messages, 2),
        "added_ttft_ms": percentiles(ttft_s),
        "added_ms_per_token": percentiles(token_s),
        "client_cpu_s": round(cpu_s, 3),
    }


async def idle(address: str, pid: int, count: int = 1000) -> dict[str, float]:
    """Memory of the server with and without so many streams that wait."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=prompt_of(0)),
            sampling_params=pb.SamplingParams(max_tokens=64, ignore_eos=True),
        ).SerializeToString()

        async def one() -> None:
            async for _ in channel.unary_stream(STREAM)(request):
                pass

        before = resident_bytes(pid)
        tasks = [asyncio.create_task(one()) for _ in range(count)]
        call = channel.unary_unary("/octavo.v1.OctavoService/GetLoad")
        for _ in range(300):
            load = pb.GetLoadResponse.FromString(await call(b""))
            if load.num_running + load.num_waiting >= count:
                break
            await asyncio.sleep(0.1)
        after = resident_bytes(pid)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    held = load.num_running + load.num_waiting
    return {"streams": held, "added_mb": round((after - before) / 1e6, 1)}


def over_grpc(server: Worker, at_once: int) -> dict[str, Any]:
    """One run of all requests, with what the server's process tells of it."""
    server.ask()
    return asyncio.run(streams(server.hello["address"], at_once)) | server.ask()


def pairs(model: Path, rows: int, tokens_per_s: float, count: int) -> dict[str, Any]:
    """So many runs through `LLM.generate` and as many over gRPC, in turns."""
    with (
        working("--direct", model, rows, tokens_per_s) as alone,
        working("--serve", model, rows, tokens_per_s) as server,
    ):
        alone.ask()
        over_grpc(server, rows)  # what is done once is done
        runs = []
        for _ in range(count):
            run = {"llm_generate": alone.ask(), "all_at_once": over_grpc(server, NUM_REQUESTS)}
            run["few"] = over_grpc(server, rows)
            runs.append(run)
            share = run["all_at_once"]["tokens_per_s"] / run["llm_generate"]["tokens_per_s"]
            run["grpc_share"] = round(share, 4)
            ttft_ms = run["few"]["added_ttft_ms"]["p50"]
            print(f"{rows} rows: {share:.3f}, {ttft_ms} ms", file=sys.stderr)
    shares = [run["grpc_share"] for run in runs]
    return {
        "rows": rows,
        "grpc_share": {"median": statistics.median(shares), "least": min(shares), "each": shares},
        "added_ttft_p50_ms": [run["few"]["added_ttft_ms"]["p50"] for run in runs],
        "runs": runs,
    }


def main() -> int:
    """Measures from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens-per-s", type=float, default=20_000)
    parser.add_argument("--pairs", type=int, nargs="+", default=[6, 3], help="for each of --rows")
    parser.add_argument("--no-idle", action="store_true", help="leave out the idle streams")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--direct", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve, args.rows[0], args.tokens_per_s))
        return 0
    if args.direct is not None:
        direct(args.direct, args.rows[0], args.tokens_per_s)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        result: dict[str, Any] = {
            "machine": about_machine(),
            "requests": NUM_REQUESTS,
            "tokens_each": NUM_TOKENS,
            "device_tokens_per_s": args.tokens_per_s,
            "pairs": [
                pairs(model, rows, args.tokens_per_s, count)
                for rows, count in zip(args.rows, args.pairs, strict=False)
            ],
        }
        if not args.no_idle:
            with working("--serve", model, args.rows[0], args.rows[0] / 0.5) as server:
                result["idle_streams"] = asyncio.run(
                    idle(server.hello["address"], server.popen.pid)
                )
    write_result(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
