"""Embeddings and scores of very many texts, or of very long ones: refused, or served in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.hostile.case import Case
from benchmarks.hostile.tool_cases import sends

EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
_WORDS = "all the words that a text of some length may have "


def _texts(count: int, repeats: int) -> list[str]:
    return [f"{number} " + _WORDS * repeats for number in range(count)]


_BODIES: dict[str, tuple[str, Callable[[], dict[str, Any]], int]] = {
    "2,048 words": (EMBED, lambda: {"input": [f"word {n}" for n in range(2_048)]}, 1),
    "2,048 words as base64, mean": (
        EMBED,
        lambda: {
            "input": [f"word {n}" for n in range(2_048)], "encoding_format": "base64",
            "pooling": "mean",
        },
        1,
    ),
    "2,049 words": (EMBED, lambda: {"input": ["a"] * 2_049}, 4),
    "8 texts of 7,500 characters": (EMBED, lambda: {"input": _texts(8, 150)}, 1),
    "a text of 4 MB": (EMBED, lambda: {"input": "a" * 4_000_000}, 4),
    "2,000 texts of 2,000 characters, cut to a token": (
        EMBED, lambda: {"input": ["a" * 2_000] * 2_000, "truncate_prompt_tokens": 1}, 1
    ),
    "a query with 1,024 documents": (
        RERANK, lambda: {"query": "which?", "documents": [f"word {n}" for n in range(1_024)]}, 1
    ),
    "1,024 × 1,024 pairs": (SCORE, lambda: {"text_1": ["a"] * 1_024, "text_2": ["b"] * 1_024}, 1),
    "900,000 token ids": (EMBED, lambda: {"input": [7] * 900_000}, 2),
}  # fmt: skip

CASES = tuple(
    Case(
        name=f"embed: {name}", send=sends(path, body, count),
        short=name == "2,049 words",
    )
    for name, (path, body, count) in _BODIES.items()
)  # fmt: skip
