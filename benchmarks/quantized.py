"""What quantization gives: tokens a second of several modes, in turn, in one process.

One engine a mode, all of them compiled first. Each round goes through the modes (every other one
backwards) with fresh prompts: one stream alone, 32 streams at once, and prompts alone. The median
of the rounds counts, and its ratio to the first mode's.

    taskset -c 0 python benchmarks/quantized.py [--modes none/auto,int8/auto] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine import about_machine

from octavo import LLM, SamplingParams
from octavo.engine.process.own_process import prepare_to_compute

MAX_MODEL_LEN = 512
NUM_ROWS = 32
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
PREFILL_ROWS, PREFILL_TOKENS = 8, 256


def main() -> None:
    """Measures, and prints a line a mode or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path or packaged name (default: the packaged SmolLM2)")
    parser.add_argument("--modes", default="none/auto,int8/auto,int8/int8", metavar="LIST",
                        help="quantization/kv-cache-dtype pairs")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    prepare_to_compute(os.environ)
    engines = {name: _engine(args.model, name) for name in args.modes.split(",")}
    rng = np.random.default_rng(1)
    rates: dict[str, dict[str, list[float]]] = {
        name: {what: [] for what in MEASUREMENTS} for name in engines
    }
    for index in range(args.rounds + 1):
        prompts = rng.integers(256, 40_000, size=(NUM_ROWS, PREFILL_TOKENS)).tolist()
        for name in list(engines)[:: 1 if index % 2 else -1]:
            for what, measure in MEASUREMENTS.items():
                rate = measure(engines[name], prompts)
                if index:  # the first round warms up
                    rates[name][what].append(rate)
    medians = {
        name: {what: statistics.median(found) for what, found in row.items()}
        for name, row in rates.items()
    }
    if args.json:
        print(json.dumps({"about": about_machine(), "tokens_per_s": medians, "rounds": rates}))
        return
    first = next(iter(medians.values()))
    print(f"{'weights/KV':16}" + "".join(f"{what:>24}" for what in MEASUREMENTS) + "  tokens/s")
    for name, row in medians.items():
        cells = (f"{value:.1f} ({value / first[what]:.2f})" for what, value in row.items())
        print(f"{name:16}" + "".join(f"{cell:>24}" for cell in cells))


def one_stream(llm: LLM, prompts: list[list[int]]) -> float:
    """Output tokens a second of one request, its prompt's step left out."""
    return _decode_rate(llm, [prompts[0][:PROMPT_TOKENS]])


def many_streams(llm: LLM, prompts: list[list[int]]) -> float:
    """Output tokens a second of all rows at once, from the first moment when all of them decode."""
    return _decode_rate(llm, [prompt[:PROMPT_TOKENS] for prompt in prompts])


def prefill(llm: LLM, prompts: list[list[int]]) -> float:
    """Prompt tokens a second."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    # Reversed, so that nothing is in the prefix cache.
    batch = [prompt[::-1] for prompt in prompts[:PREFILL_ROWS]]
    begun_s = time.perf_counter()
    llm.generate(batch, params, use_tqdm=False)
    return PREFILL_ROWS * PREFILL_TOKENS / (time.perf_counter() - begun_s)


MEASUREMENTS: dict[str, Callable[[LLM, list[list[int]]], float]] = {
    "1 stream": one_stream,
    f"{NUM_ROWS} streams": many_streams,
    "prefill": prefill,
}


def _decode_rate(llm: LLM, prompts: list[list[int]]) -> float:
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    metrics: list[Any] = [output.metrics for output in outputs]
    begun_s = max(each.first_token_s for each in metrics)
    return len(prompts) * (OUTPUT_TOKENS - 1) / (max(m.last_token_s for m in metrics) - begun_s)


def _engine(model: str | None, mode: str) -> LLM:
    quantization, _, kv_cache_dtype = mode.partition("/")
    llm = LLM(
        model,
        progress=False,
        dtype="float32",
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=NUM_ROWS,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    )
    llm.engine.wait_until_compiled()
    return llm


if __name__ == "__main__":
    main()
