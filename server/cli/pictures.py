"""What `octavo simulate` draws: a stretch of the schedule, as a plot and as a trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.observability.event_log import EventLines
from octavo.engine.observability.schedule import ScheduleReader

DEFAULT_SHOW = "0:30"


def add_picture_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options of pictures."""
    parser.add_argument(
        "--plot", metavar="FILE", help="draw rows by time, coloured by slack (SVG or PNG)"
    )
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write the schedule as a trace for ui.perfetto.dev"
    )
    parser.add_argument(
        "--show", metavar="BEGIN:END", default=DEFAULT_SHOW,
        help=f"seconds since the run's start that both show (default {DEFAULT_SHOW})",
    )  # fmt: skip


class Pictures:
    """Reads a run's events for the pictures that were asked for.

    Args:
        args: of the command line.

    Attributes:
        observer: for the loop of a simulation; None if no picture is wanted.

    Raises:
        InvalidConfigError: `show` is no stretch of time.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._plot, self._perfetto = args.plot, args.perfetto
        self._begin_s, self._end_s = _stretch(args.show)
        self._start_s: float | None = None
        self._reader = ScheduleReader()
        wanted = self._plot is not None or self._perfetto is not None
        self.observer = EventLines(self._read) if wanted else None

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Reads the lines of a recorded log."""
        for line in lines:
            self._read(line)

    def draw(self) -> None:
        """Writes the files."""
        if self.observer is None:
            return
        schedule = self._reader.schedule.since((self._start_s or 0.0) + self._begin_s)
        if self._plot is not None:
            from octavo.engine.simulation.plots import plot_schedule

            plot_schedule(schedule, self._plot, start_s=self._start_s or 0.0)
        if self._perfetto is not None:
            from octavo.engine.observability.perfetto import perfetto_trace

            with open(self._perfetto, "w", encoding="utf-8") as file:
                json.dump(perfetto_trace([schedule]), file, separators=(",", ":"))

    def _read(self, line: Mapping[str, Any]) -> None:
        if self._start_s is None:
            self._start_s = line["t"]
        if line["t"] <= self._start_s + self._end_s:
            self._reader.read(line)


def _stretch(text: str) -> tuple[float, float]:
    begin, _, end = text.partition(":")
    try:
        begin_s, end_s = float(begin), float(end)
    except ValueError:
        begin_s = end_s = 0.0
    if not 0 <= begin_s < end_s:
        raise InvalidConfigError("show", text, "BEGIN:END in seconds, 0 ≤ BEGIN < END")
    return begin_s, end_s
