"""How fast streams that keep to a JSON schema run, beside free ones of the same lengths.

    python benchmarks/constrained_rate.py [--streams 1 4] [--repeats 3]

For each number of streams, all at once: free streams; streams under a schema, each token from a
step of its own; and the same with forced tokens appended together where that is priced to save
time. The texts of the last two are the same, and the free ones are as long. One process, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from octavo import LLM, SamplingParams, StructuredOutputsParams

TICKET = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "product_category": {"enum": ["electronics", "clothing", "groceries"]},
        "is_refund_requested": {"type": "boolean"},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street_name": {"type": "string", "maxLength": 12},
                "postal_code": {"type": "integer", "minimum": 0, "maximum": 99999},
            },
            "required": ["street_name", "postal_code"],
            "additionalProperties": False,
        },
        "estimated_delivery_days": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": [
        "customer_name",
        "product_category",
        "is_refund_requested",
        "shipping_address",
        "estimated_delivery_days",
    ],
    "additionalProperties": False,
}
MODES = ("free", "masked", "forced")


def run(llm: LLM, mode: str, params: list[SamplingParams]) -> tuple[float, float, list[Any]]:
    """Tokens a second, tokens a step, and the texts' tokens."""
    engine: Any = llm.engine
    engine.masks.looks_ahead = mode == "forced"
    prompts = [f"A customer writes about order {index}: " for index in range(len(params))]
    num_steps, begun_s = engine.executor.stats.num_steps, time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun_s
    token_ids = [output.outputs[0].token_ids for output in outputs]
    num_tokens = sum(map(len, token_ids))
    num_steps = engine.executor.stats.num_steps - num_steps
    return num_tokens / seconds, num_tokens / num_steps, token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="of `LLM`; the packaged one by default")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        progress=False,
        max_num_seqs=max(args.streams),
        max_num_batched_tokens=64,
        max_model_len=512,
        warm_up="full",
    )
    grammar = StructuredOutputsParams(json=TICKET, disable_any_whitespace=True)
    for num_streams in args.streams:
        asked = [
            SamplingParams(structured_outputs=grammar, seed=seed, max_tokens=160)
            for seed in range(num_streams)
        ]
        _, _, token_ids = run(llm, "forced", asked)
        free = [
            SamplingParams(seed=seed, ignore_eos=True, max_tokens=len(ids))
            for seed, ids in enumerate(token_ids)
        ]
        found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _ in range(args.repeats):
            for mode in MODES:
                rate, tokens_a_step, told = run(llm, mode, free if mode == "free" else asked)
                assert mode == "free" or told == token_ids, "forced tokens changed a text"
                found[mode].append((rate, tokens_a_step))
        for mode, figures in found.items():
            rate, tokens_a_step = map(statistics.median, zip(*figures, strict=True))
            print(f"{num_streams} streams, {mode}: {rate:.1f} tok/s, {tokens_a_step:.2f} a step")
    llm.close()


if __name__ == "__main__":
    main()
