"""Sends a live server messages that no sane client sends, and watches a sane one meanwhile.

    python -m benchmarks.fuzz --messages 100000 --seed 0 --out benchmarks/results/fuzz-DATE.json

A random two-layer model is served by `octavo serve` in a process of its own. Messages of every
method of octavo.v1 are made from their descriptions and broken byte by byte; bodies for the HTTP
routes are made from JSON that is nearly right, and by schemathesis from the served OpenAPI
document. Beside them one client, in a process of its own, streams the same greedy request over and
over. It fails (status 1) if the process ends, a status says that the server is at fault, the
stream's tokens ever differ, or anything is held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.fuzz_messages import break_bytes, random_message, tame
from benchmarks.fuzz_watch import Watched
from benchmarks.tiny_server import Server, held_at_the_end, serving, write_tiny_model
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["OctavoService"]
ROOT = Path(__file__).resolve().parents[1]
CALL_TIMEOUT_S = 20.0
STALL_MS = 100.0
HONEST = frozenset(
    (
        "OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
        "CANCELLED", "FAILED_PRECONDITION",
    )
)  # fmt: skip
"""Statuses that blame the client, the load, or time. FAILED_PRECONDITION tells of a target that the
server could not meet if it were idle."""
HONEST_HTTP = frozenset((*range(200, 500), 504))
"""The same; 504 is the request's own `timeout_s`."""
HTTP_ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize")


@dataclass(slots=True)
class Found:
    """What a run saw.

    Attributes:
        statuses: gRPC statuses of fuzzed messages.
        http_statuses: HTTP statuses of fuzzed bodies.
        schema_cases: requests that schemathesis made.
        faults: descriptions of answers that blame the server.
        watched: what the well-behaved client saw.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    http_statuses: Counter[int] = field(default_factory=Counter)
    schema_cases: int = 0
    faults: list[str] = field(default_factory=list)
    watched: Watched = field(default_factory=Watched)


class Fuzzer:
    """Sends messages to one server until they have all been answered."""

    def __init__(self, grpc_address: str, http_url: str, seed: int) -> None:
        self._grpc_address = grpc_address
        self._http_url = http_url
        self._rng = random.Random(seed)
        self.found = Found()

    async def run(self, num_grpc: int, num_http: int, concurrency: int = 16) -> None:
        """Sends so many messages of each kind."""
        jobs = iter([*([self._one_call] * num_grpc), *([self._one_post] * num_http)])

        async def work() -> None:
            for job in jobs:
                await job()

        async with (
            watched(self._grpc_address, self.found),
            grpc.aio.insecure_channel(self._grpc_address) as self._channel,
            httpx.AsyncClient(base_url=self._http_url, timeout=CALL_TIMEOUT_S) as self._http,
        ):
            await asyncio.gather(*(work() for _ in range(concurrency)))
            if held := await held_at_the_end(self._channel):
                self.found.faults.append(held)

    async def run_schemathesis(self, max_examples: int, seed: int) -> None:
        """Has schemathesis make requests of the served OpenAPI document: so many an operation."""
        command = [
            *("-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("run", f"{self._http_url}/openapi.json"),
            *("--checks", "not_a_server_error", "--max-examples", str(max_examples)),
            *("--phases", "examples,fuzzing", "--seed", str(seed), "--continue-on-failure"),
            *("--generation-database", "none", "--no-color"),
        ]
        with tempfile.TemporaryDirectory() as folder:
            async with watched(self._grpc_address, self.found):
                popen = await asyncio.create_subprocess_exec(
                    sys.executable, *command, cwd=folder, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )  # fmt: skip
                text = (await popen.communicate())[0].decode()
        cases = re.search(r"([\d,]+) generated", text)
        self.found.schema_cases += int(cases[1].replace(",", "")) if cases else 0
        if popen.returncode != 0 or cases is None:
            self.found.faults.append(f"schemathesis: {text[-6000:]}")

    async def _one_call(self) -> None:
        rng = self._rng
        method = rng.choice(SERVICE.methods)
        if rng.random() < 0.6:
            method = SERVICE.methods_by_name[rng.choice(("Generate", "GenerateStream"))]
        if rng.random() < 0.03:
            raw = rng.randbytes(rng.randint(0, 200))
        else:
            message = random_message(method.input_type._concrete_class, rng)
            tame(message, rng)
            if method.input_type.name in ("GenerateRequest", "AbortRequest") and rng.random() < 0.5:
                message.request_id = f"r{rng.randrange(4)}"  # few: requests in flight share them
            raw = message.SerializeToString()
            if rng.random() < 0.4:
                raw = break_bytes(raw, rng)
        path = f"/{SERVICE.full_name}/{method.name}"
        try:
            if method.server_streaming:
                async for _ in self._channel.unary_stream(path)(raw, timeout=CALL_TIMEOUT_S):
                    if rng.random() < 0.05:
                        break  # the client leaves
            else:
                await self._channel.unary_unary(path)(raw, timeout=CALL_TIMEOUT_S)
            status = "OK"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
            if status not in HONEST:
                self.found.faults.append(f"{method.name} {raw.hex()[:2000]}: {error.details()}")
        self.found.statuses[status] += 1

    async def _one_post(self) -> None:
        rng = self._rng
        route = rng.choice(HTTP_ROUTES)
        body = json.dumps(_body(route, rng)).encode()
        if rng.random() < 0.4:
            body = break_bytes(body, rng)
        try:
            answer = await self._http.post(
                route, content=body, headers={"content-type": "application/json"}
            )
            status = answer.status_code
            if status not in HONEST_HTTP:
                self.found.faults.append(f"{route} {body[:2000]!r}: {answer.text[:300]}")
        except httpx.TimeoutException:
            status = 0
            self.found.faults.append(f"{route} {body[:2000]!r}: no answer")
        self.found.http_statuses[status] += 1


@contextlib.asynccontextmanager
async def watched(address: str, found: Found) -> AsyncIterator[None]:
    """Has the well-behaved client stream meanwhile, and adds what it saw."""
    popen = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.fuzz_watch", address, cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield
        text = (await asyncio.wait_for(popen.communicate(), CALL_TIMEOUT_S))[0]
    except BaseException:
        popen.kill()
        raise
    seen = Watched(**json.loads(text))
    found.faults += seen.faults
    found.watched.streams += seen.streams
    found.watched.gaps_ms += seen.gaps_ms
    found.watched.first_ms += seen.first_ms
    found.watched.late_ms += seen.late_ms


def _body(route: str, rng: random.Random) -> dict[str, Any]:
    odd = [None, True, -1, 0, 1.5, 1e309, "", "x" * 50, [], [1], {}, {"a": 1}, [[1, 2]], 2**70]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": rng.randint(0, 8)}
    if route == "/v1/completions":
        body["prompt"] = rng.choice(["Hello", ["a", "b"], [60, 61], [[60], [61]], "", [300]])
    elif route == "/v1/chat/completions":
        body["messages"] = [{"role": rng.choice(["user", "system", "odd"]), "content": "Hi"}]
    else:
        body["prompt"] = "Hello"
    names = (
        *("temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "stream", "user"),
        *("presence_penalty", "stream_options", "response_format", "top_k", "min_p", "best_of"),
        *("priority", "messages", "prompt", "max_tokens", "model", "unknown", "echo", "tools"),
    )
    for name in rng.sample(names, rng.choice((0, 0, 1, 1, 2, 4))):
        body[name] = rng.choice(odd)
    if body.get("max_tokens") is None or not isinstance(body["max_tokens"], int):
        body["max_completion_tokens"] = 4
    return body


def report(found: Found, seconds: float, seed: int) -> dict[str, Any]:
    """What goes into the result file."""
    gaps, late = sorted(found.watched.gaps_ms), sorted(found.watched.late_ms)
    first = sorted(found.watched.first_ms)
    num = sum(found.statuses.values()) + sum(found.http_statuses.values()) + found.schema_cases
    return {
        "messages": num,
        "seed": seed,
        "seconds": round(seconds, 1),
        "grpc": dict(sorted(found.statuses.items())),
        "http": {str(k): v for k, v in sorted(found.http_statuses.items())},
        "schemathesis": found.schema_cases,
        "faults": found.faults[:20],
        "num_faults": len(found.faults),
        "streams": found.watched.streams,
        "gap_ms": {
            "p50": _share(gaps, 0.5),
            "p99": _share(gaps, 0.99),
            "p999": _share(gaps, 0.999),
            "max": _share(gaps, 1.0),
            "above_100": sum(gap > STALL_MS for gap in gaps),
        },
        "first_ms": {
            "p50": _share(first, 0.5),
            "p99": _share(first, 0.99),
            "max": _share(first, 1.0),
        },
        "client_late_ms": {"p50": _share(late, 0.5), "max": _share(late, 1.0)},
    }


def _share(ordered: list[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2)


def main() -> int:
    """Fuzzes from the command line; 1 if the server was found at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000, help="schemathesis' not counted")
    parser.add_argument("--http-share", type=float, default=0.2)
    parser.add_argument("--schema-examples", type=int, default=500, help="an operation; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_http = int(args.messages * args.http_share)

    async def fuzz(server: Server) -> Found:
        fuzzer = Fuzzer(server.grpc, server.http, args.seed)
        await fuzzer.run(args.messages - num_http, num_http)
        if args.schema_examples:
            await fuzzer.run_schemathesis(args.schema_examples, args.seed)
        return fuzzer.found

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        with serving(model) as server:
            begun_s = time.monotonic()
            found = asyncio.run(fuzz(server))
            seconds = time.monotonic() - begun_s
            if server.popen.poll() is not None:
                found.faults.append(f"the server ended: {server.popen.returncode}")
            log = (model / "server.log").read_text()[-8000:]
    result = report(found, seconds, args.seed)
    if found.faults:
        result["server_log"] = log.splitlines()
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
