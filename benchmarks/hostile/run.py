"""Hostile clients against a live server, beside one sane stream and a probe of its health.

    python -m benchmarks.hostile.run                     every case, on the packaged model, twice
    python -m benchmarks.hostile.run --tiny --short      what CI runs

Each case runs with a token and without one, against a server whose programs are all compiled (of a
tiny model the coarse ones). It fails (status 1, with the cases' names) where

- the stream's longest gap is further above its own median than allowed, not counted what steps that
  carried somebody's prompt were planned to take (`planned.py`); the table has the whole gap, too;
- a probe of health takes longer than that;
- an answer must not be;
- the server's log has a traceback;
- the second round of all cases leaves the server with more memory than the first did.

Server, sane clients and attackers are processes of one machine, and the attackers give way to the
others (`attack.py`). The first row is without attackers: what it shows is the machine's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hostile.attack import CASE_S, all_cases
from benchmarks.hostile.case import Case
from benchmarks.hostile.planned import StepLog, measure
from benchmarks.hostile.watch import Seen
from benchmarks.server_soak import resident_bytes
from benchmarks.tiny_server import Server, serving, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hostile-suite-token"
QUIET_S, CALM_S, SETTLE_S = 0.5, 2.0, 5.0
LEAST_GAPS, LEAST_S = 20, 10.0
"""A row has so many gaps of the stream at least, unless they do not come within so many seconds."""
GAP_MS, SHARED_GAP_MS = 100.0, 250.0
MEMORY_SLACK = 1.05
NAME_WIDTH = 50
TEMPLATE = ROOT / "docs" / "hermes.jinja"
"""That knows tools."""
PACKAGED = ("--max-model-len", "2048", "--max-num-seqs", "16", "--num-kv-pages", "2000")


@dataclass(frozen=True, slots=True)
class Row:
    """One case's line of the table, in milliseconds."""

    name: str
    median_ms: float
    gap_ms: float
    unplanned_ms: float
    health_ms: float
    late_ms: float
    faults: tuple[str, ...]


class Process:
    """A process that answers JSON lines in turn."""

    def __init__(self, popen: asyncio.subprocess.Process) -> None:
        self._popen = popen

    async def ask(self, line: object) -> Any:
        """Its answer to a line."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(line).encode() + b"\n")
        async with asyncio.timeout(CASE_S + LEAST_S):
            return json.loads(await stdout.readline())


@contextlib.asynccontextmanager
async def started(module: str, *args: str) -> AsyncIterator[Process]:
    """A module of this folder in a process of its own, until the block's end."""
    popen = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"benchmarks.hostile.{module}", *args), cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26,
    )  # fmt: skip
    try:
        yield Process(popen)
    finally:
        popen.kill()
        await popen.wait()


class Suite:
    """A server under attack, its sane clients and its attackers.

    Args:
        server: the server.
        steps: of its engine.
        watcher: the sane clients.
        attackers: who runs the cases.
        most_ms: allowed beyond the stream's median and planned steps, and of a probe.
    """

    def __init__(
        self, server: Server, steps: StepLog, watcher: Process, attackers: Process, most_ms: float
    ) -> None:
        self._server = server
        self._steps = steps
        self._watcher = watcher
        self._attackers = attackers
        self._most_ms = most_ms

    async def round(self, cases: Sequence[Case]) -> list[Row]:
        """Every case, with a token and without, after a while without any."""
        rows = [await self._row("nobody", asyncio.sleep(CALM_S, []))]
        for case in cases:
            for token in (TOKEN, None):
                name = f"{case.name}, {'with a token' if token else 'without'}"
                rows.append(await self._row(name, self._attackers.ask([case.name, token])))
        return rows

    async def _row(self, name: str, attack: Awaitable[list[str]]) -> Row:
        """What the sane clients see during an attack."""
        await self._seen()
        self._steps.steps()
        faults = list(await attack)
        await asyncio.sleep(QUIET_S)
        seen = await self._seen()
        end_s = time.monotonic() + LEAST_S
        while len(seen.gaps) < LEAST_GAPS and time.monotonic() < end_s:
            await asyncio.sleep(QUIET_S)
            seen = seen.and_then(await self._seen())
        row = self._judged(name, seen, faults)
        print(_line(row), flush=True)
        if (status := self._server.popen.poll()) is not None:
            raise SystemExit(f"the server ended in {name}: {status}")
        return row

    def _judged(self, name: str, seen: Seen, faults: list[str]) -> Row:
        faults = faults + seen.faults[:3]
        if not seen.gaps or not seen.health_ms:
            faults.append("the sane clients were not served at all")
            return Row(name, 0.0, 0.0, 0.0, 0.0, seen.late_ms, tuple(faults))
        gaps = measure(seen.gaps, self._steps.steps())
        unplanned_ms, health_ms = gaps.unplanned, max(seen.health_ms)
        if self._most_ms == SHARED_GAP_MS:
            # Where others take the cores, the sane clients themselves come late to read the clock.
            unplanned_ms, health_ms = unplanned_ms - seen.late_ms, health_ms - seen.late_ms
        if unplanned_ms > self._most_ms:
            faults.append(f"the stream stood still for {unplanned_ms:.0f} ms beyond what it may")
        if health_ms > self._most_ms:
            faults.append(f"/health took {health_ms:.0f} ms")
        return Row(
            name, gaps.median, gaps.longest, gaps.unplanned, max(seen.health_ms), seen.late_ms,
            tuple(faults),
        )  # fmt: skip

    async def _seen(self) -> Seen:
        """What the sane clients saw since the last call."""
        return Seen(**await self._watcher.ask(None))

    async def begin(self) -> None:
        """Waits until both sane clients are served."""
        seen = Seen()
        while not (seen.gaps and seen.health_ms):
            await asyncio.sleep(QUIET_S)
            seen = await self._seen()


def _line(row: Row) -> str:
    said = "; ".join(row.faults) or "ok"
    figures = (row.median_ms, row.gap_ms, row.unplanned_ms, row.health_ms, row.late_ms)
    return f"{row.name:{NAME_WIDTH}}" + "".join(f"{ms:10.1f}" for ms in figures) + f"  {said}"


@contextlib.contextmanager
def hostile_server(tiny: bool) -> Iterator[tuple[Server, Path]]:
    """A server with a token, and the folder of its logs: `server.log`, `steps.jsonl`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "tokens").write_text(TOKEN)
        args = ["--token-file", str(path / "tokens"), "--max-concurrent-requests", "64"]
        args += ["--record", str(path / "steps.jsonl"), "--trust-request-chat-template"]
        args += ["--task", "both"]
        if tiny:
            write_tiny_model(path, template=TEMPLATE.read_text())
            args += ["--warm-up", "coarse", "--no-fail-on-compile"]  # is ready sooner
        else:
            args += ["--model", "smollm2-135m", *PACKAGED, "--chat-template", str(TEMPLATE)]
            args += ["--max-num-batched-tokens", "512"]
        with serving(path, args) as server:
            yield server, path


def run(
    cases: Sequence[Case], *, tiny: bool, rounds: int, most_ms: float
) -> tuple[list[Row], list[str]]:
    """Runs the cases. Returns their rows, and what is wrong beside them."""
    columns = ("median", "gap", "unplanned", "/health", "late")
    print(f"{'milliseconds':{NAME_WIDTH}}" + "".join(f"{column:>10}" for column in columns))
    with hostile_server(tiny) as (server, folder):
        rows, sizes = asyncio.run(_rounds(cases, server, folder, rounds, most_ms))
        wrong = []
        if sizes[-1] > sizes[0] * MEMORY_SLACK:
            wrong.append(f"memory grew from {sizes[0] / 1e6:.0f} to {sizes[-1] / 1e6:.0f} MB")
        text = (folder / "server.log").read_text()
        if "Traceback" in text:
            wrong.append(
                "a traceback in the server's log: " + text[text.index("Traceback") :][:2000]
            )
    return rows, wrong


async def _rounds(
    cases: Sequence[Case], server: Server, folder: Path, rounds: int, most_ms: float
) -> tuple[list[Row], list[int]]:
    """Rows of all rounds, and the server's bytes after each."""
    rows, sizes = [], []
    where = (server.http, server.grpc)
    with contextlib.closing(StepLog(folder / "steps.jsonl")) as steps:
        async with (
            started("watch", *where, TOKEN) as watcher,
            started("attack", *where, TOKEN) as bad,
        ):
            suite = Suite(server, steps, watcher, bad, most_ms)
            await suite.begin()
            for _ in range(rounds):
                rows += await suite.round(cases)
                await asyncio.sleep(SETTLE_S if rounds > 1 else 0.0)
                sizes.append(resident_bytes(server.popen.pid))
    return rows, sizes


def main() -> int:
    """Runs from the command line; 1 if anything slipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--short", action="store_true", help="the cases that CI runs, once")
    parser.add_argument("--shared", action="store_true", help="others use this machine: 250 ms")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of it")
    parser.add_argument("--rounds", type=int, help="of all cases; 2, or 1 of the short form")
    args = parser.parse_args()
    cases = [
        case
        for case in all_cases()
        if (case.short or not args.short) and any(part in case.name for part in args.only)
    ]
    most_ms = SHARED_GAP_MS if args.shared else GAP_MS
    rounds = args.rounds or (1 if args.short else 2)
    rows, wrong = run(cases, tiny=args.tiny, rounds=rounds, most_ms=most_ms)
    failed = sorted({row.name for row in rows if row.faults})
    for line in wrong:
        print(line)
    if failed:
        print("failed: " + "; ".join(failed))
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
