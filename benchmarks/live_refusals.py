"""Are live refusals right, and first tokens predicted? A live server, asked over HTTP and gRPC.

    python benchmarks/live_refusals.py [--short] [--parts "idle loads ..."] [--output FILE.json]

Parts, each on a fresh server of the packaged model whose log is recorded:

- `idle`: one request at a time, with targets of 1.5, 2 and 4 times the idle server's first token;
- `loads`: Poisson arrivals at 0.5, 1, 1.5 and 3 times what the server can do, with a target of
  four times the idle first token; wrong refusals by the server's probes and by its log;
- `noisy`: the server starts beside six spinning processes that end before the targets come;
- `compile`: targets while the better programs still compile in the background;
- `stolen`: six spinning processes take the cores for 30 s between targeted requests;
- `pause`: nothing for a minute (what fades with time has faded after five seconds, so that an
  hour is no more);
- `targeted`: targeted requests alone, from the first on;
- `returns`: a crowd whose refused clients come back when they are told to.

The file is long because each part is short and all of them use one server, one client and one set
of figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from machine import about_machine

from octavo.client import (
    AsyncOctavoClient,
    OverloadedError,
    SamplingParams,
    UnattainableTargetError,
)
from octavo.engine.simulation.refusal_check import check_refusals

PARTS = "idle loads noisy compile stolen pause targeted returns"
NUM_PROMPT, NUM_OUTPUT = 96, 16
PROTOCOLS = ("http", "grpc")
GAP = 4.0
"""Times of an idle server's first token between two requests of a light load."""


@dataclass(slots=True)
class Answer:
    """What became of a request.

    Attributes:
        sent_s: when it was sent, on the clock of `time.monotonic`.
        ttft_s: until its first token came, at the client; None if it was refused.
        status: the HTTP status, 200 also for gRPC.
        retry_s: after which it should come back, if the server says.
        predicted_s: what `GET /v1/load` predicted just before, if that was asked.
        target_s: its target, if it had one.
    """

    sent_s: float
    ttft_s: float | None = None
    status: int = 200
    retry_s: float = 0.0
    predicted_s: float | None = None
    target_s: float | None = None

    @property
    def is_good(self) -> bool:
        """Whether it was served, and on time."""
        return self.ttft_s is not None and self.ttft_s <= (self.target_s or 1e9)


@dataclass(slots=True)
class Live:
    """A server under test, and its clients."""

    http: httpx.AsyncClient
    grpc: AsyncOctavoClient
    log: Path
    vocab_size: int = 40_000
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def prompt(self) -> list[int]:
        """Token ids that no other prompt begins with."""
        return [self.rng.randrange(100, self.vocab_size) for _ in range(NUM_PROMPT)]

    async def ask(
        self,
        target_s: float | None = None,
        protocol: str = "http",
        prompt: list[int] | None = None,
        *,
        predict: bool = False,
    ) -> Answer:
        """One request, to its end."""
        predicted_s = None
        if predict:
            load = await self.http.get("/v1/load", params={"num_prompt_tokens": NUM_PROMPT})
            predicted_s = load.json()["predicted_ttft_s"]
        answer = Answer(time.monotonic(), predicted_s=predicted_s, target_s=target_s)
        take = self._ask_http if protocol == "http" else self._ask_grpc
        await take(answer, prompt or self.prompt())
        return answer

    async def _ask_http(self, answer: Answer, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": NUM_OUTPUT, "ignore_eos": True, "stream": True}
        headers = {} if answer.target_s is None else {"x-slo-ttft-ms": str(1e3 * answer.target_s)}
        async with self.http.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            answer.status = response.status_code
            answer.retry_s = float(response.headers.get("retry-after-ms", 0)) / 1e3
            async for line in response.aiter_lines():
                if answer.ttft_s is None and line.startswith("data:") and answer.status == 200:
                    if '"error"' in line:
                        answer.status = 429
                        return
                    answer.ttft_s = time.monotonic() - answer.sent_s

    async def _ask_grpc(self, answer: Answer, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
        target = {} if answer.target_s is None else {"ttft_target_ms": 1e3 * answer.target_s}
        try:
            async for _ in self.grpc.stream(prompt, params, **target):
                if answer.ttft_s is None:
                    answer.ttft_s = time.monotonic() - answer.sent_s
        except OverloadedError as error:
            answer.status, answer.retry_s = 429, error.retry_after_s
        except UnattainableTargetError:
            answer.status = 422

    async def figures(self) -> dict[str, float]:
        """The metrics that this is about."""
        names = ("wrong_refusals_ratio", "refusal_probes_total", "ttft_prediction_error_ratio")
        page = (await self.http.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("octavo:")]
        return {
            name.removeprefix("octavo:"): float(value)
            for name, _, value in (line.rpartition(" ") for line in lines)
            if name.removeprefix("octavo:").startswith(names)
        }


@contextlib.asynccontextmanager
async def serving(args: argparse.Namespace, *settings: str) -> AsyncIterator[Live]:
    """A fresh `octavo serve`, from ready until the block's end."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "octavo.server.cli.main", "serve", "--quiet"]
        command += ["--http-port", "0", "--grpc-port", "0", "--record", str(log)]
        command += [
            "--max-num-seqs",
            "16",
            "--max-model-len",
            "512",
            "--warm-up",
            "full",
            *settings,
        ]
        command += ["--model", args.model] if args.model else []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            grpc_at, http_at = (process.stdout.readline().split()[-1] for _ in range(2))
            limits = httpx.Limits(max_connections=None)
            async with (
                httpx.AsyncClient(base_url=http_at, timeout=120, limits=limits) as http,
                AsyncOctavoClient(grpc_at, retry=None) as grpc,
            ):
                yield Live(http, grpc, log, args.vocab_size)
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def busy_neighbours() -> Iterator[None]:
    """Processes that take whatever the cores have."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(6)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def idle_ttft_s(live: Live, count: int = 12) -> float:
    """What an idle server takes to its first token, without a target: the median."""
    answers = [await live.ask(protocol=PROTOCOLS[n % 2]) for n in range(count)]
    return statistics.median(answer.ttft_s or 0.0 for answer in answers)


async def targets_in_turn(
    live: Live, target_s: float, count: int, *, predict: bool = False
) -> list[Answer]:
    """One request after the other, over HTTP and gRPC in turn."""
    return [
        await live.ask(target_s, PROTOCOLS[number % 2], predict=predict) for number in range(count)
    ]


def _errors(answers: list[Answer]) -> dict[str, float]:
    pairs = [(a.predicted_s, a.ttft_s) for a in answers if a.predicted_s and a.ttft_s]
    errors = sorted(abs(predicted - real) / real for predicted, real in pairs)
    if not errors:
        return {}
    return {"p50": statistics.median(errors), "p95": errors[int(0.95 * (len(errors) - 1))]}


async def part_idle(args: argparse.Namespace) -> dict[str, Any]:
    """Targets that an idle server meets."""
    async with serving(args) as live:
        await live.ask()
        idle_s = await idle_ttft_s(live)
        report: dict[str, Any] = {"idle_ttft_s": idle_s}
        everyone = []
        for factor in (1.5, 2.0, 4.0):
            answers = await targets_in_turn(live, factor * idle_s, args.count, predict=True)
            everyone += answers
            report[f"{factor} times"] = _fates(answers)
        report["prediction_error"] = _errors(everyone)
        return report | await live.figures()


async def part_loads(args: argparse.Namespace) -> dict[str, Any]:
    """Poisson arrivals below and above what the server can do."""
    report: dict[str, Any] = {}
    async with serving(args) as live:
        await live.ask()
        idle_s = await idle_ttft_s(live)
        rate = await _capacity(live, args.seconds / 3)
        report |= {"idle_ttft_s": idle_s, "capacity_per_s": rate}
    for load in (0.5, 1.0, 1.5, 3.0):
        async with serving(args) as live:
            await idle_ttft_s(live)
            answers = await _poisson(live, load * rate, args.seconds, 4.0 * idle_s)
            await asyncio.sleep(0.5)
            by_log = check_refusals(live.log).to_dict()
            report[f"{load} times"] = _fates(answers) | {"by_log": by_log} | await live.figures()
    return report


async def _capacity(live: Live, seconds: float) -> float:
    end_s, count = time.monotonic() + seconds, 0

    async def user() -> None:
        nonlocal count
        while time.monotonic() < end_s:
            await live.ask()
            count += 1

    begun_s = time.monotonic()
    await asyncio.gather(*(user() for _ in range(24)))
    return count / (time.monotonic() - begun_s)


async def _poisson(live: Live, rate: float, seconds: float, target_s: float) -> list[Answer]:
    tasks, end_s, number = [], time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(live.ask(target_s, PROTOCOLS[number % 2])))
        number += 1
        await asyncio.sleep(live.rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def _fates(answers: list[Answer]) -> dict[str, Any]:
    refused = sum(answer.ttft_s is None for answer in answers)
    good = sum(answer.is_good for answer in answers)
    served = len(answers) - refused
    return {
        "requests": len(answers),
        "refused": refused,
        "on_time": good,
        "late": served - good,
        "late_share_of_served": (served - good) / max(1, served),
    }


def _recovery(answers: list[Answer], since_s: float) -> dict[str, Any]:
    """When the last request that was refused or late came, after a disturbance's end."""
    after = [answer for answer in answers if answer.sent_s >= since_s]
    wrong = [index for index, answer in enumerate(after) if not answer.is_good]
    last = wrong[-1] if wrong else None
    seconds = 0.0 if last is None else after[last].sent_s - since_s
    return _fates(after) | {
        "last_wrong_request": last,
        "last_wrong_after_s": seconds,
        "recovered": last is None or last < 20 or seconds < 5.0,
    }


async def _every(live: Live, gap_s: float, seconds: float, target_s: float) -> list[Answer]:
    tasks, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(live.ask(target_s, PROTOCOLS[len(tasks) % 2])))
        await asyncio.sleep(gap_s)
    return list(await asyncio.gather(*tasks))


async def part_noisy(args: argparse.Namespace) -> dict[str, Any]:
    """The fault that this began with."""
    neighbours = contextlib.ExitStack()
    neighbours.enter_context(busy_neighbours())
    try:
        async with serving(args) as live:
            noisy_s = await idle_ttft_s(live)
            neighbours.close()
            await asyncio.sleep(args.pause / 2)
            answers, since_s = [], time.monotonic()
            # Below what it took beside them by half, and above what it takes now.
            target_s = min(noisy_s / 2.0, args.noisy_target_s)
            answers += await targets_in_turn(live, target_s, args.count)
            idle_s = await idle_ttft_s(live)
            answers += await targets_in_turn(live, 2.0 * idle_s, args.count)
            report = {"noisy_ttft_s": noisy_s, "idle_ttft_s": idle_s, "target_s": target_s}
            return report | _recovery(answers, since_s)
    finally:
        neighbours.close()


async def part_compile(args: argparse.Namespace) -> dict[str, Any]:
    """A server that still compiles."""
    async with serving(args, "--warm-up", "coarse", "--compile-cache-dir", "") as live:
        await live.ask()
        first_s = await idle_ttft_s(live, 4)
        since_s = time.monotonic()
        answers = await _every(live, GAP * first_s, args.seconds, 4.0 * first_s)
        return {"first_ttft_s": first_s} | _recovery(answers, since_s)


async def part_stolen(args: argparse.Namespace) -> dict[str, Any]:
    """Cores that others take for a while."""
    async with serving(args) as live:
        idle_s = await idle_ttft_s(live)
        task = asyncio.create_task(_every(live, GAP * idle_s, args.stolen + 15.0, 3.0 * idle_s))
        with busy_neighbours():
            await asyncio.sleep(args.stolen)
        since_s = time.monotonic()
        answers = await task
        before = [answer for answer in answers if answer.sent_s < since_s]
        return {"idle_ttft_s": idle_s, "meanwhile": _fates(before)} | _recovery(answers, since_s)


async def part_pause(args: argparse.Namespace) -> dict[str, Any]:
    """Nothing for a while."""
    async with serving(args) as live:
        idle_s = await idle_ttft_s(live)
        await targets_in_turn(live, 2.0 * idle_s, args.count)
        await asyncio.sleep(args.pause)
        since_s = time.monotonic()
        answers = await targets_in_turn(live, 2.0 * idle_s, args.count)
        return {"idle_ttft_s": idle_s, "pause_s": args.pause} | _recovery(answers, since_s)


async def part_targeted(args: argparse.Namespace) -> dict[str, Any]:
    """No request without a target, ever."""
    async with serving(args) as live:
        since_s = time.monotonic()
        answers = await targets_in_turn(live, args.noisy_target_s, 2 * args.count)
        return _recovery(answers, since_s)


async def part_returns(args: argparse.Namespace) -> dict[str, Any]:
    """A crowd that is sent away, and comes back."""
    async with serving(args) as live:
        idle_s = await idle_ttft_s(live)
        target_s, prompts = 4.0 * idle_s, [live.prompt() for _ in range(60)]
        back: list[Answer] = []

        async def user(number: int, prompt: list[int]) -> Answer:
            await asyncio.sleep(0.02 * number)
            answer = await live.ask(target_s, PROTOCOLS[number % 2], prompt)
            if answer.ttft_s is None and answer.retry_s:
                await asyncio.sleep(answer.retry_s)
                back.append(await live.ask(target_s, PROTOCOLS[number % 2], prompt))
            return answer

        first = await asyncio.gather(*(user(n, prompt) for n, prompt in enumerate(prompts)))
        accepted = sum(answer.ttft_s is not None for answer in back)
        return {
            "first": _fates(list(first)),
            "returned": _fates(back),
            "accepted_share": accepted / max(1, len(back)),
        }


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in args.parts.split():
        begun_s = time.monotonic()
        report[name] = await globals()[f"part_{name}"](args)
        print(
            f"{name} ({time.monotonic() - begun_s:.0f} s): {json.dumps(report[name])}", flush=True
        )
    return report


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="about two minutes instead of nine")
    parser.add_argument("--parts", default=PARTS, help=f"of: {PARTS}")
    parser.add_argument("--model", help="(default: the packaged one)")
    parser.add_argument("--vocab-size", type=int, default=40_000, help="of its tokens, some")
    parser.add_argument(
        "--noisy-target-s", type=float, default=0.9, help="twice what the idle server takes"
    )
    parser.add_argument("--output", help="write every figure as JSON")
    args = parser.parse_args()
    args.count = 10 if args.short else 20
    args.seconds = 8.0 if args.short else 25.0
    args.stolen = 10.0 if args.short else 30.0
    args.pause = 15.0 if args.short else 60.0
    report = asyncio.run(_run(args))
    if args.output:
        text = json.dumps({"about": about_machine(), "parts": report}, indent=1)
        Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
