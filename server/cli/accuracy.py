"""`octavo bench accuracy`: what quantization costs, on a text that ships.

Reads the text with the model in float32, then with each of the modes asked for, one engine after
the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args

MODES = ("int8/auto", "fp8/auto", "none/bfloat16", "none/int8", "none/fp8", "int8/int8", "fp8/fp8")
BASELINE = {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "auto"}
LEFT_OUT = ("quantization", "kv_cache_dtype", "seed")


def add_parser(kinds: Any) -> None:
    """Adds the kind's parser to those of `bench`."""
    parser = kinds.add_parser(
        "accuracy", help="what quantization costs in accuracy", description=__doc__
    )
    parser.add_argument(
        "--modes", default=",".join(MODES), metavar="LIST",
        help="quantization/kv-cache-dtype pairs, with commas between (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--text", metavar="FILE", help="another text than the one that ships")
    parser.add_argument("--window", type=int, default=256, metavar="N", help="tokens read together")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_args(parser, leave_out=LEFT_OUT)


def run(args: argparse.Namespace) -> int:
    """Measures each mode; 0."""
    modes = parse_modes(args.modes)
    from octavo.engine.measuring.accuracy import TEXT_FILE, compare, predict

    path = Path(args.text).expanduser() if args.text else TEXT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError("text", path, "a file in UTF-8") from error

    def measure(changes: dict[str, Any]) -> Any:
        engine = _engine(checked_engine_args(args) | changes)
        try:
            return predict(engine, text, args.window), engine.model_name
        finally:
            engine.close()

    baseline, model = measure(BASELINE)
    report: dict[str, Any] = {
        "model": model,
        "text": path.name,
        "window_tokens": args.window,
        "baseline": "float32",
        "modes": {},
    }
    if not args.json:
        print(f"{model}: {len(baseline.logprobs)} tokens, windows of {args.window}")
        print(f"{'weights/KV':16} {'perplexity':>10} {'ratio':>7} {'top-1':>7} {'|change|':>9}")
        print(f"{'float32':16} {baseline.perplexity:10.3f} {1:7.4f} {1:7.2%} {0:9.4f}")
    for name, changes in modes.items():
        found = compare(baseline, measure(changes)[0])
        report["modes"][name] = found
        if not args.json:
            print(
                f"{name:16} {found['perplexity']:10.3f} {found['perplexity_ratio']:7.4f} "
                f"{found['top1_agreement']:7.2%} {found['mean_abs_logprob_change']:9.4f}",
                flush=True,
            )
    if args.json:
        print(json.dumps(report))
    return 0


def parse_modes(listed: str) -> dict[str, dict[str, Any]]:
    """Name -> engine arguments of each mode in "int8/auto,none/fp8".

    Raises:
        InvalidConfigError: an entry that is not two names, or names no such mode.
    """
    from octavo.engine.config import EngineConfig

    modes = {}
    for name in listed.split(","):
        quantization, slash, kv_cache_dtype = name.strip().partition("/")
        if not slash:
            raise InvalidConfigError("modes", name, "QUANTIZATION/KV-CACHE-DTYPE, as in int8/auto")
        changes = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        EngineConfig(**changes)  # type: ignore[arg-type]  # for its checks
        modes[name.strip()] = changes
    return modes


def _engine(changes: dict[str, Any]) -> Any:
    from octavo.engine.engine import Engine
    from octavo.engine.engine_arguments import engine_config

    # Prompts of one pass: the largest programs are enough.
    config = engine_config(None, {"warm_up": "coarse", "max_num_seqs": 8} | changes)
    return Engine(config, progress=sys.stderr.isatty())
