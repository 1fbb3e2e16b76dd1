"""Step time with a small and a large KV pool: equal, unless a step copies its pool.

Two engines in one process serve the same requests in turn, each at its own pool size; the ratio of
their median step times is what counts. Programs are warmed up first and nothing is cached between
requests.

    python benchmarks/kv_pool.py [--rounds 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np

from octavo import LLM, SamplingParams

SIZES = {"64 MB": 64 << 20, "2 GB": 2 << 30}
PAGE_SIZE = 16
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 64


def main() -> None:
    """Measures, and prints a line a pool or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engines = {
        name: LLM(
            progress=False,
            max_num_seqs=NUM_REQUESTS,
            max_model_len=1024,
            block_size=PAGE_SIZE,
            # As many pages as the memory holds, however few the rows could use.
            num_kv_pages=_num_pages(size),
            enable_prefix_caching=False,
            warm_up="full",
        )
        for name, size in SIZES.items()
    }
    rng = np.random.default_rng(1)
    prompts = rng.integers(256, 40_000, size=(NUM_REQUESTS, PROMPT_TOKENS)).tolist()
    times: dict[str, list[float]] = {name: [] for name in engines}
    for llm in engines.values():
        step_ms(llm, prompts)
    for index in range(args.rounds):
        for name in list(engines)[:: 1 if index % 2 else -1]:
            times[name].append(step_ms(engines[name], prompts))
    medians = {name: statistics.median(values) for name, values in times.items()}
    small, large = medians.values()
    pages = {name: llm.engine.limits.num_pages for name, llm in engines.items()}
    report = {"step_ms": medians, "pages": pages, "rounds": times, "ratio": large / small}
    if args.json:
        print(json.dumps(report))
        return
    for name, value in medians.items():
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        print(f"{name:>6s}  {pages[name]:6d} pages  {value:8.2f} ms a step ({spread})")
    print(f"ratio   {report['ratio']:.3f}")


def step_ms(llm: LLM, prompts: list[list[int]]) -> float:
    """Device time of a step in milliseconds, mean over one batch."""
    stats = llm.engine.executor.stats
    busy_s, num_steps = stats.busy_s, stats.num_steps
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    llm.generate(prompts, params, use_tqdm=False)
    return 1e3 * (stats.busy_s - busy_s) / (stats.num_steps - num_steps)


def _num_pages(num_bytes: int) -> int:
    """Pages of SmolLM2-135M in float32 that fill the memory."""
    layers, kv_heads, head_dim = 30, 3, 64
    return num_bytes // (2 * layers * kv_heads * head_dim * 4 * PAGE_SIZE)


if __name__ == "__main__":
    main()
