"""Sentence Transformers' process of `embeddings_client`, in an environment without Octavo.

python benchmarks/embeddings_peer.py write MODEL ROOT       models with poolings, their vectors
python benchmarks/embeddings_peer.py beir MODEL ROOT URL    BEIR's ranks, by both
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, models

SIZES = (1, 8, 31)


def write(model: Path, root: Path) -> None:
    """Writes a folder for each pooling, normalized and not, and what they embed texts to."""
    task = json.loads((root / "task.json").read_text())
    made = []
    for pooling in ("mean", "lasttoken", "cls"):
        for normalize in (True, False):
            transformer = models.Transformer(str(model), max_seq_length=512)
            if transformer.tokenizer.pad_token is None:
                transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
            width = transformer.get_word_embedding_dimension()
            modules = [transformer, models.Pooling(width, pooling_mode=pooling)]
            modules += [models.Normalize()] if normalize else []
            whole = SentenceTransformer(modules=modules, device="cpu", prompts=task["prompts"])
            folder = f"{pooling}-{normalize}"
            whole.save(str(root / folder))
            texts = task["texts"]
            made.append({
                "folder": folder, "pooling": pooling, "normalize": normalize,
                "plain": whole.encode(texts, batch_size=1).tolist(),
                "query": whole.encode(texts, batch_size=1, prompt_name="query").tolist(),
                "dimensions": {
                    size: _cut(whole, texts, size, normalize=normalize) for size in SIZES
                },
            })  # fmt: skip
    (root / "wanted.json").write_text(json.dumps(made))


def _cut(model: SentenceTransformer, texts: list[str], size: int, *, normalize: bool) -> Any:
    """The first numbers, again of length 1 where vectors are."""
    vectors = model.encode(texts, batch_size=1, truncate_dim=size, normalize_embeddings=normalize)
    return vectors.tolist()


class _Embedder:
    """What BEIR calls a model."""

    def __init__(self, embed: Any) -> None:
        self._embed = embed

    def encode_queries(self, queries: list[str], **_: Any) -> Any:
        return torch.tensor(self._embed(list(queries)))

    def encode_corpus(self, corpus: Any, **_: Any) -> Any:
        return torch.tensor(self._embed([each["text"] for each in corpus]))


def beir(model: Path, root: Path, url: str) -> None:
    """Writes BEIR's figures of both; says so if it is not installed."""
    try:
        from beir.retrieval.evaluation import EvaluateRetrieval
        from beir.retrieval.search.dense import DenseRetrievalExactSearch
    except ImportError as error:
        print(f"BEIR was not run: {error}")
        (root / "beir.json").write_text("{}")
        return
    task = json.loads((root / "task.json").read_text())
    corpus = {key: {"title": "", "text": text} for key, text in task["corpus"].items()}
    # Of a document with the query's own name BEIR takes no account.
    queries = {f"about {key}": text for key, text in task["queries"].items()}
    relevant = {f"about {key}": {key: 1} for key in corpus}
    own = SentenceTransformer(str(model), device="cpu")

    def served(texts: list[str]) -> Any:
        body = json.dumps({"model": "tiny", "input": texts, "truncate_prompt_tokens": -1})
        request = urllib.request.Request(
            f"{url}/v1/embeddings", body.encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            read = json.load(answer)["data"]
        return np.array([item["embedding"] for item in read], np.float32)

    figures = {}
    for label, embed in (("octavo", served), ("sentence-transformers", own.encode)):
        search = DenseRetrievalExactSearch(_Embedder(embed), batch_size=32)
        retriever = EvaluateRetrieval(search, score_function="cos_sim", k_values=[1, 10, 100])
        ranked = retriever.retrieve(corpus, queries)
        figures[label] = retriever.evaluate(relevant, ranked, [1, 10, 100])[:2]
    (root / "beir.json").write_text(json.dumps(figures))
    print(f"BEIR: {figures}")


if __name__ == "__main__":
    {"write": write, "beir": beir}[sys.argv[1]](*map(Path, sys.argv[2:4]), *sys.argv[4:])
