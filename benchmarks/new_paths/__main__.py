"""What the APIs beside completions cost, measured on a live server.

    python -m benchmarks.new_paths --out benchmarks/results/new-paths-DATE.json
    python -m benchmarks.new_paths --short                a tiny model: whether all of it runs
    python -m benchmarks.new_paths --torch-python PYTHON  with torch and sentence-transformers

Messages and Responses against chats at 32 streams, and constrained streams against free ones, in
turns on one server; 500 `required` and `strict` calls over 50 schemas, each validated, with streams
beside them; embeddings against Sentence Transformers, skipped where that is absent. Fails (status
1) where a figure falls short of what it has to reach.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import about_machine
from benchmarks.new_paths import calls, embeddings, rates
from benchmarks.tiny_server import serving, write_tiny_model

TEMPLATE = Path(__file__).resolve().parents[2] / "docs" / "hermes.jinja"
PARTS = ("apis", "constrained", "calls", "embeddings")
ARGS = (
    *("--max-num-seqs", "32", "--chat-template", str(TEMPLATE), "--no-fail-on-compile"),
    *("--served-model-name", "measured"),
)
PACKAGED = (
    *("--model", "smollm2-135m", "--max-model-len", "2048", "--num-kv-pages", "4000"),
    *("--max-num-batched-tokens", "512", "--warm-up", "full"),
)
CONTEXT = 4096
TINY = (
    *("--max-model-len", str(CONTEXT), "--num-kv-pages", "4000", "--warm-up", "coarse"),
    *("--max-num-batched-tokens", "256"),
)


def main() -> int:
    """Measures from the command line; 1 if a figure falls short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tiny model, few rounds: no figures")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-python", type=Path, help="for embeddings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rounds = 2 if args.short else args.rounds
    result: dict[str, Any] = {"machine": about_machine(), "short": args.short}
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(Path(name), context=CONTEXT, template=TEMPLATE.read_text())
        with serving(folder, ARGS + (TINY if args.short else PACKAGED)) as server:
            if "apis" in args.only:
                num_tokens = 16 if args.short else 64
                result["apis"] = rates.compare_apis(server.http, 32, num_tokens, rounds)
                _tell("apis", result)
            if "constrained" in args.only:
                result["constrained"] = rates.compare_constrained(
                    server.http, 16 if args.short else 32, rounds, args.seed
                )
                _tell("constrained", result)
            if "calls" in args.only:
                count = 50 if args.short else 500
                result["calls"] = calls.measure_calls(server.http, count, args.seed)
                _tell("calls", result)
    if "embeddings" in args.only:
        result["embeddings"] = _embeddings(args, rounds)
        _tell("embeddings", result)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    short = _shortfalls(result, has_figures=not args.short)
    print("\n".join(short) or "nothing falls short")
    return int(bool(short))


def _embeddings(args: argparse.Namespace, rounds: int) -> dict[str, Any]:
    if args.torch_python is None:
        return {"skipped": "no --torch-python was given: Sentence Transformers was not run"}
    if (reason := embeddings.absent(args.torch_python)) is not None:
        return {"skipped": f"Sentence Transformers is not there: {reason}"}
    return embeddings.compare(
        args.torch_python, 32 if args.short else 512, min(rounds, 3), args.seed
    )


def _tell(name: str, result: dict[str, Any]) -> None:
    print(f"{name}: {json.dumps(result[name])}", flush=True)


def _shortfalls(result: dict[str, Any], *, has_figures: bool) -> list[str]:
    """What falls short of what it has to reach; of the short form what is wrong on any machine."""
    found = []
    if (made := result.get("calls")) is not None and made["valid"] < made["calls"]:
        found.append(f"{made['calls'] - made['valid']} calls are not valid: {made['faults']}")
    vectors = result.get("embeddings", {})
    if vectors.get("least_cosine", 1.0) < embeddings.LEAST_COSINE:
        found.append(f"a vector's cosine is {vectors['least_cosine']}")
    if not has_figures:
        return found
    for api, figures in result.get("apis", {}).items():
        if figures["of_chats"] < rates.LEAST_OF_CHATS:
            found.append(f"{api}: {figures['of_chats']} of chats' rate")
    if (bound := result.get("constrained")) and bound["of_free"] < rates.LEAST_OF_FREE:
        found.append(f"constrained streams: {bound['of_free']} of free ones' rate")
    if made is not None and made["beside_rate_of_free"] < calls.LEAST_BESIDE:
        found.append(f"streams beside calls: {made['beside_rate_of_free']} of their rate")
    if vectors.get("of_sentence_transformers", 1.0) < embeddings.LEAST_RATE:
        found.append(f"embeddings: {vectors['of_sentence_transformers']} of the peer's rate")
    return found


if __name__ == "__main__":
    sys.exit(main())
