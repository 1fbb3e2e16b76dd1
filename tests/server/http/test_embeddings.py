"""Embeddings over HTTP, by OpenAI's own client, beside chats."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.examples import examples, run_example

TEXTS = ["abc", "a longer text " * 6, "x"]


@pytest.fixture(scope="module")
def client(embeds: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embeds.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


def post(server: Any, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.http}/v1/embeddings", json=body, timeout=60)


def vectors(answer: Any) -> np.ndarray:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data])


def test_a_text_is_a_vector_of_length_one(client):
    answer = client.embeddings.create(model="tiny", input="abc")
    assert (answer.object, answer.model) == ("list", "tiny")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    [vector] = vectors(answer)
    assert vector.shape == (32,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("pooling", [None, "last", "mean", "cls"])
def test_each_of_several_texts_is_as_it_is_alone(client, embeds, pooling):
    ask = {"model": "tiny", "extra_body": {"pooling": pooling}}
    together = client.embeddings.create(input=TEXTS, **ask)
    alone = [vectors(client.embeddings.create(input=text, **ask))[0] for text in TEXTS]
    np.testing.assert_allclose(vectors(together), alone, rtol=0, atol=1e-5)
    assert together.usage.prompt_tokens == sum(map(len, TEXTS))
    tokenize = f"{embeds.http}/tokenize"
    ids = [httpx.post(tokenize, json={"prompt": text}).json()["tokens"] for text in TEXTS]
    for given in (ids, ids[:1], ids[0]):
        found = vectors(client.embeddings.create(input=given, **ask))
        np.testing.assert_allclose(found, alone[: len(found)], rtol=0, atol=1e-5)


def test_numbers_and_base64_say_the_same(embeds):
    found = post(embeds, {"input": TEXTS}).json()["data"]
    packed = post(embeds, {"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    for numbers, text in zip(found, packed, strict=True):
        vector = np.frombuffer(base64.b64decode(text["embedding"]), "<f4")
        np.testing.assert_allclose(vector, numbers["embedding"], rtol=0, atol=1e-6)


def test_fewer_dimensions_are_the_first_ones_at_length_one(client):
    [whole] = vectors(client.embeddings.create(model="tiny", input="abc"))
    [few] = vectors(client.embeddings.create(model="tiny", input="abc", dimensions=5))
    np.testing.assert_allclose(few, whole[:5] / np.linalg.norm(whole[:5]), rtol=0, atol=1e-6)


def test_a_text_may_fill_the_context_and_no_more(embeds):
    assert post(embeds, {"input": "a" * 512}).status_code == 200
    error = post(embeds, {"input": ["a", "a" * 513]}).json()["error"]
    assert error["param"] == "input"
    assert "at most 512 tokens" in error["message"]
    cut = post(embeds, {"input": "a" * 600, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 512


BAD = {
    "an empty text": ({"input": ""}, "input"),
    "an empty text among others": ({"input": ["a", ""]}, "input"),
    "no texts": ({"input": []}, "input"),
    "an empty list of tokens": ({"input": [[]]}, "input"),
    "mixed texts": ({"input": ["a", [1]]}, "input"),
    "a number": ({"input": 4}, "input"),
    "nothing": ({}, "input"),
    "too many texts": ({"input": ["a"] * 2049}, "input"),
    "a token beyond the vocabulary": ({"input": [1, 100000]}, "input"),
    "dimensions beyond the model's": ({"input": "a", "dimensions": 33}, "dimensions"),
    "no dimensions": ({"input": "a", "dimensions": 0}, "dimensions"),
    "dimensions that are text": ({"input": "a", "dimensions": "3"}, "dimensions"),
    "another pooling": ({"input": "a", "pooling": "max"}, "pooling"),
    "another format": ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    "another prompt": ({"input": "a", "prompt_name": "query"}, "prompt_name"),
    "another field": ({"input": "a", "temperature": 1.0}, "temperature"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_body_is_refused_by_the_name_of_its_field(embeds, case):
    body, field = BAD[case]
    answer = post(embeds, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="a")


def test_a_server_that_generates_says_how_to_start_one_that_embeds(live):
    answer = post(live, {"input": "abc"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "task"
    assert "start the engine with that task" in error["message"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_documents_examples_run(embeds, place):
    assert re.search(r"\d", run_example(examples("embeddings.md")[place], embeds))


def test_chats_and_embeddings_are_served_together(client, embeds):
    """The chat's tokens and the vectors are those of each alone."""
    ask = {"model": "tiny", "prompt": "abc", "max_tokens": 60, "temperature": 0}
    ask["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**ask).choices[0].text
    many = [f"text number {index} " * (1 + index % 5) for index in range(64)]
    alone = vectors(client.embeddings.create(model="tiny", input=many))
    texts: list[str] = []

    def chat() -> None:
        texts.append(client.completions.create(**ask).choices[0].text)

    chats = [threading.Thread(target=chat) for _ in range(4)]
    for thread in chats:
        thread.start()
    beside = vectors(client.embeddings.create(model="tiny", input=many))
    for thread in chats:
        thread.join()
    assert texts == [text] * 4
    np.testing.assert_allclose(beside, alone, rtol=0, atol=1e-5)
