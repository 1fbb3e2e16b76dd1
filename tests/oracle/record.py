"""Records what the scheduler decides, compares with it, and shows one run's plans.

python -m tests.oracle.record                 rewrite the file (`make oracle-record`)
python -m tests.oracle.record --check         play every run and compare (`make oracle`)
python -m tests.oracle.record --show "slo / chat / none" --plans 100:149
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.oracle.digests import first_difference, is_decided_by_rounding, marks, play
from tests.oracle.runs import Run, all_runs

PATH = Path(__file__).with_name("decisions.json")


def read() -> dict[str, list[str]]:
    """The recorded marks of every run, by its name; none of a run that rounding decides."""
    recorded: dict[str, list[str]] = json.loads(PATH.read_text(encoding="utf-8"))
    return recorded


def write(found: Mapping[str, list[str]]) -> None:
    """Replaces the recorded marks. A run is a line, so that a diff names the runs that changed."""
    lines = [f'"{name}": {json.dumps(values)}' for name, values in found.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def record(run: Run) -> list[str]:
    """The marks of a run; none if rounding decides it, so that it is compared with nothing."""
    lines = play(run)
    return [] if is_decided_by_rounding(run, lines) else marks(lines)


def differences(runs: Iterable[Run], recorded: Mapping[str, list[str]]) -> list[str]:
    """A sentence for each run that decides otherwise than recorded, or that is not recorded."""
    found = []
    for run in runs:
        if run.name not in recorded:
            found.append(f"{run.name}: not recorded")
            continue
        if not recorded[run.name]:
            continue
        where = first_difference(recorded[run.name], marks(play(run)))
        if where is not None:
            first, last = where
            found.append(
                f"{run.name}: the first plan that differs is one of {first} to {last}; to compare "
                f'two checkouts: python -m tests.oracle.record --show "{run.name}" '
                f"--plans {first}:{last}"
            )
    return found


def main() -> int:
    """1 if a comparison found a difference, 2 for a run that there is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--show", metavar="RUN", help="print a run's plans, a line each")
    parser.add_argument("--plans", default=":", metavar="FIRST:LAST", help="of them, these alone")
    args = parser.parse_args()
    runs = {run.name: run for run in all_runs()}
    if args.show is not None:
        if args.show not in runs:
            print(f"run {args.show!r}: one of\n" + "\n".join(runs), file=sys.stderr)
            return 2
        first, _, last = args.plans.partition(":")
        lines = play(runs[args.show])
        print("\n".join(lines[int(first or 0) : int(last or len(lines)) + 1]))
        return 0
    if args.check:
        recorded = read()
        found = differences(runs.values(), recorded)
        found += [f"{name}: recorded, but no run" for name in recorded if name not in runs]
        print("\n".join(found) or f"{len(runs)} runs decide what was recorded")
        return 1 if found else 0
    recorded = {name: record(run) for name, run in runs.items()}
    write(recorded)
    left_out = [name for name, values in recorded.items() if not values]
    print(f"{len(runs) - len(left_out)} runs recorded in {PATH}; rounding decides {left_out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
