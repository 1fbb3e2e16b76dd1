"""Whose requests are whose: over gRPC, HTTP and KServe, on the real engine of a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from octavo.engine.errors import InvalidRequestError, UnauthenticatedError
from octavo.engine.sampling_params import SamplingParams
from octavo.server.client import AsyncOctavoClient
from octavo.server.proto.kserve.v2 import inference_pb2
from octavo.server.proto.kserve.v2.inference_pb2_grpc import GRPCInferenceServiceStub
from octavo.server.serve import OctavoServer
from octavo.server.serve_config import ServeConfig

ACME, ACME_TOO, BETA, PLAIN, PLAIN_TOO = [
    f"{name}-0123456789" for name in ("acme", "acme2", "beta", "plain", "plain2")
]
TOKENS = f"acme: {ACME}\nacme:{ACME_TOO}\nbeta:{BETA}\n{PLAIN}\n{PLAIN_TOO}\n"
PROMPT = "a prompt of several pages, which only its own tenant may know to have been asked"
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SHORT.replace(max_tokens=300)


@pytest.fixture(scope="module")
def built(tiny_model: Path) -> Iterator[Any]:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=str(tiny_model), served_model_name="tiny", max_num_seqs=8,
            max_num_batched_tokens=32, max_model_len=512, num_kv_pages=320, block_size=16,
            warm_up="coarse", fail_on_compile=True,
        )
    )  # fmt: skip
    close, engine.close = engine.close, lambda: None  # type: ignore[method-assign]
    yield engine
    close()


@dataclass
class Doors:
    """A server's ports, and clients that show a token."""

    grpc: str
    http: str
    stack: contextlib.AsyncExitStack
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def client(self, token: str | None) -> AsyncOctavoClient:
        """Of gRPC. All callers share a connection: whose call it is must not stick to it."""
        if "" not in self.channels:
            channel = grpc.aio.insecure_channel(self.grpc)
            self.channels[""] = await self.stack.enter_async_context(channel)
        return AsyncOctavoClient(channel=self.channels[""], token=token, retry=None)

    async def ask_http(
        self, http: httpx.AsyncClient, token: str | None, **body: Any
    ) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        if (name := body.pop("name", None)) is not None:
            headers["x-request-id"] = name
        ask = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return await http.post("/v1/completions", json=ask | body, headers=headers)


Scenario = Callable[[Doors], Awaitable[None]]


@pytest.fixture
def served(
    built: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """Runs a scenario against a server over the engine; afterwards all pages must be free."""
    from octavo.engine import async_engine

    monkeypatch.setattr(async_engine, "open_engine", lambda config, progress: built)
    built.flush_prefix_cache()

    @contextlib.asynccontextmanager
    async def doors(tokens: str | None) -> AsyncIterator[Doors]:
        path = None
        if tokens is not None:
            path = tmp_path / "tokens"
            path.write_text(tokens)
        server = OctavoServer(
            ServeConfig(grpc_port=0, http_port=0, token_file=None if path is None else str(path))
        )
        addresses = await server.bind()
        assert addresses.http is not None
        await server.attach(async_engine.AsyncEngine())
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(server.drain_and_stop)
            yield Doors(addresses.grpc, addresses.http, stack)

    def run(scenario: Scenario, tokens: str | None = TOKENS) -> None:
        async def main() -> None:
            async with asyncio.timeout(120), doors(tokens) as found:
                await scenario(found)

        asyncio.run(main())

    yield run
    load = built.load()
    assert load.num_free_pages == load.num_total_pages


async def cached_by_grpc(doors: Doors, token: str | None, **ask: Any) -> int:
    client = await doors.client(token)
    return (await client.generate(PROMPT, SHORT, **ask)).num_cached_tokens


async def cached_by_http(doors: Doors, token: str | None, **ask: Any) -> int:
    async with httpx.AsyncClient(base_url=doors.http, timeout=60) as http:
        answer = await doors.ask_http(http, token, **ask)
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count


@pytest.mark.parametrize("cached", [cached_by_grpc, cached_by_http])
def test_no_tenant_learns_what_another_has_asked(served, cached):
    async def scenario(doors):
        assert await cached(doors, ACME) == 0
        whole = await cached(doors, ACME)
        assert whole > 32
        assert await cached(doors, ACME_TOO) == whole  # the same tenant
        assert await cached(doors, ACME, tenant="acme") == whole  # which may say so
        assert await cached(doors, BETA) == 0
        assert await cached(doors, PLAIN) == 0
        assert await cached(doors, BETA) == whole
        # Those without a tenant share, unless they say otherwise.
        assert await cached(doors, PLAIN_TOO) == whole
        assert await cached(doors, PLAIN_TOO, tenant="of my own") == 0
        assert await cached(doors, BETA, cache_salt="pepper") == 0

    served(scenario)


def test_kserves_requests_are_the_tokens_tenants_too(served):
    async def scenario(doors):
        async with grpc.aio.insecure_channel(doors.grpc) as channel:
            stub = GRPCInferenceServiceStub(channel)
            request = inference_pb2.ModelInferRequest(model_name="tiny", id="k")
            tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(PROMPT.encode())
            answer = await stub.ModelInfer(request, metadata=(("authorization", f"Bearer {ACME}"),))
            assert answer.id == "k"
        assert await cached_by_grpc(doors, BETA) == 0
        assert await cached_by_grpc(doors, ACME) > 32

    served(scenario)


def test_nobody_can_claim_anothers_tenant(served):
    async def scenario(doors):
        for token in (ACME, PLAIN):
            client = await doors.client(token)
            with pytest.raises(InvalidRequestError, match="tenant = 'beta' is not allowed"):
                await client.generate(PROMPT, SHORT, tenant="beta")
            with pytest.raises(InvalidRequestError, match="tenant"):
                async for _ in client.stream(PROMPT, SHORT, tenant="beta"):
                    pass
            async with httpx.AsyncClient(base_url=doors.http, timeout=60) as http:
                for more in ({}, {"stream": True}, {"prompt": ["a", "b"]}):
                    answer = await doors.ask_http(http, token, tenant="beta", **more)
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == "tenant"
        with pytest.raises(UnauthenticatedError):
            await (await doors.client(None)).generate(PROMPT, SHORT, tenant="beta")

    served(scenario)


async def stream_of(doors: Doors, token: str | None, name: str) -> Any:
    stream = (await doors.client(token)).stream(PROMPT, LONG, request_id=name)
    await anext(stream)
    return stream


async def end_of(stream: Any) -> str:
    last = None
    async for output in stream:
        last = output
    return last.outputs[0].finish_reason


def test_abort_finds_what_the_token_or_its_tenant_submitted_and_nothing_else(served):
    async def scenario(doors):
        mine = [await stream_of(doors, ACME, "x"), await stream_of(doors, ACME_TOO, "x")]
        others = [await stream_of(doors, token, "x") for token in (BETA, PLAIN)]
        for token in (PLAIN_TOO, BETA, PLAIN):
            client = await doors.client(token)
            assert await client.abort("y") is False
        assert await (await doors.client(PLAIN_TOO)).abort("x") is False
        assert await (await doors.client(ACME_TOO)).abort("x") is True
        assert [await end_of(stream) for stream in mine] == ["cancelled"] * 2
        assert [await end_of(stream) for stream in others] == ["length"] * 2

    served(scenario)


def test_abort_ends_every_prompt_of_an_http_request(served, built):
    async def scenario(doors):
        async with httpx.AsyncClient(base_url=doors.http, timeout=60) as http:
            asked = asyncio.create_task(
                doors.ask_http(http, PLAIN, prompt=["a", "b", "c"], max_tokens=400, name="x")
            )
            while built.scheduler.num_running < 3:
                await asyncio.sleep(0.001)
            assert not await (await doors.client(PLAIN_TOO)).abort("x")
            assert await (await doors.client(PLAIN)).abort("x")
            choices = (await asked).json()["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["cancelled"] * 3

    served(scenario)


def test_without_tokens_everybody_is_one_caller(served):
    async def scenario(doors):
        stream = await stream_of(doors, None, "x")
        assert await (await doors.client("any-token-at-all")).abort("x")
        assert await end_of(stream) == "cancelled"
        whole = await cached_by_http(doors, None)
        assert whole > 32
        assert await cached_by_grpc(doors, None, tenant="acme") == 0

    served(scenario, None)


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_an_id_that_was_cancelled_may_be_given_again_at_once(served, door):
    """Sixty clients leave a stream and ask something else under its id, as a retrying proxy may."""
    prompts = [f"the {number}th prompt, which differs" for number in range(60)]

    async def scenario(doors):
        http = await doors.stack.enter_async_context(
            httpx.AsyncClient(
                base_url=doors.http, timeout=60, limits=httpx.Limits(max_connections=100)
            )
        )
        client = await doors.client(ACME)

        async def ask(prompt: str, name: str | None = None) -> str:
            if door == "grpc":
                output = await client.generate(prompt, SHORT, request_id=name)
                return output.outputs[0].text
            answer = await doors.ask_http(http, ACME, prompt=prompt, name=name)
            text: str = answer.json()["choices"][0]["text"]
            return text

        async def leave(name: str) -> None:
            if door == "grpc":
                stream = client.stream("an old one", LONG, request_id=name)
                await anext(stream)
                await stream.aclose()
                return
            ask = {"prompt": "an old one", "max_tokens": 300, "stream": True, "ignore_eos": True}
            headers = {"authorization": f"Bearer {ACME}", "x-request-id": name}
            async with http.stream("POST", "/v1/completions", json=ask, headers=headers) as answer:
                await anext(answer.aiter_lines())

        async def again(number: int) -> str:
            name = f"x{number % 5}"
            await leave(name)
            return await ask(prompts[number], name)

        alone = [await ask(prompt) for prompt in prompts]
        assert len(set(alone)) > 50
        assert await asyncio.gather(*map(again, range(60))) == alone

    served(scenario)
