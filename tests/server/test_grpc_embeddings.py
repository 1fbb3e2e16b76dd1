"""Embeddings over gRPC, by both clients, against those over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from octavo.client import AsyncOctavoClient, InvalidRequestError, OctavoClient, SamplingParams
from octavo.engine.errors import DeadlineExceededError, UnknownModelError
from octavo.server.client_requests import embed_request
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

TEXTS = ["abc", "a longer text " * 6, "x"]
TOLERANCE = 1e-5
"""Of each number of a vector of length 1: texts are batched with others in float32."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"pooling": "mean"},
    {"pooling": "cls", "dimensions": 8},
    {"pooling": "mean", "normalize": False, "dimensions": 5},
]


@pytest.fixture(scope="module")
def client(embeds: Any) -> Iterator[OctavoClient]:
    with OctavoClient(embeds.grpc, timeout_s=60) as client:
        yield client


@pytest.mark.parametrize("options", OPTIONS)
def test_vectors_are_those_of_http(client: OctavoClient, embeds: Any, options: Any) -> None:
    body = {"model": "tiny", "input": TEXTS} | options
    answer = httpx.post(f"{embeds.http}/v1/embeddings", json=body, timeout=60).json()
    want = [item["embedding"] for item in answer["data"]]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(lambda text: client.embed(text, **options), TEXTS))
    for text, output, vector in zip(TEXTS, found, want, strict=True):
        assert output.prompt == text
        scale = max(1.0, np.linalg.norm(vector))
        np.testing.assert_allclose(output.outputs.data, vector, rtol=0, atol=scale * TOLERANCE)
    tokens = [len(output.prompt_token_ids) for output in found]
    assert sum(tokens) == answer["usage"]["prompt_tokens"]


def test_both_clients_give_the_same_and_generate_beside(client: OctavoClient, embeds: Any) -> None:
    ids = client.tokenize("abc")

    async def ask() -> list[Any]:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        async with AsyncOctavoClient(embeds.grpc, timeout_s=60) as other:
            return await asyncio.gather(
                other.embed("abc", request_id="mine", priority="high", ttft_target_ms=5000),
                other.embed(ids),
                other.generate("abc", params),
            )

    text, tokens, generated = asyncio.run(ask())
    want = client.embed("abc").outputs.data
    for output in (text, tokens):
        np.testing.assert_allclose(output.outputs.data, want, rtol=0, atol=TOLERANCE)
        assert output.prompt_token_ids == ids
        assert 0 < output.metrics.first_token_s <= output.metrics.finished_s
    assert (text.request_id, text.prompt, tokens.prompt) == ("mine", "abc", None)
    assert len(generated.outputs[0].token_ids) == 8


def test_a_prompt_may_fill_the_context(client: OctavoClient) -> None:
    output = client.embed([70] * 512, pooling="mean")
    assert len(output.prompt_token_ids) == 512
    with pytest.raises(InvalidRequestError, match="'513 tokens' is not allowed: at most 512"):
        client.embed([70] * 513)


@pytest.mark.parametrize(
    ("prompt", "changes", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt_token_ids"),
        ([10**6], {}, "prompt_token_ids"),
        ("a" * 600, {}, "prompt"),
        ("a", {"dimensions": 10**6}, "dimensions"),
        ("a", {"dimensions": -1}, "dimensions"),
        ("a", {"pooling": 9}, "pooling"),
        ("a", {"prompt_name": "query"}, "prompt_name"),
        ("a", {"tenant": "t" * 300}, "tenant"),
        ("a", {"ttft_target_ms": -1.0}, "ttft_target_ms"),
    ],
)
def test_bad_requests_are_refused_by_name(
    client: OctavoClient, prompt: Any, changes: dict[str, Any], field: str
) -> None:
    message = embed_request(prompt)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequestError) as refused:
        client._call("Embed", message, pb.EmbedResponse)
    assert refused.value.field == field


def test_other_errors_are_typed(client: OctavoClient, embeds: Any, live: Any) -> None:
    with pytest.raises(UnknownModelError):
        client.embed("abc", model="other")
    with pytest.raises(DeadlineExceededError):
        client.embed("abc " * 100, timeout_s=1e-4)
    with OctavoClient(live.grpc) as other, pytest.raises(InvalidRequestError, match="task"):
        other.embed("abc")
    with pytest.raises(InvalidRequestError, match="pooling"):
        client.embed("abc", pooling="most")  # never sent
    call = grpc.insecure_channel(embeds.grpc).unary_unary("/octavo.v1.OctavoService/Embed")
    with pytest.raises(grpc.RpcError) as refused:
        call(pb.EmbedRequest(prompt="a", prompt_token_ids={"ids": [1]}).SerializeToString())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
