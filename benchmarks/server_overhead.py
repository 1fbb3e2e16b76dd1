"""What the gRPC server adds to the engine, measured where the device costs nothing.

    python -m benchmarks.server_overhead --out benchmarks/results/server-overhead-DATE.json

The engine is the real one with a tiny model's tokenizer; in the place of the device stands a clock
that ends a step of 32 rows every 1.6 ms: 20,000 tokens a second, without using a core meanwhile.
The same requests go through `Engine.step` directly (as `LLM.generate` drives it) and through gRPC
streams from another process: all at once for the throughput, 32 at a time for the times that are
added. Their lengths differ, as in life: of one length, 32 streams would end and begin in one step
for ever. Then 1,000 streams are opened, most of which wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server_soak import resident_bytes
from benchmarks.tiny_server import write_tiny_model
from octavo.engine.scheduler.step_plan import RowTokens, StepPlan, StepResult, TokenRows
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

ROWS = 32
NUM_REQUESTS, NUM_TOKENS, PROMPT = 512, (64, 192), 16
STREAM = "/octavo.v1.OctavoService/GenerateStream"


class PacedExecutor:
    """Ends an iteration so many seconds after the one before it; every token is the same."""

    def __init__(self, inner: Any, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self._free_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s * plan.num_steps
        return plan, self._free_s

    def result(self, handle: tuple[StepPlan, float]) -> StepResult:
        plan, end_s = handle
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        counts = plan.decode_rows.max_new_tokens.tolist()
        others = [RowTokens((60,) if row.samples else ()) for row in plan.prefill_rows]
        rows: Any = [*(RowTokens((60,) * count) for count in counts), *others]
        if plan.num_steps == 1:
            rows = TokenRows([60] * len(counts), others)
        return StepResult(rows=rows, duration_s=self._step_s * plan.num_steps)

    def poll_transfers(self) -> list[Any]:
        return []


def make_engine(model: Path, step_s: float) -> Any:
    """The real engine over a paced device."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=str(model), max_num_seqs=ROWS, max_num_batched_tokens=512, max_model_len=256,
            num_kv_pages=2 * ROWS * 256 // 16, block_size=16, warm_up="coarse",
        )
    )  # fmt: skip
    engine.executor = engine.core.executor = PacedExecutor(engine.executor, step_s)  # type: ignore[assignment]
    return engine


def prompt_of(number: int) -> list[int]:
    """Its prompt's token ids."""
    rng = random.Random(number)
    return [rng.randrange(2, 250) for _ in range(PROMPT)]


def num_tokens_of(number: int) -> int:
    """How many tokens it asks for."""
    return random.Random(-1 - number).randint(*NUM_TOKENS)


def all_tokens() -> int:
    """Tokens of all requests."""
    return sum(num_tokens_of(number) for number in range(NUM_REQUESTS))


def direct(model: Path, step_s: float) -> float:
    """Tokens a second through the engine alone."""
    from octavo.engine.sampling_params import SamplingParams

    engine = make_engine(model, step_s)
    rates = []
    for _ in range(2):
        begun_s = time.perf_counter()
        for number in range(NUM_REQUESTS):
            most = num_tokens_of(number)
            params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
            engine.submit(
                engine.inputs.process(
                    str(number), prompt_of(number), params, now_s=engine.clock.now_s()
                )
            )
        while engine.has_unfinished:
            engine.step()
        rates.append(all_tokens() / (time.perf_counter() - begun_s))
    engine.close()
    return max(rates)


async def serve(model: Path, step_s: float) -> None:
    """A gRPC server over such an engine; prints its address."""
    from octavo.engine import async_engine
    from octavo.server.serve import OctavoServer
    from octavo.server.serve_config import ServeConfig

    engine = make_engine(model, step_s)
    async_engine.Engine = lambda config, progress: engine  # type: ignore[assignment, misc]
    server = OctavoServer(ServeConfig(grpc_port=0))
    addresses = await server.bind()
    await server.attach(async_engine.AsyncEngine())
    print(addresses.grpc, flush=True)
    await asyncio.Event().wait()


async def streams(address: str, at_once: int) -> dict[str, Any]:
    """The same requests over so many streams at a time."""
    import grpc

    ttft_ms: list[float] = []
    token_ms: list[float] = []
    numbers = iter(range(NUM_REQUESTS))

    async with grpc.aio.insecure_channel(address) as channel:

        async def client() -> None:
            for number in numbers:
                request = pb.GenerateRequest(
                    prompt_token_ids=pb.TokenIds(ids=prompt_of(number)),
                    sampling_params=pb.SamplingParams(
                        temperature=0.0, max_tokens=num_tokens_of(number), ignore_eos=True
                    ),
                )
                begun_s = time.perf_counter()
                first_s = 0.0
                async for raw in channel.unary_stream(STREAM)(request.SerializeToString()):
                    first_s = first_s or time.perf_counter()
                    answer = raw
                end_s = time.perf_counter()
                timings = pb.GenerateResponse.FromString(answer).timings
                ttft_ms.append((first_s - begun_s) * 1e3 - timings.first_token_s * 1e3)
                engine_s = timings.last_token_s - timings.first_token_s
                token_ms.append(((end_s - first_s) - engine_s) * 1e3 / (num_tokens_of(number) - 1))

        begun_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(at_once)))
        seconds = time.perf_counter() - begun_s
    return {
        "streams_at_once": at_once,
        "tokens_per_s": round(all_tokens() / seconds, 1),
        "added_ttft_ms": {"p50": _share(ttft_ms, 0.5), "p99": _share(ttft_ms, 0.99)},
        "added_ms_per_token": {"p50": _share(token_ms, 0.5), "p99": _share(token_ms, 0.99)},
    }


async def idle(address: str, pid: int, count: int = 1000) -> dict[str, float]:
    """Memory of the server with and without so many streams that wait."""
    import grpc

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


def in_process(model: Path, step_s: float, *, idles: bool) -> dict[str, Any]:
    """Runs the server in a process of its own, and one of the clients in this one."""
    command = [sys.executable, "-m", "benchmarks.server_overhead", "--serve", str(model)]
    command += ["--step-s", str(step_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stdout is not None
            address = popen.stdout.readline().strip()
            if idles:
                return asyncio.run(idle(address, popen.pid))
            asyncio.run(streams(address, ROWS))
            return {
                "all_at_once": asyncio.run(streams(address, NUM_REQUESTS)),
                "few": asyncio.run(streams(address, ROWS)),
            }
        finally:
            popen.kill()


def _share(values: list[float], share: float) -> float:
    return round(float(np.quantile(values, share)), 3)


def main() -> int:
    """Measures from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-s", type=float, default=ROWS / 20_000)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve, args.step_s))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        alone = direct(model, args.step_s)
        over_grpc = in_process(model, args.step_s, idles=False)
        waiting = in_process(model, 0.5, idles=True)
    result = {
        "requests": NUM_REQUESTS, "tokens_each": NUM_TOKENS,
        "device_tokens_per_s": round(ROWS / args.step_s),
        "engine_tokens_per_s": round(alone, 1), "grpc": over_grpc,
        "grpc_share": round(over_grpc["all_at_once"]["tokens_per_s"] / alone, 3),
        "idle_streams": waiting,
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
