"""What of a stream's gaps was planned: steps that carried somebody's prompt, at their price.

The server writes a log of its engine's loop (`octavo serve --record`), with the seconds that the
step-time model expected of each step when it was planned. The clocks of the log and of the sane
clients are one, the machine's monotonic one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """A step that carried a prompt's tokens.

    Attributes:
        end_s: when its tokens were read, on the machine's monotonic clock.
        planned_s: seconds that it was expected to take, at most those that it took.
    """

    end_s: float
    planned_s: float


class StepLog:
    """Reads the log of a server that still writes it.

    Args:
        path: of the log.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open(encoding="utf-8")
        self._rest = ""
        self._carries: set[int] = set()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def steps(self) -> list[Step]:
        """Steps with prompt tokens that were committed since the last call, in order."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        steps = []
        for line in lines:
            event = json.loads(line)
            if (event.get("turn") or {}).get("prefill"):
                self._carries.add(event["turn"]["step"])
            elif event.get("commit") in self._carries:
                self._carries.remove(event["commit"])
                planned_s = min(event["priced_s"], event["duration_s"])
                steps.append(Step(event["t"], planned_s))
        return steps


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of a stream, in milliseconds.

    Attributes:
        median: between two messages.
        longest: the longest one, beyond the median.
        unplanned: the longest one of what is left of each gap beyond the median and beyond the
            steps in it that carried prompts, each taken at its price.
    """

    median: float
    longest: float
    unplanned: float


def measure(gaps: Sequence[tuple[float, float]], steps: Iterable[Step]) -> Gaps:
    """Measures gaps.

    Args:
        gaps: the moment when each ended, in seconds, and its milliseconds; not empty.
        steps: those that carried prompts meanwhile.
    """
    steps = list(steps)
    median = statistics.median(ms for _, ms in gaps)
    unplanned = 0.0
    for end_s, ms in gaps:
        planned_ms = 1e3 * sum(_within(step, end_s - ms / 1e3, end_s) for step in steps)
        # The stream's own token comes out of such a step: it is no decode step besides.
        unplanned = max(unplanned, ms - max(median, planned_ms))
    return Gaps(median, max(ms for _, ms in gaps) - median, unplanned)


def _within(step: Step, begin_s: float, end_s: float) -> float:
    """Seconds that a step was planned to take between two moments."""
    return max(0.0, min(step.end_s, end_s) - max(step.end_s - step.planned_s, begin_s))
