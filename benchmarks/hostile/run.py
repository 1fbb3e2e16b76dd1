"""Hostile clients against a live server, beside one sane stream and a probe of its health.

    python -m benchmarks.hostile.run                     every case, on the packaged model, twice
    python -m benchmarks.hostile.run --tiny --short      what CI runs

Each case runs with a token and without one. It fails (status 1, with the cases' names) where the
stream's longest gap is further above its own median than allowed, a probe takes longer than that,
an answer must not be, the server's log has a traceback, or the second round of all cases leaves the
server with more memory than the first did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.hostile.case import Addresses, Case
from benchmarks.hostile.connection_cases import CASES
from benchmarks.hostile.watch import Seen
from benchmarks.server_soak import resident_bytes
from benchmarks.tiny_server import Server, serving, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hostile-suite-token"
CASE_S, QUIET_S, SETTLE_S = 60.0, 0.5, 5.0
GAP_MS, SHARED_GAP_MS = 100.0, 250.0
MEMORY_SLACK = 1.05
PACKAGED = ("--max-model-len", "2048", "--max-num-seqs", "16", "--num-kv-pages", "2000")


@dataclass(frozen=True, slots=True)
class Row:
    """One case's line of the table."""

    name: str
    median_ms: float
    gap_ms: float
    health_ms: float
    late_ms: float
    faults: tuple[str, ...]


def all_cases() -> list[Case]:
    """The cases of every module of this folder that is there."""
    cases = list(CASES)
    if importlib.util.find_spec("benchmarks.hostile.text_cases") is not None:
        module = importlib.import_module("benchmarks.hostile.text_cases")
        cases += module.CASES
    return cases


class Watcher:
    """The process of the sane clients."""

    def __init__(self, popen: asyncio.subprocess.Process) -> None:
        self._popen = popen

    async def seen(self) -> Seen:
        """What they saw since the last call."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(b"\n")
        async with asyncio.timeout(CASE_S):
            return Seen(**json.loads(await stdout.readline()))


@contextlib.asynccontextmanager
async def watched(to: Addresses) -> AsyncIterator[Watcher]:
    """Sane clients meanwhile, from when both are served on."""
    popen = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.hostile.watch", to.http, to.grpc, TOKEN), cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26,
    )  # fmt: skip
    try:
        watcher = Watcher(popen)
        seen = await watcher.seen()
        while not (seen.gaps_ms and seen.health_ms):
            await asyncio.sleep(QUIET_S)
            seen = await watcher.seen()
        yield watcher
    finally:
        popen.kill()
        await popen.wait()


async def run_case(case: Case, to: Addresses, watcher: Watcher, most_ms: float) -> Row:
    """Runs one case beside the sane clients."""
    faults = []
    await watcher.seen()
    try:
        async with asyncio.timeout(CASE_S):
            await case.send(to)
    except AssertionError as error:
        faults.append(f"an answer that must not be: {error}")
    except TimeoutError:
        faults.append(f"not over after {CASE_S:g} s")
    await asyncio.sleep(QUIET_S)
    seen = await watcher.seen()
    faults += seen.faults[:3]
    if not seen.gaps_ms or not seen.health_ms:
        faults.append("the sane clients were not served at all")
        return Row(case.name, 0.0, 0.0, 0.0, seen.late_ms, tuple(faults))
    median_ms = statistics.median(seen.gaps_ms)
    gap_ms, health_ms = max(seen.gaps_ms) - median_ms, max(seen.health_ms)
    if most_ms == SHARED_GAP_MS:
        # Where others take the cores, the sane clients themselves come late to read the clock.
        gap_ms, health_ms = max(gap_ms - seen.late_ms, 0.0), max(health_ms - seen.late_ms, 0.0)
    if gap_ms > most_ms:
        faults.append(f"the stream stood still for {gap_ms:.0f} ms beyond its median")
    if health_ms > most_ms:
        faults.append(f"/health took {health_ms:.0f} ms")
    return Row(case.name, median_ms, gap_ms, health_ms, seen.late_ms, tuple(faults))


async def run_round(
    cases: Sequence[Case], server: Server, to: Addresses, most_ms: float
) -> list[Row]:
    """Every case, with a token and without."""
    rows = []
    async with watched(to) as watcher:
        for case in cases:
            for token in (TOKEN, None):
                who = "with a token" if token else "without"
                row = await run_case(case, replace(to, token=token), watcher, most_ms)
                row = replace(row, name=f"{case.name}, {who}")
                rows.append(row)
                print(_line(row), flush=True)
                if server.popen.poll() is not None:
                    raise SystemExit(f"the server ended in {row.name}: {server.popen.returncode}")
    return rows


def _line(row: Row) -> str:
    said = "; ".join(row.faults) or "ok"
    figures = (row.median_ms, row.gap_ms, row.health_ms, row.late_ms)
    return f"{row.name:42}" + "".join(f"{ms:10.1f}" for ms in figures) + f"  {said}"


@contextlib.contextmanager
def hostile_server(tiny: bool) -> Iterator[tuple[Server, Addresses, Path]]:
    """A server with a token, where it is, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "tokens").write_text(TOKEN)
        args = ["--token-file", str(path / "tokens"), "--max-concurrent-requests", "64"]
        args += ["--warm-up", "coarse", "--no-fail-on-compile"]
        if tiny:
            write_tiny_model(path)
        else:
            args += ["--model", "smollm2-135m", *PACKAGED]
            args += ["--max-num-batched-tokens", "512"]
        with serving(path, args) as server:
            to = Addresses(http=server.http, grpc=server.grpc)
            yield server, to, path / "server.log"


def run(
    cases: Sequence[Case], *, tiny: bool, rounds: int, most_ms: float
) -> tuple[list[Row], list[str]]:
    """Runs the cases. Returns their rows, and what is wrong beside them."""
    print(f"{'milliseconds':42}{'median':>10}{'gap':>10}{'/health':>10}{'late':>10}")
    rows, wrong, sizes = [], [], []
    with hostile_server(tiny) as (server, to, log):
        for _ in range(rounds):
            rows += asyncio.run(run_round(cases, server, to, most_ms))
            asyncio.run(asyncio.sleep(SETTLE_S if rounds > 1 else 0.0))
            sizes.append(resident_bytes(server.popen.pid))
        if rounds > 1 and sizes[-1] > sizes[0] * MEMORY_SLACK:
            wrong.append(f"memory grew from {sizes[0] / 1e6:.0f} to {sizes[-1] / 1e6:.0f} MB")
        text = log.read_text()
        if "Traceback" in text:
            wrong.append(
                "a traceback in the server's log: " + text[text.index("Traceback") :][:2000]
            )
    return rows, wrong


def main() -> int:
    """Runs from the command line; 1 if anything slipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--short", action="store_true", help="the cases that CI runs, once")
    parser.add_argument("--shared", action="store_true", help="others use this machine: 250 ms")
    parser.add_argument("--only", help="cases whose name holds this")
    args = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if (case.short or not args.short) and (args.only or "") in case.name
    ]
    most_ms = SHARED_GAP_MS if args.shared else GAP_MS
    rows, wrong = run(cases, tiny=args.tiny, rounds=1 if args.short else 2, most_ms=most_ms)
    failed = sorted({row.name for row in rows if row.faults})
    for line in wrong:
        print(line)
    if failed:
        print("failed: " + "; ".join(failed))
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
