"""Where the memory of a server's processes is, after a cold start and after a warm one.

    python -m benchmarks.server_memory --out benchmarks/results/server-memory-DATE.json
    python -m benchmarks.server_memory --only cold --seconds 90 -- --max-num-seqs 32

A real `octavo serve` is started with an empty compile cache and, after that, with what the first
one left. PSS of all its processes is read until `--seconds` after it is ready, that of each mapping
at the end. What counts is PSS without one copy of the weights as served and without what of the KV
pool has memory behind it (a pool takes memory as it is used). The process itself tells which arrays
it holds, how many step programs, and what glibc's allocator has handed out and keeps. Arguments
after `--` go to the server. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MB = 1e6
PERIOD_S = 1.0
LIMIT_BYTES = 1_000_000_000
"""Of PSS beside one copy of the weights as served and the pool."""


def main() -> int:
    """Prints what was measured as JSON; 1 if it is more than the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="after ready (default: 90)")
    parser.add_argument("--settled", type=float, default=60.0, help="when it counts (default: 60)")
    parser.add_argument("--cache", help="compile cache to use and keep; else an empty one")
    parser.add_argument("--only", choices=("cold", "warm"), help="one of the two starts")
    parser.add_argument("--out", help="also write the JSON there")
    parser.add_argument("server_args", nargs="*", metavar="ARG", help="after --: for the server")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        cache = args.cache or stack.enter_context(tempfile.TemporaryDirectory())
        starts = {
            name: measure(cache, args.server_args, seconds=args.seconds, settled_s=args.settled)
            for name in ([args.only] if args.only else ["cold", "warm"])
        }
    from benchmarks.machine import about_machine

    report = {"machine": about_machine(), "limit_mb": LIMIT_BYTES / MB, "starts": starts}
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    return 0 if all(each["beside_mb"] * MB <= LIMIT_BYTES for each in starts.values()) else 1


def measure(
    cache: str, server_args: list[str], *, seconds: float, settled_s: float
) -> dict[str, Any]:
    """One server, from its start to `seconds` after it is ready.

    Args:
        cache: its compile cache.
        settled_s: seconds after ready whose PSS, and all later ones, count.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.jsonl"
        command = [sys.executable, "-m", "benchmarks.server_memory_inside", str(told), "serve"]
        command += ["--grpc-port", "0", "--compile-cache-dir", cache, "--quiet", *server_args]
        begun_s = time.monotonic()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if "serving" not in server.stdout.readline():
                raise RuntimeError(f"the server ended with {server.wait()} before it was ready")
            ready_s = time.monotonic()
            curve: list[tuple[float, float]] = []
            while (now_s := time.monotonic() - ready_s) < seconds:
                curve.append((round(now_s, 1), round(pss_bytes(server.pid) / MB, 1)))
                time.sleep(PERIOD_S)
            mappings = by_mapping(server.pid)
            lines = told.read_text(encoding="utf-8").splitlines()
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
    inside = [json.loads(line) for line in lines]
    last = inside[-1]
    apart_mb = last["weights_mb"] + last["pool_touched_mb"]
    settled = max(mb for at_s, mb in curve if at_s >= min(settled_s, curve[-1][0]))
    return {
        "ready_s": round(ready_s - begun_s, 1),
        "beside_mb": round(settled - apart_mb, 1),
        "pss_mb": settled,
        "pss_mb_by_second": curve[::5],
        "inside": last,
        "programs_by_second": [(each["s"], each["num_programs"]) for each in inside[::10]],
        "mappings_mb": mappings,
    }


def processes(pid: int) -> Iterator[int]:
    """A process and all that it started, and these."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from processes(int(child))


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants."""
    total = 0
    for each in processes(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def by_mapping(pid: int) -> dict[str, float]:
    """Megabytes of PSS by what is mapped, the largest first; unnamed ones by their protection."""
    found: Counter[str] = Counter()
    for each in processes(pid):
        name = ""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps").read_text().splitlines():
                words = line.split()
                if "-" in words[0] and not words[0].endswith(":"):
                    name = Path(words[5]).name if len(words) > 5 else f"unnamed {words[1]}"
                elif words[0] == "Pss:":
                    found[name] += int(words[1]) << 10
    rest = sum(size for _, size in found.most_common()[12:])
    return {name: round(size / MB, 1) for name, size in found.most_common(12)} | {
        "all others": round(rest / MB, 1)
    }


if __name__ == "__main__":
    sys.exit(main())
