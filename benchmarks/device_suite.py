"""Checks and measures Octavo on the device at hand; one command, under nine minutes.

    python benchmarks/device_suite.py                  on a GPU or TPU
    python benchmarks/device_suite.py --quick          checks and kernels alone
    python benchmarks/device_suite.py --tiny           small shapes, to try the suite on a CPU
    python benchmarks/device_suite.py --compile-for h200   compile its programs, without the device

Needs JAX, NumPy and, for whole steps, Flax; peers are measured where PyTorch is. Shapes are
Llama-3.1-8B's, weights random. Every figure stands beside the copy bandwidth and the matmul rate of
the same run. Sections run in order of worth, each within a limit; what is measured is on disk at
once (`--output`, .json and .md).
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
# Peers share the device, in processes of their own.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

BUDGET_S = 520.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="checks and kernels alone")
    parser.add_argument("--sections", default="", help="these alone, as roofs,steps")
    parser.add_argument("--tiny", action="store_true", help="small shapes, float32")
    parser.add_argument("--backend", default="auto", help="of attention (default: the device's)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--output", type=Path, help="without suffix (default: under results/)")
    parser.add_argument("--compile-for", metavar="TARGET", help="of `make aot`; nothing is run")
    parser.add_argument("--only", default="", help="families and programs whose names contain this")
    args = parser.parse_args()
    if args.compile_for:
        return compile_for(args.compile_for, args.only)

    import jax

    from benchmarks.device import (
        checks,
        experts,
        families,
        hot_kernels,
        kernels,
        roofs,
        sampling,
        serving,
        steps,
    )
    from benchmarks.device.report import Report, Section
    from octavo.pallas_kernels.ragged_paged_attention.backends import (
        AttentionShape,
        choose_backend,
    )

    device = jax.devices()[0]
    dtype = "float32" if args.tiny else "bfloat16"
    shape = AttentionShape(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=64,
        max_tokens=2048,
        q_dtype=dtype,
        kv_dtype=dtype,
    )
    backend = choose_backend(
        args.backend, shape, platform=device.platform, device_kind=device.device_kind
    )
    today = datetime.datetime.now(datetime.UTC)
    kind = device.device_kind.lower().replace(" ", "-")
    output = args.output or ROOT / "benchmarks" / "results" / f"device-{kind}-{today.date()}"
    about = {
        "date": today.isoformat(timespec="seconds"),
        "command": "python " + shlex.join(sys.argv),
        "device": device.device_kind,
        "num_devices": len(jax.devices()),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "attention": backend,
        "dtype": dtype,
        "shapes": "tiny" if args.tiny else "Llama-3.1-8B",
    }
    report = Report(about, output, args.budget_s)
    common = {"backend": backend, "dtype": dtype, "tiny": args.tiny}
    sections = [
        Section("roofs", functools.partial(roofs.measure, tiny=args.tiny), 40),
        Section("checks", functools.partial(checks.check, **common), 110),
        Section("kernels", functools.partial(kernels.measure, **common), 100),
        Section("hot kernels", functools.partial(hot_kernels.measure, **common), 40),
    ]
    if not args.quick:
        whole = (
            Section("sampling", functools.partial(sampling.measure, **common), 90),
            Section("steps", functools.partial(steps.measure, **common), 190, 150),
            Section("experts", functools.partial(experts.measure, **common), 90),
            Section(
                "families", functools.partial(families.measure, only=args.only, **common), 190, 130
            ),
            Section("serving", functools.partial(serving.measure, **common), 300, 200),
        )
        sections.extend(whole)
        for name, limit_s in (("decode", 60), ("sdpa", 40), ("transformers", 110)):
            run = functools.partial(peers, part=name)
            sections.append(Section(f"peer {name}", run, limit_s, limit_s + 20))
    if args.sections:
        named = args.sections.split(",")
        if unknown := set(named) - {section.name for section in sections}:
            parser.error(
                f"--sections {args.sections}: no section {sorted(unknown)}; there are "
                f"{[section.name for section in sections]}"
            )
        sections = [section for section in sections if section.name in named]
    for section in sections:
        report.run(section)
        steps.free_device()
    print(f"written to {output}.json and .md")
    return 0 if report.ok else 1


def compile_for(target: str, only: str) -> int:
    """Compiles the suite's programs for a device that is not there; 1 if one does not compile."""
    from benchmarks.device.deviceless import compile_all
    from benchmarks.device.report import line

    failed = 0
    for row in compile_all(target, only):
        print(line(row), flush=True)
        failed += not row["ok"]
    return 1 if failed else 0


def peers(results: dict[str, Any], deadline_s: float, *, part: str) -> Iterator[dict[str, Any]]:
    """Rows of a peer's process."""
    from benchmarks.device.report import Skipped

    if importlib.util.find_spec("torch") is None:
        raise Skipped("PyTorch is not installed: no peer is measured")
    probe = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        raise Skipped("PyTorch sees no CUDA device: no peer is measured")
    command = [sys.executable, str(ROOT / "benchmarks" / "device" / "torch_peers.py"), part]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=max(5.0, deadline_s - time.monotonic()),
        )
        text, problem = done.stdout, done.stderr[-300:] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else ""
        problem = "not done in time"
    for line in text.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            if part == "transformers" and "offline_tokens_per_s" in results and "seconds" in row:
                row["ours / peer"] = results["offline_tokens_per_s"] / row["output tok/s"]
            yield row
    if problem:
        yield {"what": f"peer {part}", "failed": problem}


if __name__ == "__main__":
    sys.exit(main())
