"""Whether greedy tokens in float32 depend on how a request was served, in every weight variant.

An engine first serves each prompt alone from the checkpoint's plain float32 weights, and tells the
log-probabilities of the two likeliest tokens. Then an engine for each weight variant serves all
prompts at once. Programs of different sizes and variants add the products of a sum in different
orders, so two logits that lie within rounding of each other may change places. For each prompt
whose tokens differ, this prints the gap between the two likeliest tokens at the first difference.

    python benchmarks/batch_invariance.py [--model NAME] [--num-prompts 128] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import about_machine

PLAIN = {"packed_weights": False, "sliced_weights": False, "screened_argmax": False}
NUM_ROWS = 8
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"library": "ynnpack"}, PLAIN),
    "plain, products by Eigen": ({"library": "eigen"}, PLAIN),
    "block-quantized": (
        {"library": "ynnpack", "block_quantized": NUM_ROWS},
        {**PLAIN, "packed_weights": True},
    ),
    "int8-split": (
        {"library": "ynnpack", "int8_split": [4, NUM_ROWS]},
        {**PLAIN, "sliced_weights": True},
    ),
    "bounded argmax": (
        {"library": "ynnpack", "bounded_argmax": [1, NUM_ROWS]},
        {**PLAIN, "screened_argmax": True},
    ),
    "all, as on this machine": ({}, {}),
}
"""By name: an entry of a tuning table, and engine arguments."""


def main() -> None:
    """Serves, compares and prints a line a variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="path or packaged name")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", help="names separated by semicolons (default: all)")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # of the child process: alone or a name
    args = parser.parse_args()
    if args.serve:
        json.dump(_serve(args), sys.stdout)
        return
    alone = _in_child("alone")
    names = args.variants.split(";") if args.variants else list(VARIANTS)
    result: dict[str, Any] = {"about": about_machine(), "variants": {}}
    for name in names:
        found = compare(alone["tokens"], alone["gaps"], _in_child(name)["tokens"])
        result["variants"][name] = found
        gaps = ", ".join(f"{gap:.1e}" for gap in sorted(found["gaps"]))
        line = f"{name}: {found['same']} of {args.num_prompts} the same"
        print(line + f" (gaps {gaps})" * bool(gaps), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(
    alone: list[list[int]], gaps: list[list[float]], batched: list[list[int]]
) -> dict[str, Any]:
    """How many token lists agree, and the gaps in nats at the first differences of the others."""
    found: dict[str, Any] = {"same": 0, "gaps": []}
    for one, gap, other in zip(alone, gaps, batched, strict=True):
        if one == other:
            found["same"] += 1
        else:
            first = next(
                i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]
            )
            found["gaps"].append(gap[first])
    return found


def _in_child(what: str) -> dict[str, Any]:
    """What a process of its own served: memory and tuning tables are one engine's."""
    run = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--serve", what],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    is_alone = args.serve == "alone"
    entry, engine_args = VARIANTS["plain" if is_alone else args.serve]
    with tempfile.TemporaryDirectory() as directory:
        if entry:
            _write_table(Path(directory), entry)
        return _generate(args, engine_args, is_alone)


def _generate(
    args: argparse.Namespace, engine_args: dict[str, Any], is_alone: bool
) -> dict[str, Any]:
    from octavo import LLM, SamplingParams

    llm = LLM(
        args.model, progress=False, dtype="float32", max_model_len=512, num_kv_pages=1024,
        max_num_seqs=1 if is_alone else NUM_ROWS, max_num_batched_tokens=128,
        enable_prefix_caching=False, **engine_args,
    )  # fmt: skip
    llm.engine.wait_until_compiled()
    params = SamplingParams(
        temperature=0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=2 if is_alone else None
    )
    outputs = llm.generate(_prompts(args, llm.tokenizer), params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    llm.close()
    return {
        "tokens": [completion.token_ids for completion in completions],
        "gaps": [
            [_gap(scores) for scores in completion.logprobs or ()] for completion in completions
        ],
    }


def _gap(scores: Any) -> float:
    first, second = sorted((score.logprob for score in scores.values()), reverse=True)[:2]
    return float(first - second)


def _prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Half of them windows of English, half of them random tokens."""
    from octavo.engine.measuring.accuracy import TEXT_FILE

    rng = np.random.default_rng(args.seed)
    ids = tokenizer.encode(TEXT_FILE.read_text("utf-8"))
    made = []
    for index in range(args.num_prompts):
        length = int(rng.integers(8, 96))
        start = int(rng.integers(0, len(ids) - length))
        drawn = rng.integers(256, 40_000, size=length).tolist()
        made.append(ids[start : start + length] if index % 2 else drawn)
    return made


def _write_table(directory: Path, entry: dict[str, Any]) -> None:
    os.environ["OCTAVO_TUNING_DIR"] = str(directory)
    from octavo.pallas_kernels import tuning

    row = {"dtype": "float32", "num_cores": tuning.num_cores(), **entry}
    tuning.write_table(directory / "variant.json", {"device": tuning.tuning_device()}, [], [row])
    tuning.forget_tables()


if __name__ == "__main__":
    main()
