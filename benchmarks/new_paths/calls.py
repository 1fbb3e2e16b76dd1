"""Calls that a grammar binds, every one validated, and streams beside them."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema

from benchmarks.new_paths.schemas import draw_schemas
from benchmarks.new_paths.streams import APIS, TIMEOUT_S, body_of

NUM_SCHEMAS = 50
AT_ONCE = 8
NUM_BESIDE, BESIDE_TOKENS = 4, 128
LEAST_BESIDE = 0.95


def call_body(number: int, schema: dict[str, Any]) -> dict[str, Any]:
    """A chat that must call: by `required`, or of a strict function by its name, in turns."""
    is_named = number % 2 == 1
    function = {"name": "act", "description": "Acts.", "parameters": schema, "strict": is_named}
    named = {"type": "function", "function": {"name": "act"}}
    return {
        "messages": [{"role": "user", "content": f"Do number {number}."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": named if is_named else "required", "parallel_tool_calls": False,
        "max_completion_tokens": 1_000, "temperature": 0.7, "seed": number,
    }  # fmt: skip


def fault_of(answer: httpx.Response, schema: dict[str, Any]) -> str | None:
    """What is wrong with a call; None if nothing is."""
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:300]}"
    [choice] = answer.json()["choices"]
    calls = choice["message"].get("tool_calls") or []
    if len(calls) != 1:
        return f"{len(calls)} calls, {choice['finish_reason']}"
    try:
        jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{calls[0]['function']['arguments']!r}: {str(error)[:300]}"
    return None


@asynccontextmanager
async def beside(client: httpx.AsyncClient, label: str) -> AsyncIterator[list[float]]:
    """Streams without end beside the block. Yields the milliseconds between their events."""
    gaps: list[float] = []

    async def run(place: int) -> None:
        for number in itertools.count():
            text = f"Tell me all of {place} and {number}."
            body = body_of("chats", text, BESIDE_TOKENS, label) | {"ignore_eos": True}
            last_s = None
            async with client.stream("POST", APIS["chats"], json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now_s = time.perf_counter()
                    if last_s is not None:
                        gaps.append((now_s - last_s) * 1e3)
                    last_s = now_s

    tasks = [asyncio.create_task(run(place)) for place in range(NUM_BESIDE)]
    try:
        yield gaps
    finally:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    for error in done:
        if isinstance(error, Exception):
            raise error


async def _all(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    answers: list[Any] = [None] * len(bodies)
    numbers: Iterator[int] = iter(range(len(bodies)))

    async def work() -> None:
        for number in numbers:
            answers[number] = await client.post(APIS["chats"], json=bodies[number])

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return answers


async def _measure(url: str, count: int, seed: int) -> dict[str, Any]:
    schemas = draw_schemas(NUM_SCHEMAS, seed)
    of = [schemas[number % NUM_SCHEMAS] for number in range(count)]
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        async with beside(client, "calls") as gaps:
            answers = await _all(client, [call_body(*item) for item in enumerate(of)])
        checked = [fault_of(*item) for item in zip(answers, of, strict=True)]
        faults = [fault for fault in checked if fault is not None]
        usages = [answer.json()["usage"] for answer in answers if answer.status_code == 200]
        # The same load without grammars: prompts as long, and as many tokens.
        free = [
            body | {
                "tool_choice": "none", "ignore_eos": True, "cache_salt": "free",
                "max_completion_tokens": usage["completion_tokens"],
            }
            for body, usage in zip(
                (call_body(*item) for item in enumerate(of)), usages, strict=False
            )
        ]  # fmt: skip
        async with beside(client, "free") as free_gaps:
            for answer in await _all(client, free):
                answer.raise_for_status()
    return {
        "calls": count,
        "valid": count - len(faults),
        "schemas": len({json.dumps(schema) for schema in of}),
        "faults": Counter(faults).most_common(5),
        "tokens_a_call": round(statistics.mean(u["completion_tokens"] for u in usages), 1),
        "beside_ms": {"calls": _mean(gaps), "free": _mean(free_gaps)},
        "beside_rate_of_free": round(statistics.mean(free_gaps) / statistics.mean(gaps), 4),
    }


def _mean(gaps: list[float]) -> float:
    return round(statistics.mean(gaps), 3)


def measure_calls(url: str, count: int, seed: int) -> dict[str, Any]:
    """So many calls over 50 schemas, and how fast the streams beside them were."""
    return asyncio.run(_measure(url, count, seed))
