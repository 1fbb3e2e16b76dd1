"""Cohere's package, which reranks."""

from __future__ import annotations

import cohere

from benchmarks.clients.place import TEXTS, Place, raised


def check_reranking(place: Place) -> None:
    client = cohere.ClientV2("unused", base_url=place.url, timeout=60)
    answer = client.rerank(model=place.model, query=TEXTS[1], documents=list(TEXTS), top_n=2)
    assert len(answer.results) == 2
    assert answer.results[0].index == 1
    assert answer.results[0].relevance_score > answer.results[1].relevance_score


def check_an_error_has_its_class(place: Place) -> None:
    client = cohere.ClientV2("unused", base_url=place.url, timeout=60)
    told = raised(
        cohere.BadRequestError,
        lambda: client.rerank(model=place.model, query="a", documents=[]),
    )
    assert "documents" in str(told.body)
