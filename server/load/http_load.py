"""Streams completions from any server that speaks OpenAI's HTTP API, and times what comes.

The load is open: requests are sent when they are meant to be, however slow the server is, unless a
limit of requests in flight says otherwise. Times count from the moment a request is sent, as in
vLLM's serving benchmark, whose names the figures have.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workload import BenchRequest

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
_DATA = "data: "
_DONE = "[DONE]"


@dataclass(slots=True)
class Sent:
    """One request as its client saw it.

    Attributes:
        num_prompt, num_output: tokens, as the server counted them; 0 if it did not answer.
        sent_s: on the client's clock, seconds.
        token_s: when each part of the text came.
        ended_s: end of the stream.
        error: what went wrong, if anything.
    """

    num_prompt: int = 0
    num_output: int = 0
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first; None of one token."""
        if self.num_output < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_output - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, and how.

    Attributes:
        base_url: of the server, without `/v1`.
        model: its name there; None asks the server.
        token: shown as a bearer token, if given.
        max_concurrency: requests in flight; None for no limit.
        timeout_s: for each request.
        extra_body: more fields of each request.
    """

    base_url: str
    model: str | None = None
    token: str | None = None
    max_concurrency: int | None = None
    timeout_s: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)


async def run_load(
    load: Load, requests: Sequence[BenchRequest], on_end: Callable[[Sent], None] | None = None
) -> list[Sent]:
    """Sends the requests at their times of arrival, counted from now.

    Args:
        on_end: told of each request that ended.

    Returns:
        What became of each, in their order.

    Raises:
        InvalidConfigError: no server answers there, or `httpx` is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise InvalidConfigError("base_url", load.base_url, "used with httpx installed") from error

    headers = {} if load.token is None else {"authorization": f"Bearer {load.token}"}
    timeout = httpx.Timeout(load.timeout_s, connect=CONNECT_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=load.base_url, headers=headers, timeout=timeout, limits=limits
    ) as client:
        model = load.model or await _served_model(client)
        slots: Any = contextlib.nullcontext()
        if load.max_concurrency is not None:
            slots = asyncio.Semaphore(load.max_concurrency)
        begun_s = time.perf_counter()

        async def one(request: BenchRequest) -> Sent:
            await asyncio.sleep(begun_s + request.arrival_s - time.perf_counter())
            async with slots:
                sent = await _send(client, load, model, request)
            if on_end is not None:
                on_end(sent)
            return sent

        return list(await asyncio.gather(*map(one, requests)))


async def _served_model(client: httpx.AsyncClient) -> str:
    import httpx

    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        allowed = f"the URL of a server that speaks OpenAI's API ({error})"
        raise InvalidConfigError("base_url", str(client.base_url), allowed) from None


async def _send(client: httpx.AsyncClient, load: Load, model: str, request: BenchRequest) -> Sent:
    import httpx

    body = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.extra_body,
    }
    sent = Sent(sent_s=time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode(errors="replace")
                sent.error = f"{answer.status_code}: {text[:200]}"
            else:
                await _read(answer, sent)
    except httpx.HTTPError as error:
        sent.error = f"{type(error).__name__}: {error}"
    sent.ended_s = time.perf_counter()
    return sent


async def _read(answer: httpx.Response, sent: Sent) -> None:
    is_done = False
    async for line in answer.aiter_lines():
        if not line.startswith(_DATA):
            continue
        now_s = time.perf_counter()
        data = line.removeprefix(_DATA)
        if data == _DONE:
            is_done = True
            break
        event = json.loads(data)
        if "error" in event:
            sent.error = str(event["error"])[:200]
            return
        if usage := event.get("usage"):
            sent.num_prompt = usage["prompt_tokens"]
            sent.num_output = usage["completion_tokens"]
        if event.get("choices"):
            sent.token_s.append(now_s)
    if not is_done or not sent.token_s:
        sent.error = "the stream ended early"


def summarize(sent: Sequence[Sent], goals_ms: dict[str, float] | None = None) -> dict[str, Any]:
    """The benchmark's figures, times in milliseconds.

    Args:
        goals_ms: most `ttft`, `tpot`, `e2el`; requests within all of them are the goodput.
    """
    good = [item for item in sent if item.error is None]
    duration_s = max((item.ended_s for item in sent), default=0.0) - min(
        (item.sent_s for item in sent), default=0.0
    )
    times = {
        "ttft": [item.ttft_s for item in good],
        "tpot": [item.tpot_s for item in good if item.tpot_s is not None],
        "itl": [gap for item in good for gap in np.diff(item.token_s).tolist()],
        "e2el": [item.e2e_s for item in good],
    }
    num_input, num_output = (
        sum(getattr(item, name) for item in good) for name in ("num_prompt", "num_output")
    )
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    report: dict[str, Any] = {
        "completed": len(good),
        "failed": len(sent) - len(good),
        "duration": duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) * per_s,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
    }
    if goals_ms:
        report["request_goodput"] = sum(_is_within(item, goals_ms) for item in good) * per_s
    for name, values in times.items():
        values_ms = np.array(values) * 1e3
        if len(values_ms):
            report[f"mean_{name}_ms"] = float(values_ms.mean())
            for percent, label in ((50, "median"), (90, "p90"), (99, "p99")):
                report[f"{label}_{name}_ms"] = float(np.percentile(values_ms, percent))
    return report


def _is_within(item: Sent, goals_ms: dict[str, float]) -> bool:
    took_s = {"ttft": item.ttft_s, "tpot": item.tpot_s or 0.0, "e2el": item.e2e_s}
    return all(took_s[name] * 1e3 <= goal_ms for name, goal_ms in goals_ms.items())
