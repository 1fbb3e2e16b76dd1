"""Sections with time limits, results written as they come, a table at the end."""

from __future__ import annotations

import faulthandler
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A section cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the suite.

    Attributes:
        run: called with the results so far and the moment (`time.monotonic`) at which it should be
            done; yields or returns rows, dicts with at least "what".
        limit_s: most it may take; less if the whole budget is nearly spent.
        row_limit_s: most that one row may take: a kernel that never ends cannot be left, so the
            process is then ended, with the line that waits; what was measured is on disk.
    """

    name: str
    run: Callable[[dict[str, Any], float], Any]
    limit_s: float
    row_limit_s: float = 60.0


class Report:
    """Results on disk, current after every row.

    Args:
        about: device, date, command, versions.
        output: path without suffix; `.json` and `.md` are written.
        budget_s: of the whole suite.
    """

    def __init__(self, about: dict[str, Any], output: Path, budget_s: float) -> None:
        self.results: dict[str, Any] = {**about, "sections": {}}
        self._output = output
        self._end_s = time.monotonic() + budget_s

    def run(self, section: Section) -> None:
        """Runs a section; what goes wrong in it is a line of the report, and the rest goes on."""
        begun_s = time.monotonic()
        left_s = self._end_s - begun_s
        rows: list[dict[str, Any]] = []
        here: dict[str, Any] = {"rows": rows}
        self.results["sections"][section.name] = here
        if left_s < min(20.0, section.limit_s):
            here["skipped"] = f"{left_s:.0f} s of the budget were left"
        else:
            try:
                deadline_s = begun_s + min(section.limit_s, left_s)
                faulthandler.dump_traceback_later(section.row_limit_s, exit=True)
                for row in section.run(self.results, deadline_s) or ():
                    faulthandler.dump_traceback_later(section.row_limit_s, exit=True)
                    rows.append(row)
                    print(f"[{section.name}] {line(row)}", flush=True)
                    self.write()
                    if time.monotonic() > deadline_s:
                        here["cut"] = f"stopped after {section.limit_s:.0f} s"
                        break
            except Skipped as reason:
                here["skipped"] = str(reason)
            except Exception as error:
                here["failed"] = f"{type(error).__name__}: {str(error)[:600]}"
                traceback.print_exc()
            finally:
                faulthandler.cancel_dump_traceback_later()
        here["seconds"] = round(time.monotonic() - begun_s, 1)
        for state in ("skipped", "cut", "failed"):
            if state in here:
                print(f"[{section.name}] {state}: {here[state]}", flush=True)
        self.write()

    @property
    def ok(self) -> bool:
        """No section failed, and no check found a difference."""
        return not any(
            "failed" in section or any(row.get("ok") is False for row in section["rows"])
            for section in self.results["sections"].values()
        )

    def write(self) -> None:
        """Both files."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        json_path, md_path = (self._output.with_suffix(s) for s in (".json", ".md"))
        json_path.write_text(json.dumps(self.results, indent=1) + "\n")
        md_path.write_text(markdown(self.results))


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    rest = "  ".join(f"{key} {_show(value)}" for key, value in row.items() if key != "what")
    return f"{row['what']}: {rest}"


def markdown(results: dict[str, Any]) -> str:
    """The report as tables, one a section."""
    about = {key: value for key, value in results.items() if key != "sections"}
    lines = ["# Device suite", ""]
    lines += [f"- {key}: {_show(value)}" for key, value in about.items()]
    for name, section in results["sections"].items():
        lines += ["", f"## {name}", ""]
        for state in ("skipped", "cut", "failed"):
            if state in section:
                lines += [f"**{state}**: {section[state]}", ""]
        keys = list(dict.fromkeys(key for row in section["rows"] for key in row))
        if keys:
            lines.append("| " + " | ".join(keys) + " |")
            lines.append("|---" * len(keys) + "|")
            for row in section["rows"]:
                lines.append("| " + " | ".join(_show(row.get(key, "")) for key in keys) + " |")
        if "seconds" in section:
            lines += ["", f"{section['seconds']} s"]
    return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
