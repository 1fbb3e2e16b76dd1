"""Compiles kernels and steps for accelerators that are not there, and fails on what would not fit.

    python -m benchmarks.aot                         every target whose compiler is installed
    python -m benchmarks.aot v6e h200 --only attention

One process a target, each with a timeout. Fails on an error of a compiler, on register spills in a
hot loop (`hot_loops.py`; without a disassembler, on any), on a program that exceeds the device's
memory or a core's VMEM, on a step that copies more than a tenth of its weights into another layout
(`copies.py`), and on a decode program that moves so much, these copies included, that less than 80%
of the bandwidth is attainable. A TPU program that needs too much VMEM and a GPU kernel that needs
too much shared memory are errors of the compiler.

Temporaries alone fail nothing: those of a step of 128 rows that may be sampled are a dozen arrays
of [128, vocabulary], whatever the model's size.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.aot.hot_loops import summary
from benchmarks.aot.targets import TARGETS, Target

TIMEOUT_S = 1500
MIN_DECODE_SHARE = 0.8
"""Of the bandwidth, what decode must be able to attain."""
MAX_COPIED_SHARE = 0.1
"""Of its weights, what a step may copy."""
RIDGE = "memory", "compute"
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    parser.add_argument("--output", type=Path, help="without suffix: also write .json and .md")
    args = parser.parse_args()
    unknown = sorted(set(args.targets) - set(TARGETS))
    if unknown:
        parser.error(f"target {unknown[0]!r}: want {', '.join(TARGETS)}")
    results = []
    for name in args.targets or TARGETS:
        target = TARGETS[name]
        if not target.is_installed:
            print(f"{name}: skipped, {target.package} is not installed (pip install octavo[aot])")
            continue
        results += compile_for(target, args.only, args.timeout_s)
    print(table(results))
    if args.output:
        write(args.output, results, "python -m benchmarks.aot " + shlex.join(sys.argv[1:]))
    sys.exit(1 if any(failure(result) for result in results) else 0)


def compile_for(target: Target, only: str, timeout_s: float) -> list[dict[str, Any]]:
    """Results of one target's process; those before a timeout or a crash count too."""
    script = Path(__file__).with_name("compile_target.py")
    command = [sys.executable, str(script), target.name, "--only", only]
    failed = {"target": target.name, "case": "all", "bytes": 0, "flops": 0}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        lines, code, problem = done.stdout, done.returncode, done.stderr[-600:]
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        lines = out.decode() if isinstance(out, bytes) else out
        code, problem = 1, f"not done after {timeout_s:.0f} s"
    results = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    if code:
        results.append({**failed, "error": problem})
    return results


def failure(result: dict[str, Any]) -> str | None:
    """Why a result fails, if it does."""
    if "error" in result:
        return str(result["error"])
    if result.get("spill_bytes"):
        spilling = [loop["spills"] for loop in result.get("hot_loops", ()) if loop["spills"]]
        if spilling:
            return f"{sum(spilling)} accesses to spilled registers in hot loops"
        if "hot_loops" not in result:
            return f"{result['spill_bytes']} bytes of register spills"
    if result.get("over_memory"):
        return "exceeds the device's memory"
    if result.get("vmem_bytes", 0) > result.get("vmem_limit_bytes", 0):
        return f"plans for {result['vmem_bytes']} bytes of VMEM: more than a core has"
    copied = result.get("copied_bytes", 0)
    if copied > MAX_COPIED_SHARE * result.get("weight_bytes", 0):
        return f"copies {copied / 1e6:.0f} MB of its weights into another layout"
    if result.get("is_decode"):
        share = attainable(result)
        if share < MIN_DECODE_SHARE:
            return f"{share:.0%} of the bandwidth is attainable: want {MIN_DECODE_SHARE:.0%}"
    return None


def floors_us(result: dict[str, Any]) -> tuple[float, float]:
    """Least time for the bytes and for the operations, in µs, at the maker's rates."""
    target = TARGETS[result["target"]]
    return (
        result["bytes"] / target.bytes_per_s * 1e6,
        result["flops"] / target.bf16_flops_per_s * 1e6,
    )


def attainable(result: dict[str, Any]) -> float:
    """Share of the roofline that remains with every reading counted as often as it is made."""
    target = TARGETS[result["target"]]
    counted_us = 1e6 * max(
        result["counted_bytes"] / target.bytes_per_s,
        result["counted_flops"] / target.bf16_flops_per_s,
    )
    return max(floors_us(result)) / counted_us


def on_chip(result: dict[str, Any]) -> str:
    """Registers and spilled bytes of a GPU kernel, or planned VMEM of a TPU's."""
    if "registers" in result:
        return f"{result['registers']} / {result['spill_bytes']} B"
    if "vmem_bytes" in result:
        return f"{result['vmem_bytes'] / MIB:.0f} of {result['vmem_limit_bytes'] / MIB:.0f} MiB"
    return "-"


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table, a row a program, in figures of one device."""
    head = (
        "| target | program | devices | compile s | registers / spills, VMEM "
        "| rounds of hot loops: issue / tensor / special cycles | temp MB "
        "| weights copied MB | memory GB | least MB | counted MB | least GFLOP "
        "| floor µs bytes / FLOPs | bound | attainable |\n" + "|---" * 15 + "|"
    )
    rows = []
    for result in results:
        why = failure(result)
        if "compile_s" not in result:
            rows.append(f"| {result['target']} | {result['case']} | FAILED: {why} |" + " |" * 12)
            continue
        by_bytes, by_flops = floors_us(result)
        limit = TARGETS[result["target"]].memory_bytes
        rows.append(
            f"| {result['target']} | {result['case']} | {result['num_devices']} "
            f"| {result['compile_s']:.1f} | {on_chip(result)} "
            f"| {summary(result.get('hot_loops', ()))} | {result['temp_bytes'] / 1e6:.1f} "
            f"| {result.get('copied_bytes', 0) / 1e6:.1f} "
            f"| {result['memory_bytes'] / 1e9:.1f} of {limit / 1e9:.0f} "
            f"| {result['bytes'] / 1e6:.1f} | {result['counted_bytes'] / 1e6:.1f} "
            f"| {result['flops'] / 1e9:.1f} | {by_bytes:.0f} / {by_flops:.0f} "
            f"| {RIDGE[by_flops > by_bytes]} | {attainable(result):.0%}"
            f"{' FAILED: ' + why if why else ''} |"
        )
    return "\n".join([head, *rows])


def write(output: Path, results: list[dict[str, Any]], command: str) -> None:
    """Both files: the results, and the table with date and command."""
    import jax

    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command.strip(),
        "jax": jax.__version__,
    }
    output.with_suffix(".json").write_text(
        json.dumps({**about, "results": results}, indent=1) + "\n"
    )
    lines = [f"- {name}: {value}" for name, value in about.items()]
    failed = sum(failure(result) is not None for result in results)
    lines.append(f"- {len(results)} programs, {failed} failed")
    text = "\n".join(["# Compiled ahead of time", "", *lines, "", table(results)])
    output.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
