"""Streams of the three APIs that chats can be asked by, read with as little work as can be."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

APIS = {
    "chats": "/v1/chat/completions",
    "Messages": "/v1/messages",
    "Responses": "/v1/responses",
}
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Batch:
    """Streams that began together.

    Attributes:
        num_tokens: of each.
        seconds: until the last of them had ended.
    """

    num_tokens: tuple[int, ...]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.num_tokens) / self.seconds


def body_of(api: str, text: str, num_tokens: int, salt: str) -> dict[str, Any]:
    """A greedy stream of an API."""
    common = {"stream": True, "temperature": 0, "cache_salt": salt}
    messages = [{"role": "user", "content": text}]
    if api == "chats":
        options = {"stream_options": {"include_usage": True}}
        return common | options | {"messages": messages, "max_completion_tokens": num_tokens}
    if api == "Messages":
        return common | {"messages": messages, "max_tokens": num_tokens}
    return common | {"input": messages, "max_output_tokens": num_tokens}


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    """The tokens that a stream says at its end that it had.

    Raises:
        RuntimeError: it was refused or broke off.
    """
    last = b""
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {(await answer.aread())[:500]!r}")
        async for piece in answer.aiter_bytes():
            last = (last + piece)[-65_536:]
    for line in reversed(last.split(b"\n")):
        if b'"usage"' in line and line.startswith(b"data: "):
            event = json.loads(line[6:])
            usage = event.get("usage") or event["response"]["usage"]
            return int(usage.get("completion_tokens") or usage["output_tokens"])
    raise RuntimeError(f"{path}: a stream that breaks off: {last[-300:]!r}")


async def together(url: str, path: str, bodies: Sequence[dict[str, Any]]) -> Batch:
    """Streams all bodies at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        begun_s = time.perf_counter()
        counts = await asyncio.gather(*(stream(client, path, body) for body in bodies))
        return Batch(tuple(counts), time.perf_counter() - begun_s)
