"""Clients that nobody here wrote, against a live server.

    python -m benchmarks.clients.run --python .venv-http-clients/bin/python           what CI runs
    python -m benchmarks.clients.run --python … --more-python … --npm FOLDER --all    every client

One server generates and embeds, through a template that knows tools: a tiny random model, or with
`--packaged` SmolLM2, for the checks that want texts (`place.packaged_only`). Each client runs in a
process of its own (`worker.py`), a few at once, and asserts what it gets: calls' arguments match
their schemas, pieces of streams joined are the whole, usage is told. Fails (status 1) with the
names of clients in which anything went wrong. A client that is not installed is named.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients.catalogue import CLIENTS, Client
from benchmarks.tiny_server import serving, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = "small"
TEMPLATE = ROOT / "docs" / "hermes.jinja"
CONTEXT = 8192
ARGS = (
    *("--served-model-name", MODEL, "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
    *("--chat-template", str(TEMPLATE), "--task", "both", "--num-kv-pages", "4000"),
    *("--no-fail-on-compile",),
)
TINY = ("--max-model-len", str(CONTEXT), "--warm-up", "coarse")
PACKAGED = ("--model", "smollm2-135m", "--max-model-len", "4096", "--warm-up", "few")
AT_ONCE = 3
TIMEOUT_S = 300
NAME_WIDTH = 16


@dataclass(slots=True)
class Tried:
    """What became of a client.

    Attributes:
        name: of the client.
        versions: of its packages.
        absent: why it was not run; None if it was.
        checks: names of what was tried.
        faults: what went wrong, by the check's name.
        seconds: that it took.
    """

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    absent: str | None = None
    checks: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, line: dict[str, Any]) -> None:
        """Takes a line of a client's process."""
        self.versions |= line.get("versions", {})
        self.absent = line.get("absent", self.absent)
        if "check" in line:
            self.checks.append(line["check"])
            if line["fault"] is not None:
                self.faults[line["check"]] = line["fault"]

    def line(self) -> str:
        """Its line of the table."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        if self.absent is not None:
            return f"{self.name:{NAME_WIDTH}} not run: {self.absent}"
        good = len(self.checks) - len(self.faults)
        told = f"{good} of {len(self.checks)} ({self.seconds:.0f} s)"
        failed = f"; FAILED: {', '.join(self.faults)}" if self.faults else ""
        return f"{self.name:{NAME_WIDTH}} {told:14} {versions}{failed}"


def run_process(name: str, command: Sequence[str], environ: dict[str, str], cwd: Path) -> Tried:
    """Runs a client's process, which prints JSON lines."""
    tried, begun_s = Tried(name), time.monotonic()
    popen = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=cwd, env=environ,
    )  # fmt: skip
    try:
        out, errors = popen.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        out, errors = popen.communicate()
        tried.faults["in time"] = f"not over after {TIMEOUT_S} s"
    for line in out.splitlines():
        tried.add(json.loads(line))
    if popen.returncode or (tried.absent is None and not tried.checks):
        tried.faults.setdefault("process", f"status {popen.returncode}\n{errors[-3000:]}")
    tried.checks += [check for check in tried.faults if check not in tried.checks]
    tried.seconds = time.monotonic() - begun_s
    return tried


def run_client(client: Client, python: Path, url: str, *, packaged: bool) -> Tried:
    """Runs a client of Python's."""
    # Thousands of modules: their byte code is kept, whatever else is not.
    environ = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environ |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "unused"}
    worker = [str(python), "-m", "benchmarks.clients.worker", client.module, url, MODEL]
    command = [*worker, "packaged" if packaged else "tiny", *client.packages]
    return run_process(client.name, command, environ, ROOT)


def run_npm(folder: Path, script: Path, url: str) -> Tried:
    """Runs a script of Node's with the packages of a folder."""
    environ = os.environ | {"AI_SDK_LOG_WARNINGS": "false"}
    return run_process(
        f"npm: {script.stem}", ["node", str(folder / script.name), url, MODEL], environ, folder
    )


def chosen(args: argparse.Namespace) -> list[tuple[Client, Path]]:
    """The clients to run, each with the Python that has it."""
    found = []
    for client in CLIENTS:
        python = args.python if client.is_short else args.more_python
        is_asked = client.name in args.only if args.only else client.is_short or args.all
        if is_asked and python is not None:
            found.append((client, python))
    return found


def main() -> int:
    """Runs from the command line; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="that has CI's clients")
    parser.add_argument("--more-python", type=Path, help="that has the others")
    parser.add_argument("--npm", type=Path, help="folder with npm's packages and scripts")
    parser.add_argument("--all", action="store_true", help="those too that CI leaves out")
    parser.add_argument("--only", nargs="+", help="clients of these names")
    parser.add_argument("--packaged", action="store_true", help="SmolLM2, which writes texts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_model(Path(name), context=CONTEXT, template=TEMPLATE.read_text())
        with serving(folder, ARGS + (PACKAGED if args.packaged else TINY)) as server:
            tried = try_all(args, server.http)
            log = (folder / "server.log").read_text()
    status = report(tried)
    if "Traceback" in log:
        print("a traceback in the server's log:", log[log.index("Traceback") :][:4000], sep="\n")
        return 1
    return status


def try_all(args: argparse.Namespace, url: str) -> list[Tried]:
    """Runs clients, a few at once."""
    jobs: list[Callable[[], Tried]] = [
        functools.partial(run_client, client, python, url, packaged=args.packaged)
        for client, python in chosen(args)
    ]
    if args.npm is not None:
        for script in sorted(args.npm.glob("*.mjs")):
            jobs.append(functools.partial(run_npm, args.npm, script, url))

    def run(job: Callable[[], Tried]) -> Tried:
        tried = job()
        print(tried.line(), flush=True)
        return tried

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, jobs))


def report(tried: Sequence[Tried]) -> int:
    """Prints every fault; 1 if there is one."""
    failed = [each for each in tried if each.faults]
    for each in failed:
        for check, fault in each.faults.items():
            print(f"\n--- {each.name}, {check}:\n{fault}")
    if failed:
        print("\nfailed: " + ", ".join(each.name for each in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
