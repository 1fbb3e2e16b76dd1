"""Scores, reranking and classes over HTTP, with the errors of each API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

QUERY, DOCUMENTS = "which?", ["one text", "another one", "which?", "the last of them"]


@pytest.fixture(scope="module")
def scores(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, server_process: Any, tiny_args: Any
) -> Iterator[Any]:
    """A server that embeds and does not generate."""
    log = tmp_path_factory.mktemp("scores") / "stderr"
    args = ("--model", str(tiny_model), *tiny_args, "--task", "embed")
    with server_process(*args, log=log) as process:
        yield process


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.http}{path}", json=body, timeout=60)


@pytest.fixture(scope="module")
def cosines(scores: Any) -> np.ndarray:
    """Of the query with each document, from their embeddings."""
    found = post(scores, "/v1/embeddings", {"input": [QUERY, *DOCUMENTS]}).json()["data"]
    vectors = np.array([item["embedding"] for item in found])
    return vectors[1:] @ vectors[0]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_a_score_is_the_cosine_of_two_embeddings(scores, cosines, path):
    answer = post(scores, path, {"text_1": QUERY, "text_2": DOCUMENTS}).json()
    found = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(found, cosines, rtol=0, atol=1e-5)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2, 3]
    assert found[2] == pytest.approx(1, abs=1e-5)
    pairs = post(scores, path, {"text_1": DOCUMENTS, "text_2": DOCUMENTS}).json()
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1] * 4, abs=1e-5)
    assert answer["usage"]["total_tokens"] == len("".join([QUERY, *DOCUMENTS]))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_scores(scores, cosines, path):
    body = {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]}
    results = post(scores, path, body).json()["results"]
    assert [item["index"] for item in results] == np.argsort(-cosines).tolist()
    for item in results:
        assert item["relevance_score"] == pytest.approx(cosines[item["index"]], abs=1e-5)
        assert item["document"] == {"text": DOCUMENTS[item["index"]]}
    best = post(scores, path, body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{name: results[0][name] for name in ("index", "relevance_score")}]


def test_hidden_states_are_pooled_as_vllm_names_them(scores):
    body = {"input": QUERY, "pooling": "mean", "normalize": False}
    [pooled] = post(scores, "/pooling", body).json()["data"]
    [same] = post(scores, "/v1/embeddings", body).json()["data"]
    assert (pooled["object"], pooled["data"]) == ("pooling", same["embedding"])


BAD_RERANKS = {
    "no documents": ({"documents": []}, "documents"),
    "too many": ({"documents": ["a"] * 1025}, "documents"),
    "an empty one": ({"documents": ["a", ""]}, "documents"),
    "one that is no text": ({"documents": ["a", 4]}, "documents"),
    "one too long": ({"documents": ["a" * 600]}, "documents"),
    "an empty query": ({"query": ""}, "query"),
    "a query too long": ({"query": "a" * 600}, "query"),
    "no query": ({"query": None}, "query"),
    "a query that is a number": ({"query": 4}, "query"),
    "none of the best": ({"top_n": 0}, "top_n"),
    "an instruction": ({"instruction": "Find it."}, "instruction"),
    "another field": ({"max_chunks_per_doc": 3}, "max_chunks_per_doc"),
}


@pytest.mark.parametrize("case", BAD_RERANKS)
def test_a_bad_rerank_is_refused_in_the_shapes_of_cohere_and_jina(scores, case):
    changes, field = BAD_RERANKS[case]
    answer = post(scores, "/v2/rerank", {"query": QUERY, "documents": DOCUMENTS} | changes)
    assert answer.status_code == 400
    body = answer.json()
    assert body["message"] == body["detail"] == body["error"]["message"]
    assert body["error"]["param"] == field
    assert body["message"].startswith(f"{field} = ")


BAD_SCORES = {
    "an empty text": ({"text_1": ""}, "text_1"),
    "an empty second text": ({"text_2": ["a", ""]}, "text_2"),
    "too many": ({"text_2": ["a"] * 1025}, "text_2"),
    "lengths that differ": ({"text_1": ["a", "b"]}, "text_1"),
    "one too long": ({"text_1": "a" * 600}, "text_1"),
}


@pytest.mark.parametrize("case", BAD_SCORES)
def test_a_bad_score_is_refused_in_openais_shape(scores, case):
    changes, field = BAD_SCORES[case]
    answer = post(scores, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS} | changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert answer.json().keys() == {"error"}


def test_a_model_without_a_head_does_not_classify(scores, live):
    error = post(scores, "/classify", {"input": "a"}).json()["error"]
    assert (error["param"], "no classification head" in error["message"]) == ("classify", True)
    error = post(live, "/classify", {"input": "a"}).json()["error"]
    assert error["param"] == "task"


def test_a_server_that_embeds_does_not_generate(scores):
    answer = post(scores, "/v1/completions", {"prompt": "abc"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "task"


@pytest.fixture(scope="module")
def classifies(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, server_process: Any, tiny_args: Any
) -> Iterator[Any]:
    """A server of a model with a classification head."""
    import json
    import shutil

    from safetensors.numpy import load_file, save_file

    directory = tmp_path_factory.mktemp("classifier")
    shutil.copytree(tiny_model, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "dull", "1": "fair", "2": "fine"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    tensors["score.weight"] = np.random.default_rng(1).standard_normal((3, 32)).astype("f4")
    save_file(tensors, directory / "model.safetensors")
    log = tmp_path_factory.mktemp("classifies") / "stderr"
    with server_process("--model", str(directory), *tiny_args, log=log) as process:
        yield process, tensors["score.weight"]


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_are_those_of_the_models_head(classifies, path):
    server, weight = classifies
    texts = ["abc", "another"]
    raw = post(server, "/pooling", {"input": texts, "pooling": "last", "normalize": False}).json()
    answer = post(server, path, {"input": texts}).json()
    for vector, item in zip(raw["data"], answer["data"], strict=True):
        logits = weight.astype(float) @ vector["data"]
        want = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        np.testing.assert_allclose(item["probs"], want, rtol=0, atol=1e-5)
        assert item["label"] == ["dull", "fair", "fine"][int(want.argmax())]
        assert item["num_classes"] == 3
