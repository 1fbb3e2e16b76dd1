"""A measured machine: what its compiled programs took, as a file and as a step-time model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.executor import HostOverhead, SwapLink
from octavo.engine.simulation.step_time import StepWork

FORMAT = "octavo-profile-2"
READABLE = ("octavo-profile-1", FORMAT)
"""Formats that `Profile.load` takes: the first had no `decode_longest_s`."""

_FAR_LONGER = 1.5
"""Steps that took so many times as long as others like them were disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """What one compiled size takes: seconds = base + Σ coefficient · quantity, none below 0.

    Attributes:
        num_tokens, num_rows, num_new_rows: what fits it; `num_new_rows` is 0 of a decode program.
        num_steps: most decode iterations; 0 of a mixed program.
        base_s: of a dispatch; iteration_s: of each decode iteration.
        row_s: by decode row, in each iteration; token_s: by prefill token.
        decode_context_s: by position that decode rows attend to, in each iteration.
        decode_longest_s: by position that the longest of them attends to, in each iteration: where
            rows attend in groups, the program's rows all take as long as that one.
        prefill_attention_s: by query-key pair of chunks.
        noise: standard deviation of the logarithm of what was measured over what is priced.
    """

    num_tokens: int
    num_rows: int
    num_new_rows: int
    num_steps: int
    base_s: float
    iteration_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    decode_context_s: float = 0.0
    prefill_attention_s: float = 0.0
    decode_longest_s: float = 0.0
    noise: float = 0.0

    def takes(self, work: StepWork) -> bool:
        """Whether the work fits."""
        if not work.num_prefill_rows:
            return self.num_rows >= work.num_decode_rows and not self.num_new_rows
        return (
            self.num_tokens >= work.num_tokens
            and self.num_rows >= work.num_decode_rows + work.num_prefill_rows
            and self.num_new_rows >= work.num_prefill_rows
        )

    def seconds(self, work: StepWork) -> float:
        """Of the whole dispatch."""
        quantities = _quantities(work)
        coefficients = (
            self.base_s, self.iteration_s, self.row_s, self.token_s, self.decode_context_s,
            self.prefill_attention_s, self.decode_longest_s,
        )  # fmt: skip
        return sum(c * q for c, q in zip(coefficients, quantities, strict=True))


def _quantities(work: StepWork) -> tuple[float, ...]:
    """What the coefficients of a program multiply, in order."""
    k = work.num_steps
    grown = k * (k - 1) // 2
    context = k * work.decode_context + work.num_decode_rows * grown
    longest = k * work.longest_decode + grown if work.num_decode_rows else 0
    return (
        1.0, float(k), work.num_decode_rows * k, work.num_prefill_tokens, context,
        work.prefill_attention, longest,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine, a model, and the cost of each of its programs.

    Attributes:
        programs: smallest first.
        host: what the host spends on a step.
        limits: of the engine that was measured.
        link: to the host tier, if the engine had one.
        about: machine, model, date and command, for people.
    """

    programs: tuple[ProgramCost, ...]
    host: HostOverhead
    limits: StepLimits
    link: SwapLink | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def seconds(self, work: StepWork) -> float:
        """Seconds of a dispatch: that of the smallest program that takes it."""
        for program in self.programs:
            if program.takes(work):
                return program.seconds(work)
        return self.programs[-1].seconds(work)

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        values = {
            "format": FORMAT,
            "about": self.about,
            "host": asdict(self.host),
            "limits": asdict(self.limits),
            "link": None if self.link is None else asdict(self.link),
            "programs": [asdict(program) for program in self.programs],
        }
        Path(path).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save` wrote.

        Raises:
            InvalidConfigError: the file cannot be read or is no profile.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values.get("format") not in READABLE:
                raise ValueError(f"format {values.get('format')!r}")
            link = values.get("link")
            profile = cls(
                programs=tuple(ProgramCost(**program) for program in values["programs"]),
                host=HostOverhead(**values["host"]),
                limits=StepLimits.from_json(values["limits"]),
                link=None if link is None else SwapLink(**link),
                about=dict(values["about"]),
            )
            if not profile.programs:
                raise ValueError("no programs")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidConfigError(
                "profile", str(path), f"a file that `octavo profile` wrote ({error!r})"
            ) from None
        return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured dispatch of a program."""

    work: StepWork
    seconds: float


def fit_program(
    samples: Sequence[Sample], *, num_tokens: int, num_rows: int, num_new_rows: int, num_steps: int
) -> ProgramCost:
    """The cost of one program by least squares on relative errors; no coefficient below 0.

    Coefficients that would be negative are taken out and the rest is fitted again. Samples that
    took far longer than a first fit says are left out: something else had the machine then. What is
    left is priced right in sum: relative errors alone would price noisy steps too low. Of a decode
    program that ran for one number of iterations only, each iteration takes its share of the whole.

    Args:
        samples: ≥ 1 dispatches of the program.
    """
    x = np.array([_quantities(sample.work) for sample in samples], np.float64)
    if not num_steps:
        x[:, 1] = 0.0  # a mixed program has one iteration: that is its base
    y = np.array([sample.seconds for sample in samples], np.float64)
    first = _non_negative(x / y[:, None], np.ones(len(y)))
    kept = y <= _FAR_LONGER * np.maximum(x @ first, float(np.min(y)))
    x, y = x[kept], y[kept]
    found = _non_negative(x / y[:, None], np.ones(len(y)))
    found *= y.sum() / max(float((x @ found).sum()), 1e-9)
    if num_steps and not np.ptp(x[:, 1]):
        # Never dispatched for another number of iterations: nearly all of it is theirs.
        found[1], found[0] = found[1] + found[0] / x[0, 1], 0.0
    ratio = np.log(y / np.maximum(x @ found, 1e-9))
    return ProgramCost(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_new_rows=num_new_rows,
        num_steps=num_steps,
        base_s=float(found[0]),
        iteration_s=float(found[1]),
        row_s=float(found[2]),
        token_s=float(found[3]),
        decode_context_s=float(found[4]),
        prefill_attention_s=float(found[5]),
        decode_longest_s=float(found[6]),
        noise=float(ratio.std()) if len(y) > 1 else 0.0,
    )


def fit_link(samples: Sequence[tuple[int, float]], bytes_per_page: int) -> SwapLink:
    """The link that copies of so many pages, which took so many seconds, went over.

    Args:
        samples: ≥ 1; one alone gives no latency.
    """
    x = np.array([(num_pages, 1.0) for num_pages, _ in samples], np.float64)
    y = np.array([seconds for _, seconds in samples], np.float64)
    page_s, latency_s = _non_negative(x / y[:, None], np.ones(len(y)))
    page_s = max(float(page_s), 1e-12)
    return SwapLink(
        bytes_per_page=bytes_per_page,
        bytes_per_s=bytes_per_page / page_s,
        latency_s=float(latency_s),
    )


def _non_negative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares with coefficients ≥ 0: the worst offender is taken out until none is left.

    A quantity that the samples do not vary is left to the first column.
    """
    scale = np.maximum(np.abs(x).max(axis=0), 1e-30)
    active = [j for j in range(x.shape[1]) if j == 0 or np.ptp(x[:, j] / x[:, 0]) > 0]
    while True:
        found = np.zeros(x.shape[1])
        found[active] = np.linalg.lstsq(x[:, active] / scale[active], y, rcond=1e-9)[0]
        worst = min(active, key=lambda j: float(found[j]))
        if found[worst] >= 0 or len(active) == 1:
            result: np.ndarray = np.maximum(found, 0.0) / scale
            return result
        active.remove(worst)
