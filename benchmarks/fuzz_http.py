"""Nearly right bodies for every route of the HTTP API, beside a sane client.

    python -m benchmarks.fuzz_http --requests 10000 --seed 0

Two random models are served: one that generates, embeds and knows tools and thoughts, and one with
a classification head. It fails (status 1) if a server ends or writes a traceback, an answer blames
the server, is not in its API's own shape or breaks off, none comes, the sane client's tokens ever
differ, or anything is held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.fuzz import CALL_TIMEOUT_S, Found, watched
from benchmarks.fuzz_answers import fault_of
from benchmarks.fuzz_bodies import VALID, random_body, write
from benchmarks.fuzz_messages import break_bytes
from benchmarks.tiny_server import Server, held_at_the_end, serving, write_tiny_model

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}"
)
CONTEXT = 2048
ARGS = (
    *("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "256", "--warm-up", "coarse"),
    *("--num-kv-pages", "1500", "--no-fail-on-compile"),
)
FORMATS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--task", "both")
CONCURRENCY = 16
CLASSIFIED = ("/classify", "/v1/score", "/v1/rerank", "/v1/embeddings")
SHARE_CLASSIFIED = 0.05


def make_model(folder: Path, *, has_head: bool) -> Path:
    """A tiny model with room for tools, and a template that shows them; or one with a head."""
    write_tiny_model(folder, context=CONTEXT, template=TEMPLATE)
    if has_head:
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "architectures": ["LlamaForSequenceClassification"],
            "id2label": {"0": "dull", "1": "fine"},
        }
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        head = np.random.default_rng(1).standard_normal((2, config["hidden_size"]))
        tensors["score.weight"] = head.astype(np.float32)
        save_file(tensors, str(folder / "model.safetensors"))
    return folder


@contextmanager
def fuzzed_server(*, has_head: bool) -> Iterator[tuple[Server, Path]]:
    """A server of such a model, and its log."""
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name), has_head=has_head)
        with serving(model, (*ARGS, *(() if has_head else FORMATS))) as server:
            yield server, model / "server.log"


class BodyFuzzer:
    """Sends bodies to one server until they have all been answered.

    Args:
        url: of the server.
        routes: that get them.
        seed: of everything that is drawn.

    Attributes:
        found: what the answers were.
        served: of each route, how many bodies were answered by 200.
    """

    def __init__(self, url: str, routes: Sequence[str], seed: int) -> None:
        self._url = url
        self._routes = routes
        self._rng = random.Random(seed)
        self.found = Found()
        self.served: Counter[str] = Counter()

    async def run(self, count: int, concurrency: int = CONCURRENCY) -> None:
        """Sends so many."""
        jobs = iter(range(count))

        async def work(client: httpx.AsyncClient) -> None:
            for _ in jobs:
                await self._send(client)

        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=CALL_TIMEOUT_S, limits=limits
        ) as client:
            await asyncio.gather(*(work(client) for _ in range(concurrency)))

    async def _send(self, client: httpx.AsyncClient) -> None:
        rng = self._rng
        route = rng.choice(self._routes)
        body = write(random_body(route, rng))
        if rng.random() < 0.03:
            body = break_bytes(body, rng)
        leaves = rng.random() < 0.02
        wrong: str | None
        try:
            async with client.stream(
                "POST", route, content=body, headers={"content-type": "application/json"}
            ) as answer:
                status = answer.status_code
                if leaves:
                    wrong = f"status {status}" if status in (500, 502) else None
                else:
                    kind = answer.headers.get("content-type", "")
                    wrong = fault_of(route, status, kind, await answer.aread())
        except httpx.HTTPError as error:
            status, wrong = 0, f"no answer ({type(error).__name__})"
        self.found.http_statuses[status] += 1
        self.served[route] += status == 200
        if wrong is not None:
            self.found.faults.append(f"{route} {body[:2000]!r}: {wrong}")


async def fuzz(server: Server, routes: Sequence[str], count: int, seed: int) -> BodyFuzzer:
    """Sends so many bodies to a server, with the sane client beside them if it generates."""
    fuzzer = BodyFuzzer(server.http, routes, seed)
    if "/v1/chat/completions" not in routes:
        await fuzzer.run(count)
        return fuzzer
    async with watched(server.grpc, fuzzer.found):
        await fuzzer.run(count)
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        if held := await held_at_the_end(channel):
            fuzzer.found.faults.append(held)
    return fuzzer


def run(count: int, seed: int) -> list[str]:
    """Fuzzes both servers. Returns what is wrong."""
    num_classified = int(count * SHARE_CLASSIFIED)
    wrong = []
    for has_head, routes, num in (
        (False, tuple(VALID), count - num_classified),
        (True, CLASSIFIED, num_classified),
    ):
        with fuzzed_server(has_head=has_head) as (server, log):
            begun_s = time.monotonic()
            fuzzer = asyncio.run(fuzz(server, routes, num, seed))
            seconds = time.monotonic() - begun_s
            found = fuzzer.found
            if server.popen.poll() is not None:
                found.faults.append(f"the server ended: {server.popen.returncode}")
            text = log.read_text()
            if "Traceback" in text:
                found.faults.append("a traceback: " + text[text.index("Traceback") :][:4000])
        statuses = dict(sorted(found.http_statuses.items()))
        told = f"{statuses}, {found.watched.streams} sane streams"
        print(f"{num} bodies in {seconds:.0f} s: {told}", flush=True)
        print("  served: " + ", ".join(f"{name} {fuzzer.served[name]}" for name in routes))
        never = [
            name for name in routes
            if not fuzzer.served[name] and (has_head or name != "/classify")
        ]  # fmt: skip
        if never:
            wrong.append(f"never served, so the bodies are too wild: {', '.join(never)}")
        wrong += found.faults
    return wrong


def main() -> int:
    """Runs from the command line; 1 if a server was found at fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wrong = run(args.requests, args.seed)
    for line in wrong[:20]:
        print(line)
    print(f"{len(wrong)} faults")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
