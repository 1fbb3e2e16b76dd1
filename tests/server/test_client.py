"""Both clients against a real server: streams, deadlines, cancellation, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from octavo.client import (
    AsyncOctavoClient,
    DeadlineExceededError,
    InvalidRequestError,
    OctavoClient,
    OverloadedError,
    RequestOutputKind,
    RetryPolicy,
    SamplingParams,
)
from octavo.server import front
from octavo.server.client_requests import generate_request
from tests.waiting import until

SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=480, temperature=0, ignore_eos=True)
WAIT_S = 30


def is_idle(client: OctavoClient) -> bool:
    load = client.load()
    return load.num_running == load.num_waiting == 0 and load.num_free_pages == load.num_total_pages


def with_async(live: Any, scenario: Callable[[AsyncOctavoClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with AsyncOctavoClient(live.grpc) as client, asyncio.timeout(WAIT_S):
            return await scenario(client)

    return asyncio.run(main())


def test_both_clients_get_the_same(live):
    async def ask(client: AsyncOctavoClient) -> list[Any]:
        deltas = [output async for output in client.stream("abc", SHORT)]
        return [
            (await client.generate("abc", SHORT)).outputs[0],
            "".join(output.outputs[0].text for output in deltas),
            await client.tokenize("abc"),
            await client.detokenize(await client.tokenize("déjà")),
            (await client.model_info()).model,
        ]

    with OctavoClient(live.grpc) as client:
        deltas = list(client.stream("abc", SHORT))
        found = [
            client.generate("abc", SHORT).outputs[0],
            "".join(output.outputs[0].text for output in deltas),
            client.tokenize("abc"),
            client.detokenize(client.tokenize("déjà")),
            client.model_info().model,
        ]
    assert found == with_async(live, ask)
    assert found[0].text == found[1]
    assert found[3:] == ["déjà", "tiny"]
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]


def test_a_stream_comes_in_pieces(live):
    """A long one: what a client does not take in time is put together, for a few tokens all."""
    with OctavoClient(live.grpc) as client:
        deltas = list(client.stream("abc", LONG))
        whole = client.generate("abc", LONG).outputs[0]
    assert len(deltas) > 1
    assert "".join(output.outputs[0].text for output in deltas) == whole.text


def test_cumulative_streams_grow(live):
    with OctavoClient(live.grpc) as client:
        kind = RequestOutputKind.CUMULATIVE
        lengths = [
            len(output.outputs[0].token_ids)
            for output in client.stream("abc", SHORT, output_kind=kind)
        ]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 8


def test_one_client_serves_many_threads(live):
    with OctavoClient(live.grpc) as client, ThreadPoolExecutor(8) as pool:
        prompts = [f"prompt {number}" for number in range(24)]
        together = list(pool.map(lambda p: client.generate(p, SHORT).outputs[0].token_ids, prompts))
        alone = [client.generate(prompt, SHORT).outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_a_deadline_ends_a_call_of_either_kind_and_its_request(live):
    async def ask(client: AsyncOctavoClient) -> None:
        with pytest.raises(DeadlineExceededError):
            await client.generate("abc", LONG, timeout_s=0.05)
        with pytest.raises(DeadlineExceededError):
            async for _ in client.stream("abc", LONG, timeout_s=0.05):
                pass

    with_async(live, ask)
    with OctavoClient(live.grpc, timeout_s=0.05) as hasty, OctavoClient(live.grpc) as client:
        with pytest.raises(DeadlineExceededError):
            hasty.generate("abc", LONG)
        with pytest.raises(DeadlineExceededError):
            list(hasty.stream("abc", LONG))
        assert len(hasty.generate("abc", SHORT, timeout_s=60).outputs[0].token_ids) == 8
        until(lambda: is_idle(client))


def test_a_cancelled_task_ends_its_request(live):
    async def ask(client: AsyncOctavoClient) -> None:
        task = asyncio.create_task(client.generate("abc", LONG.replace(n=8, temperature=1.0)))
        while not (await client.load()).num_running:
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = client.stream("abc", LONG)
        await anext(stream)
        await stream.aclose()

    with_async(live, ask)
    with OctavoClient(live.grpc) as client:
        until(lambda: is_idle(client))


def test_a_full_server_is_asked_again_when_it_said(on_stand, monkeypatch):
    monkeypatch.setattr(front, "RETRY_AFTER_S", 0.03)

    async def scenario(stand):
        stand.engine.gate.clear()
        holds = asyncio.create_task(stand.client.generate("x", SamplingParams(max_tokens=2)))
        await stand.until(lambda: stand.server.front.num_inflight == 1)
        async with AsyncOctavoClient(stand.address, retry=None) as impatient:
            with pytest.raises(OverloadedError) as caught:
                await impatient.generate("x", SHORT)
            assert caught.value.retry_after_s == 0.03
        patient = AsyncOctavoClient(stand.address, retry=RetryPolicy(max_attempts=100))
        waits = asyncio.create_task(patient.generate("y", SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.1)
        assert not waits.done()
        stand.engine.gate.set()
        assert (await waits).outputs[0].token_ids == (await holds).outputs[0].token_ids == [1, 2]
        await patient.close()

    on_stand(scenario, max_concurrent_requests=1)


@pytest.mark.parametrize("prompt", [{"promt": "x"}, ["a", "b"], [1.5], np.array([[5, 6]]), 5, None])
def test_a_prompt_that_no_message_carries_is_named(prompt):
    with pytest.raises(InvalidRequestError, match=r"prompt = .* a string or a list of token ids"):
        generate_request(prompt, SamplingParams())


def test_token_ids_may_be_an_array_or_numbers_of_one():
    ids = np.array([5, 6])
    for prompt in (ids, [*ids], [5, ids[1]]):
        message = generate_request(prompt, SamplingParams(max_tokens=ids[0]))
        assert list(message.prompt_token_ids.ids) == [5, 6]
        assert message.sampling_params.max_tokens == 5
