"""How many sequences fit into equal bytes with caches by group, and with all caches in one group.

Sequences are admitted, computed in chunks and grown token by token through the KV manager itself,
until the next one does not fit. No model is run: what counts is the shape of its caches.

    python benchmarks/window_pages.py [--memory-gib 1] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from octavo.engine.config import SERVING_BATCHED_TOKENS
from octavo.engine.execution.state import kv_bytes_per_token
from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.models.cache_groups import CacheLayout
from octavo.models.config import ModelConfig
from octavo.models.families.table import config_from_hf

GEMMA_3_270M: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
}
"""The shape of google/gemma-3-270m."""
LENGTHS: dict[str, Sequence[int]] = {
    "512": (512,),
    "1,024": (1024,),
    "4,096": (4096,),
    "16,384": (16_384,),
    "mixed": (256, 512, 1024, 4096, 8192),
}
"""Tokens of the sequences, in turn; half of them are prompt."""


@dataclass(frozen=True)
class Pool:
    """A pool of so many bytes, divided as a layout says."""

    windows: tuple[int | None, ...]
    page_bytes: int


def pools(config: ModelConfig, page_size: int) -> dict[str, Pool]:
    """One group that keeps all pages of all layers, and the groups of the model."""
    dtype = jnp.dtype("bfloat16")
    layout: CacheLayout = config.cache_layout()
    by_group = page_size * kv_bytes_per_token(config, dtype)
    each = by_group // len(layout.arrays)
    return {
        "one group": Pool((None,), each * len(config.own_caches())),
        "by group": Pool(layout.windows, by_group),
    }


def num_fitting(pool: Pool, num_bytes: int, page_size: int, lengths: Iterator[int]) -> int:
    """Sequences that are in the pool together, each at its full length."""
    kv = KVManager(
        num_pages=num_bytes // pool.page_bytes,
        page_size=page_size,
        enable_prefix_caching=False,
        windows=pool.windows,
        chunk_tokens=SERVING_BATCHED_TOKENS,
    )
    live = []
    for number, length in enumerate(lengths):
        request = Request(
            request_id=str(number),
            prompt_token_ids=[number] * (length // 2),
            sampling_params=SamplingParams(),
            seed=0,
            eos_token_ids=(),
            max_tokens=length,
            arrival_s=0.0,
        )
        pages, num_prompt = kv.open(request), length // 2
        matched = kv.lookup.match(pages)
        if kv.num_pages_to_take(matched, num_prompt) > kv.num_available:
            break
        kv.admit(pages, matched, num_prompt)
        live.append(pages)
        position = 0
        while position < num_prompt:
            position = min(num_prompt, position + SERVING_BATCHED_TOKENS)
            kv.give_back(pages, position)
            kv.reach_ahead(pages, num_prompt)
        while position < length:
            end = position + 1
            num_new = kv.needs.num_positions(end) - len(pages.page_ids)
            if num_new * kv.needs.num_groups > kv.num_available:
                kv.check_integrity(live)
                return len(live) - 1
            kv.grow(pages, end)
            position = end
            kv.give_back(pages, position)
    kv.check_integrity(live)
    return len(live)


def main() -> None:
    """Measures, and prints a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-gib", type=float, default=1.0, help="of KV, bfloat16")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = config_from_hf(GEMMA_3_270M)
    num_bytes = int(args.memory_gib * (1 << 30))
    report: dict[str, Any] = {
        "model": "Gemma 3 270M",
        "memory_bytes": num_bytes,
        "page_size": args.page_size,
        "chunk_tokens": SERVING_BATCHED_TOKENS,
        "sequences": {},
    }
    for name, lengths in LENGTHS.items():
        report["sequences"][name] = {
            kind: num_fitting(pool, num_bytes, args.page_size, itertools.cycle(lengths))
            for kind, pool in pools(config, args.page_size).items()
        }
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(f"Gemma 3 270M, {args.memory_gib} GiB of KV, pages of {args.page_size} tokens")
    print(f"{'tokens':>8}  {'one group':>9}  {'by group':>9}  ratio")
    for name, found in report["sequences"].items():
        before, after = found["one group"], found["by group"]
        print(f"{name:>8}  {before:>9,}  {after:>9,}  {after / before:.2f}")


if __name__ == "__main__":
    main()
