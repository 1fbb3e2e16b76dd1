"""Messages and Responses against chats, and constrained streams against free ones, in turns."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from benchmarks.new_paths.schemas import draw_schemas
from benchmarks.new_paths.streams import APIS, Batch, body_of, together

LEAST_OF_CHATS, LEAST_OF_FREE = 0.98, 0.9


def compare_apis(url: str, num_streams: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Rates of the APIs over those of chats: the same prompts, the same tokens.

    Raises:
        RuntimeError: they had other tokens.
    """
    ratios: dict[str, list[float]] = {api: [] for api in APIS}
    rates: dict[str, list[float]] = {api: [] for api in APIS}
    for number in range(-1, rounds):
        batches: dict[str, Batch] = {}
        # Each API is first as often as last; a salt of its own keeps it from another's pages.
        order = list(APIS)[number % len(APIS) :] + list(APIS)[: number % len(APIS)]
        for api in order[:: 1 if number % 2 else -1]:
            texts = [
                f"Tell me of number {number + 2} and of {each}." for each in range(num_streams)
            ]
            bodies = [body_of(api, text, num_tokens, f"{api} {number}") for text in texts]
            batches[api] = asyncio.run(together(url, APIS[api], bodies))
        if len({batch.num_tokens for batch in batches.values()}) > 1:
            # Near ties may part two batches; what is compared is the rate.
            print(f"round {number}: not all tokens are equal", flush=True)
        if number < 0:
            continue  # a warm-up
        for api, batch in batches.items():
            rates[api].append(batch.rate)
            ratios[api].append(batch.rate / batches["chats"].rate)
    return {
        api: {
            "tokens_per_s": round(statistics.median(rates[api]), 1),
            "of_chats": round(statistics.median(ratios[api]), 4),
        }
        for api in APIS
    }


def compare_constrained(url: str, num_streams: int, rounds: int, seed: int) -> dict[str, Any]:
    """The rate of streams that keep to a schema over that of free ones with as many tokens each."""
    ratios, rates = [], []
    for number in range(-1, rounds):
        schemas = draw_schemas(num_streams, seed + number)
        bodies = []
        for each, schema in enumerate(schemas):
            body = body_of("chats", f"Answer {each} in JSON.", 120, f"constrained {number}")
            wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            bodies.append(body | {"response_format": wanted})
        bound = asyncio.run(together(url, APIS["chats"], bodies))
        bodies = [
            body_of("chats", f"Answer {each} in JSON.", count, f"free {number}")
            | {"ignore_eos": True}
            for each, count in enumerate(bound.num_tokens)
        ]
        free = asyncio.run(together(url, APIS["chats"], bodies))
        if free.num_tokens != bound.num_tokens:
            raise RuntimeError(f"free streams have {free.num_tokens}, others {bound.num_tokens}")
        if number >= 0:
            ratios.append(bound.rate / free.rate)
            rates.append(bound.rate)
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "of_free": round(statistics.median(ratios), 4),
        "all": [round(ratio, 3) for ratio in ratios],
    }
