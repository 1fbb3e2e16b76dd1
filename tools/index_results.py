"""Writes benchmarks/results/README.md: each result with its machine, date and command.

    python tools/index_results.py

A result is the files of one stem, or a folder: KIND-DATE, then a letter if it is a later run of
that day, and words for what sets it apart. The newest result of each kind and machine stays. An
older one stays while a document quotes it. The script names those that nothing quotes, to be
removed with `git rm`, and fails. Machine and command are read from the files; what they do not say
stands in the tables below.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
INDEX = RESULTS / "README.md"
SCRIPT = Path("tools/index_results.py")

SHOWS = {
    "aot": "kernels and steps compiled for TPUs and Hopper: registers, memory, least times",
    "aot-families": "steps of every family in real sizes, compiled for TPUs: copies, memory",
    "aot-gpu": "kernels and steps compiled for Hopper, with the cycles of their hot loops",
    "azure-goodput": "every policy on Azure's traces, simulated: goodput by rate",
    "chaos": "a hundred servers killed behind two fronts, under readers that check every token",
    "chaos-matrix": "parts of a fleet killed, stopped, slowed, parted and repeated, under readers",
    "device": "kernels checked and timed, and whole steps, on a GPU or TPU",
    "fidelity": "latencies of the live engine beside their simulation",
    "fuzz": "messages that no sane client sends, and how long a sane stream waited beside them",
    "goodput-matrix": "`slo` beside tuned policies over workloads and loads, simulated",
    "hostile": "attackers beside a sane stream and a probe: the longest each of them waited",
    "kv_pool": "step time with a small and a large KV pool",
    "live-refusals": "whether a live server's refusals are right and its first tokens predicted",
    "live-slo": "interactive requests beside a job of long ones, `slo` and `fcfs`, live",
    "memory-bound-goodput": "policies with a quarter of the KV memory, simulated: goodput by rate",
    "moe": "routed experts: each way to multiply by them, beside the least there could be",
    "multihost-log": "what a group of two hosts costs its leader a step, beside other work",
    "peers": "Octavo beside other engines, the same requests in turns: {covers}",
    "planner": "what planning and committing a step costs the host",
    "prefix": "prompts with shared prefixes, with the prefix cache and without",
    "chaos-ray": "servers on a Ray cluster killed under readers that check every token",
    "moves": "requests that move between two replicas: pauses, or tokens compared",
    "route-overhead": "a front and the server behind it in turns, 32 streams at a time",
    "router-matrix": "routing policies in simulated fleets: attainment by workload and load",
    "server-faults": "each kind of fault 100 times under clients that check every token",
    "server-memory": "a server's memory from its start on, its compiling process included",
    "server-overhead": "`LLM.generate` beside gRPC streams, and 1,000 idle streams",
    "server-soak": "half an hour at 1.5 times a server's capacity",
    "throughput": "this engine alone: rates, padding, host time a step",
    "window-pages": "sequences of Gemma 3 270M in equal bytes, with caches by group and without",
}
"""What a kind shows. `{covers}` are the engines and cores of a comparison."""

COMMANDS = {
    "aot": "python -m benchmarks.aot",
    "hostile": "python -m benchmarks.hostile.run",
    "live-refusals": "python benchmarks/live_refusals.py",
    "server-faults": "python -m benchmarks.server_faults --times 100",
    "server-overhead": "python -m benchmarks.server_overhead",
    "server-soak": "python -m benchmarks.server_soak --seconds 1800",
    "window-pages": "python benchmarks/window_pages.py --json",
}
"""Commands of kinds whose files do not all say theirs."""

ZEN_4, ZEN_5, XEON = "EPYC, Zen 4", "EPYC, Zen 5", "Xeon"
MACHINES = {
    "aot": "none: compiled for devices that were not there",
    "aot-families": "none: compiled for devices that were not there",
    "aot-gpu": "none: compiled for devices that were not there",
    "goodput-matrix": "simulated",
    "router-matrix": "simulated",
    "live-refusals-2026-11-24": ZEN_4,
    "server-faults-2026-11-21": ZEN_5,
    "server-soak-2026-11-21": ZEN_5,
    "window-pages": "none: bookkeeping alone",
}
"""Machines of results, or of kinds, whose files do not say theirs."""

_DATED = re.compile(r"(?P<kind>.+?)-(?P<date>\d{4}-\d\d-\d\d)(?P<rest>(?:-\w+)*)")
_MACHINE = re.compile(r"EPYC|Xeon|NVIDIA H\d+")
_COMMAND = re.compile(r"(?:python|taskset|octavo) [^;]*?(?:benchmarks|bench)[^;]*")
_COMMAND_LINE = re.compile(r"\A`(.*)`$|^    ((?:.*\\\n)*.*)$", re.MULTILINE)
_PLACES = re.compile(r" --(?:out|output|cache-dir|log-dir|envs|cache|trace-dir|steps) [^\s\d]\S*")
_QUOTING = {".md", ".py", ".json", ".toml", ".txt", ".yml", ".yaml", ".sh", ".ipynb"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of a benchmark.

    Attributes:
        name: the stem of its files, or its folder.
        files: its files below benchmarks/results/.
        kind: the name before the date.
        date: empty if the name has none.
        run: the letter of a later run of that day.
        variant: what sets it apart from others of its kind on its machine.
        machine: where it was taken.
        command: what made it, without the options that only say where files are.
        covers: engines that it compares.
    """

    name: str
    files: tuple[str, ...]
    kind: str
    date: str
    run: str
    variant: str
    machine: str
    command: str
    covers: frozenset[str] = field(default=frozenset())

    def is_superseded_by(self, other: Result) -> bool:
        """Whether a newer result shows on the same machine all that this one shows."""
        mine, theirs = ((r.kind, r.variant, r.machine) for r in (self, other))
        is_newer = (other.date, other.run) > (self.date, self.run)
        return mine == theirs and is_newer and other.covers >= self.covers

    def shows(self) -> str:
        if self.kind not in SHOWS:
            raise ValueError(
                f"{self.name}: SHOWS in tools/index_results.py says nothing of {self.kind!r}"
            )
        engines = f"{', '.join(sorted(self.covers))}, {self.variant}"
        text = SHOWS[self.kind].format(covers=engines)
        return text if self.covers or not self.variant else f"{text} ({self.variant})"


def repository_files(root: Path) -> list[str]:
    """Files of the repository, new ones included and ignored ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return sorted(name for name in listed.stdout.splitlines() if (root / name).is_file())


def read_results(root: Path) -> list[Result]:
    """All results, by name."""
    by_name: dict[str, list[str]] = {}
    for path in map(Path, repository_files(root)):
        if path.is_relative_to(RESULTS) and path != INDEX:
            below = path.relative_to(RESULTS)
            by_name.setdefault(below.parts[0] if len(below.parts) > 1 else below.stem, []).append(
                below.as_posix()
            )
    return [_result(root, name, files) for name, files in sorted(by_name.items())]


def _result(root: Path, name: str, files: list[str]) -> Result:
    matched = _DATED.fullmatch(name)
    kind, date, rest = (
        (matched["kind"], matched["date"], matched["rest"]) if matched else (name, "", "")
    )
    words = [word for word in rest.split("-") if word and word != "epyc"]
    said, command = _about(root, files)
    machine = MACHINES.get(name) or MACHINES.get(kind) or _machine(name, said, date)
    command = command or COMMANDS.get(kind, "")
    if not command:
        raise ValueError(f"{name}: its files do not say its command, nor does COMMANDS")
    engines = re.search(r"--peers (\S+)", command)
    variant = " ".join(word for word in words if len(word) > 1)
    return Result(
        name=name,
        files=tuple(files),
        kind=kind,
        date=date,
        run="".join(word for word in words if len(word) == 1),
        variant=_cores(command) if engines else variant,
        machine=machine,
        command=command,
        covers=frozenset(engines[1].split(",")) if engines else frozenset(),
    )


def _about(root: Path, files: list[str]) -> tuple[str, str]:
    """What files say of themselves, and their command without prose after it; empty for nothing."""
    said, commands = [], []
    for file in sorted(files, key=lambda name: not name.endswith(".json")):
        text = (root / RESULTS / file).read_text("utf-8")
        if file.endswith(".json"):
            for key, part in _prose(json.loads(text)):
                (commands if key == "command" else said).append(part)
        elif file.endswith((".md", ".txt")):
            said.append(text[:2000])
            if found := _COMMAND_LINE.search(text[:2000]):
                commands.append(re.sub(r"\s*\\\n\s*", " ", found[1] or found[2]))
    if not commands and (found := _COMMAND.search("\n".join(said))):
        commands.append(found[0])
    command = re.split(r"  |, ", commands[0].strip())[0] if commands else ""
    return "\n".join(said), _PLACES.sub("", command)


def _prose(data: Any) -> list[tuple[str, str]]:
    """What a JSON result says of itself, by key, the outermost first."""
    found = []
    if isinstance(data, dict):
        for key in ("command", "machine", "about", "note", "processor"):
            value = data.get(key)
            found += [(key, value)] if isinstance(value, str) else _prose(value)
    return found


def _machine(name: str, said: str, date: str) -> str:
    found = _MACHINE.search(said)
    if not found:
        raise ValueError(f"{name}: its files do not say its machine, nor does MACHINES")
    if found[0] not in ("EPYC", "Xeon"):
        return found[0]
    if found[0] == "Xeon":
        return XEON
    # Two generations go by one name; the second came on this day.
    return ZEN_4 if date >= "2026-11-23" else ZEN_5


def _cores(command: str) -> str:
    cores = re.search(r"--cores (\S+)", command)
    return "two cores" if cores and len(cores[1]) > 1 else "one core"


def quoted(root: Path, results: Iterable[Result]) -> set[str]:
    """Names that documents and code quote, or the newest results, or older ones that stay."""
    results = list(results)
    names = re.compile(
        r"(?<![\w-])(" + "|".join(re.escape(r.name) for r in results) + r")(?![\w-])"
    )

    def named_in(path: Path) -> set[str]:
        text = path.read_text("utf-8") if path.suffix in _QUOTING else ""
        return set(names.findall(text))

    others = (Path(name) for name in repository_files(root))
    found = {
        name
        for path in others
        if not path.is_relative_to(RESULTS) and path != SCRIPT
        for name in named_in(root / path)
    }
    staying = [r for r in results if r.name in found or is_newest(r, results)]
    for result in staying:  # grows as it goes
        for file in result.files:
            new = named_in(root / RESULTS / file) - found
            found |= new
            staying += [r for r in results if r.name in new]
    return found


def is_newest(result: Result, results: Iterable[Result]) -> bool:
    return not any(result.is_superseded_by(other) for other in results)


def stale(root: Path) -> list[str]:
    """Results that a newer one supersedes and that nothing quotes."""
    results = read_results(root)
    stay = quoted(root, results)
    return [r.name for r in results if r.name not in stay and not is_newest(r, results)]


def render(root: Path) -> str:
    """The index."""
    results = read_results(root)
    newest = [r for r in results if is_newest(r, results)]
    older = [r for r in results if r not in newest]
    lines = [
        "# Results",
        "",
        "Written by `python tools/index_results.py`: run it after adding a result. Only figures of",
        "one run compare: machines differ, and so do hours. A removed result is in the history.",
        "",
        "## The newest of each kind and machine",
        "",
        *_table(newest),
    ]
    if older:
        lines += ["", "## Older, kept because a document quotes them", "", *_table(older)]
    return "\n".join(lines) + "\n"


def _table(results: list[Result]) -> list[str]:
    rows = ["| files | machine | date | command | shows |", "|---|---|---|---|---|"]
    for result in results:
        files = ", ".join(f"[{_label(result, file)}]({file})" for file in _listed(result))
        command = result.command.replace("|", "\\|")
        cells = (files, result.machine, result.date, f"`{command}`", result.shows())
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _listed(result: Result) -> list[str]:
    """Its files, what is to be read first."""
    order = (".md", ".txt", ".json")
    return sorted(
        result.files, key=lambda f: order.index(s) if (s := Path(f).suffix) in order else 3
    )


def _label(result: Result, file: str) -> str:
    if file == _listed(result)[0]:
        return result.name
    return file.rpartition(".")[2] if "/" not in file else Path(file).name


def main() -> int:
    (ROOT / INDEX).write_text(render(ROOT), "utf-8")
    unquoted = stale(ROOT)
    for name in unquoted:
        print(f"superseded, and nothing quotes it: {RESULTS / name}", file=sys.stderr)
    return 1 if unquoted else 0


if __name__ == "__main__":
    sys.exit(main())
