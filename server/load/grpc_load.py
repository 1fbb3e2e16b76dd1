"""Streams generations from an Octavo server over gRPC, and times what comes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import EngineDeadError, InvalidConfigError, OctavoError
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.simulation.workloads.bench_requests import BenchRequest
from octavo.server.client import AsyncOctavoClient
from octavo.server.load.figures import Sent


class GrpcTarget:
    """A server at an address. Refusals are counted, not tried again.

    Args:
        address: HOST:PORT.
        model: its name there; None is any.
        token: shown as a bearer token, if given.
        timeout_s: for each answer.
        sampling: more fields of `SamplingParams` for each request.

    Raises:
        InvalidConfigError: on entering, no server answers there.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str | None = None,
        token: str | None = None,
        timeout_s: float = 600.0,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = address
        self._model = model
        self._token = token
        self._timeout_s = timeout_s
        self._sampling = {"temperature": 0.0, **(sampling or {})}
        self._client: AsyncOctavoClient | None = None

    async def __aenter__(self) -> GrpcTarget:
        self._client = AsyncOctavoClient(
            self._address, token=self._token, timeout_s=self._timeout_s, retry=None
        )
        try:
            await self._client.model_info()
        except EngineDeadError as error:
            await self._client.close()
            allowed = f"the address of a server ({error})"
            raise InvalidConfigError("grpc", self._address, allowed) from None
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def send(self, request: BenchRequest) -> Sent:
        """Streams one generation."""
        assert self._client is not None, "entered"
        sent = Sent(sent_s=time.perf_counter())
        finished = False
        try:
            params = SamplingParams(**{"max_tokens": request.max_tokens, **self._sampling})
            promised = request.traffic_class
            outputs = self._client.stream(
                request.prompt_token_ids, params, model=self._model, tenant=promised.tenant,
                priority=promised.priority, ttft_target_ms=_milliseconds(promised.ttft_target_s),
                tpot_target_ms=_milliseconds(promised.tpot_target_s),
                e2e_target_ms=_milliseconds(promised.e2e_target_s),
            )  # fmt: skip
            async for output in outputs:
                now_s = time.perf_counter()
                num_new = sum(len(completion.token_ids) for completion in output.outputs)
                if num_new:
                    sent.token_s.append(now_s)
                sent.num_output += num_new
                sent.num_prompt = len(output.prompt_token_ids)
                finished = output.finished
            if not finished or not sent.token_s:
                sent.error = "the stream ended early"
        except OctavoError as error:
            sent.error = f"{type(error).__name__}: {error}"
        sent.ended_s = time.perf_counter()
        return sent


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
