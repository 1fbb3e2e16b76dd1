"""Sends a live server messages that no sane client sends, and watches a sane one meanwhile.

    python -m benchmarks.fuzz --messages 100000 --seed 0 --out benchmarks/results/fuzz-DATE.json

A random two-layer model is served by `octavo serve` in a process of its own. Messages of every
method of octavo.v1 are made from their descriptions and broken byte by byte; bodies for the HTTP
routes are made from JSON that is nearly right. Beside them one client streams the same greedy
request over and over. It fails (status 1) if the process ends, a status says that the server is at
fault, the stream's tokens ever differ, or anything is held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.fuzz_messages import break_bytes, random_message, tame
from benchmarks.tiny_server import serving, write_tiny_model
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["OctavoService"]
CALL_TIMEOUT_S = 20.0
HONEST = frozenset(
    (
        "OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED",
        "DEADLINE_EXCEEDED", "CANCELLED",
    )
)  # fmt: skip
"""Statuses that blame the client, the load, or time."""
HONEST_HTTP = frozenset((*range(200, 500), 501, 503, 504))
HTTP_ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize")


@dataclass(slots=True)
class Found:
    """What a run saw.

    Attributes:
        statuses: gRPC statuses of fuzzed messages.
        http_statuses: HTTP statuses of fuzzed bodies.
        faults: descriptions of answers that blame the server.
        num_streams: whole streams of the well-behaved client.
        gaps_ms: its waits between messages.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    http_statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_streams: int = 0
    gaps_ms: list[float] = field(default_factory=list)


class Fuzzer:
    """Sends messages to one server until they have all been answered."""

    def __init__(self, grpc_address: str, http_url: str, seed: int) -> None:
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self._sane = grpc.aio.insecure_channel(
            grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._http = httpx.AsyncClient(base_url=http_url, timeout=CALL_TIMEOUT_S)
        self._rng = random.Random(seed)
        self.found = Found()
        self._ids = 0

    async def run(self, num_grpc: int, num_http: int, concurrency: int = 16) -> None:
        """Sends so many messages of each kind."""
        reference = await self._stream()
        watching = asyncio.create_task(self._watch(reference))
        jobs = iter([*([self._one_call] * num_grpc), *([self._one_post] * num_http)])

        async def work() -> None:
            for job in jobs:
                await job()

        await asyncio.gather(*(work() for _ in range(concurrency)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await self._must_be_empty()
        await self._http.aclose()
        await self._channel.close()
        await self._sane.close()

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
            if method.input_type.name == "GenerateRequest" and message.HasField("request_id"):
                self._ids += 1
                message.request_id = f"{message.request_id[:20]}{self._ids}"
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

    async def _stream(self) -> list[int]:
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=[40, 41, 42, 43]),
            priority=pb.PRIORITY_REALTIME,
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True),
        )
        token_ids: list[int] = []
        call = self._sane.unary_stream(f"/{SERVICE.full_name}/GenerateStream")
        last_s: float | None = None
        async for raw in call(request.SerializeToString()):
            now_s = time.monotonic()
            if last_s is not None:
                self.found.gaps_ms.append((now_s - last_s) * 1e3)
            last_s = now_s
            token_ids += pb.GenerateResponse.FromString(raw).outputs[0].token_ids
        return token_ids

    async def _watch(self, reference: list[int]) -> None:
        while True:
            try:
                if await self._stream() != reference:
                    self.found.faults.append("the well-behaved stream got other tokens")
                self.found.num_streams += 1
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    continue
                self.found.faults.append(f"the well-behaved stream ended: {error.details()}")
                return

    async def _must_be_empty(self) -> None:
        call = self._channel.unary_unary(f"/{SERVICE.full_name}/GetLoad")
        for _ in range(200):
            load = pb.GetLoadResponse.FromString(await call(b""))
            if load.num_running == load.num_waiting == 0:
                break
            await asyncio.sleep(0.05)
        if load.num_running or load.num_waiting or load.num_free_pages != load.num_total_pages:
            self.found.faults.append(f"held at the end: {load}")


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
    for name in rng.sample(names, rng.randint(0, 4)):
        body[name] = rng.choice(odd)
    if body.get("max_tokens") is None or not isinstance(body["max_tokens"], int):
        body["max_completion_tokens"] = 4
    return body


def report(found: Found, num: int, seconds: float, seed: int) -> dict[str, Any]:
    """What goes into the result file."""
    gaps = sorted(found.gaps_ms) or [math.nan]
    return {
        "messages": num,
        "seed": seed,
        "seconds": round(seconds, 1),
        "grpc": dict(sorted(found.statuses.items())),
        "http": {str(k): v for k, v in sorted(found.http_statuses.items())},
        "faults": found.faults[:20],
        "num_faults": len(found.faults),
        "streams": found.num_streams,
        "gap_ms": {
            "p50": round(gaps[len(gaps) // 2], 2),
            "p99": round(gaps[int(len(gaps) * 0.99)], 2),
            "max": round(gaps[-1], 2),
        },
    }


def main() -> int:
    """Fuzzes from the command line; 1 if the server was found at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--http-share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_http = int(args.messages * args.http_share)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        with serving(model) as server:
            begun_s = time.monotonic()
            fuzzer = Fuzzer(server.grpc, server.http, args.seed)
            asyncio.run(fuzzer.run(args.messages - num_http, num_http))
            seconds = time.monotonic() - begun_s
            if server.popen.poll() is not None:
                fuzzer.found.faults.append(f"the server ended: {server.popen.returncode}")
    result = report(fuzzer.found, args.messages, seconds, args.seed)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 1 if fuzzer.found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
