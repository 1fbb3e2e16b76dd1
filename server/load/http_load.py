"""Streams completions from any server that speaks OpenAI's HTTP API, and times what comes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.simulation.workloads.bench_requests import BenchRequest
from octavo.engine.simulation.workloads.traffic import TrafficClass
from octavo.server.load.figures import Sent

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
_DATA = "data: "
_DONE = "[DONE]"


class HttpTarget:
    """A server at a URL.

    Args:
        base_url: of the server, without `/v1`.
        model: its name there; None asks the server.
        token: shown as a bearer token, if given.
        timeout_s: for the next part of an answer.
        extra_body: more fields of each request.

    Raises:
        InvalidConfigError: `httpx` is not installed, or, on entering, no server answers there.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        token: str | None = None,
        timeout_s: float = 600.0,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise InvalidConfigError("base_url", base_url, "used with httpx installed") from error
        self._model = model
        self._extra_body = dict(extra_body or {})
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> HttpTarget:
        if self._model is None:
            self._model = await self._served_model()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def send(self, request: BenchRequest) -> Sent:
        """Streams one completion.

        Targets go in headers, which other servers ignore; tenant and priority in the body, if the
        request has any.
        """
        import httpx

        promised = request.traffic_class
        body = {
            "model": self._model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"tenant": promised.tenant} if promised.tenant else {}),
            **(
                {"priority": int(promised.priority)}
                if promised.priority is not Priority.NORMAL
                else {}
            ),
            **self._extra_body,
        }
        sent = Sent(sent_s=time.perf_counter())
        try:
            async with self._client.stream(
                "POST", "/v1/completions", json=body, headers=target_headers(promised)
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")
                    sent.error = f"{answer.status_code}: {text[:200]}"
                else:
                    await _read(answer, sent)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            sent.error = f"{type(error).__name__}: {error}"
        sent.ended_s = time.perf_counter()
        return sent

    async def _served_model(self) -> str:
        import httpx

        try:
            answer = await self._client.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            await self._client.aclose()
            allowed = f"the URL of a server that speaks OpenAI's API ({error})"
            raise InvalidConfigError("base_url", str(self._client.base_url), allowed) from None


def target_headers(promised: TrafficClass) -> dict[str, str]:
    """The targets of a request as Octavo's HTTP API hears them."""
    targets_s = {
        "ttft": promised.ttft_target_s,
        "tpot": promised.tpot_target_s,
        "e2e": promised.e2e_target_s,
    }
    return {
        f"x-slo-{kind}-ms": f"{target_s * 1e3:g}"
        for kind, target_s in targets_s.items()
        if target_s is not None
    }


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
