"""Run Octavo and its peers on one workload, one after another on the same cores.

    benchmarks/peers/setup.sh ~/peers
    PYTHONPATH=src python benchmarks/peers/run.py --envs ~/peers --cores 1 --repeats 3

Prints one table of ratios and writes it with every figure, the command and the machine to
benchmarks/results/. Only ratios from one run count: machines differ, and so do hours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from catalogue import HERE, Peer, catalogue
from peer import STARTED_AT_VARIABLE
from table import ratios, table
from workload_file import make_workload, write_workload

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.bench_requests import parse_range

BASELINE = "octavo"
RESULTS = HERE.parent / "results"
SMOLLM2_VOCAB_SIZE = 49_152


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; 0 if every chosen peer ran."""
    args = _parse(argv)
    known = catalogue(
        args.envs.resolve(), args.octavo_model, tuple(args.octavo_arg), num_cores(args.cores)
    )
    chosen = _choose(known, args.peers)
    try:
        workload = make_workload(
            batch_sizes=(args.num_prompts, min(args.num_prompts, args.small_num_prompts)),
            prompt_len=parse_range(args.prompt_len, "prompt_len"),
            output_len=parse_range(args.output_len, "output_len"),
            vocab_size=args.vocab_size,
            seed=args.seed,
        )
    except InvalidConfigError as error:
        raise SystemExit(str(error)) from None
    runs: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in chosen}
    failed: list[str] = []
    text = ""
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        for repeat in range(args.repeats):
            # Every other round backwards, so that a drift of the machine favours nobody.
            for peer in chosen if repeat % 2 == 0 else reversed(chosen):
                if peer.name in failed:
                    continue
                result = run_peer(peer, workload, args, Path(scratch))
                if result is None:
                    failed.append(peer.name)
                else:
                    runs[peer.name].append(result)
            # After every round: an hour's figures are not lost with the last one.
            ended = {name: results for name, results in runs.items() if results}
            text = report(ended, known[BASELINE].name, args, failed)
    print(text)
    return 1 if failed else 0


def run_peer(
    peer: Peer, workload: dict[str, Any], args: argparse.Namespace, scratch: Path
) -> dict[str, Any] | None:
    """One process of one peer, pinned; its result, or None if it failed (its last words printed).

    Caches of compiled code go to `--cache-dir`, or with `--cold` to a folder that is new.
    """
    sizes = [int(size) for size in workload["batches"]]
    kept = [min(sizes)] if peer.small_batch_only else sizes
    workload_path, out = scratch / "workload.json", scratch / "result.json"
    write_workload(workload, workload_path, kept)
    out.unlink(missing_ok=True)
    cache = Path(tempfile.mkdtemp(dir=scratch)) if args.cold else args.cache_dir.resolve()
    load_before = os.getloadavg()[0]
    print(f"{peer.name}: running (load {load_before:.2f})", file=sys.stderr, flush=True)
    log_path = args.log_dir / f"{peer.name.replace(' ', '-').lower()}.log"
    args.log_dir.mkdir(parents=True, exist_ok=True)
    with log_path.open("w") as log:
        status = subprocess.run(
            ["taskset", "--cpu-list", args.cores, *peer.command(workload_path, out)],
            env=peer_environment(peer, cache, args.cores),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if status != 0 or not out.exists():
        last_words = log_path.read_text(errors="replace").splitlines()[-8:]
        print(
            f"{peer.name}: failed ({status}); {log_path}:", *last_words, sep="\n  ", file=sys.stderr
        )
        return None
    result: dict[str, Any] = json.loads(out.read_text())
    result["load_before"] = load_before
    print(
        f"{peer.name}: {result['output_tokens_per_s']:.1f} output tok/s, "
        f"single {result['single_stream_tokens_per_s']:.1f}",
        file=sys.stderr,
        flush=True,
    )
    return result


def peer_environment(peer: Peer, cache: Path, cores: str) -> dict[str, str]:
    """The environment of a peer's process: threads to match the cores, caches under `cache`."""
    threads = str(num_cores(cores))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor"),
        STARTED_AT_VARIABLE: repr(time.time()),
    }
    if preload := peer.preload_variable():
        environment["LD_PRELOAD"] = preload
    return environment


def num_cores(cores: str) -> int:
    """How many cores a list such as "0,2-3" names.

    Raises:
        ValueError: it is no such list.
    """
    count = 0
    for part in cores.split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def report(
    runs: dict[str, list[dict[str, Any]]],
    baseline: str,
    args: argparse.Namespace,
    failed: list[str],
) -> str:
    """Writes `<out>.json` and `<out>.md`, outputs of requests left out; the table, if any ran."""
    if not runs:
        return ""
    text = table(runs, baseline)
    command = shlex.join(["python", "benchmarks/peers/run.py", *(args.argv)])
    summary = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
        "machine": machine(),
        "cores": args.cores,
        "failed": failed,
        "ratios": ratios(runs, baseline),
        "runs": {name: [_without_outputs(r) for r in results] for name, results in runs.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    about = f"{summary['date']}, {summary['machine']}, cores {args.cores}\n\n    {command}\n"
    args.out.with_suffix(".md").write_text(f"{about}\n{text}\n")
    return text


def machine() -> str:
    """Processor, cores and memory, in a few words."""
    model = platform.machine()
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            flags = "AVX-512" if "avx512f" in value.split() else "AVX2"
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model} ({flags}), {os.cpu_count()} cores, {memory_gib:.0f} GiB"


def _without_outputs(result: dict[str, Any]) -> dict[str, Any]:
    batches = {
        name: {key: value for key, value in batch.items() if key != "outputs"}
        for name, batch in result["batches"].items()
    }
    return {**result, "batches": batches}


def _choose(known: dict[str, Peer], names: str | None) -> list[Peer]:
    """The peers to run; without names, all that are set up."""
    if names is None:
        reasons = {name: peer.missing() for name, peer in known.items()}
        for name, reason in reasons.items():
            if reason is not None:
                print(f"{name}: left out, {reason}", file=sys.stderr)
        return [known[name] for name, reason in reasons.items() if reason is None]
    chosen = []
    for name in names.split(","):
        if name not in known:
            raise SystemExit(f"--peers {name}: choose from {', '.join(known)}")
        if (reason := known[name].missing()) is not None:
            raise SystemExit(f"--peers {name}: {reason}")
        chosen.append(known[name])
    return chosen


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=Path, required=True, help="folder filled by setup.sh")
    parser.add_argument("--peers", help="names, separated by commas (default: all set up)")
    parser.add_argument("--cores", default="0", help="cores for everybody, such as 1 or 0-3")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument(
        "--small-num-prompts",
        type=int,
        default=32,
        help="a second batch, the only one of slow peers",
    )
    parser.add_argument("--prompt-len", default="16:256")
    parser.add_argument("--output-len", default="16:128")
    parser.add_argument("--vocab-size", type=int, default=SMOLLM2_VOCAB_SIZE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--octavo-model", default="smollm2-135m")
    parser.add_argument("--octavo-arg", action="append", default=[], help="to octavo_peer.py")
    parser.add_argument("--cold", action="store_true", help="empty compile caches for every run")
    parser.add_argument("--cache-dir", type=Path, help="compile caches (default: ENVS/cache)")
    parser.add_argument("--log-dir", type=Path, help="peers' own output (default: ENVS/logs)")
    parser.add_argument("--out", type=Path, help="result without suffix (default: results/DATE)")
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    args.cache_dir = args.cache_dir or args.envs / "cache"
    args.log_dir = args.log_dir or args.envs / "logs"
    args.out = args.out or RESULTS / f"peers-{datetime.now(UTC):%Y-%m-%d}"
    try:
        num_cores(args.cores)
    except ValueError:
        parser.error(f"--cores {args.cores}: a list such as 1 or 0,2-3")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least 1")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
