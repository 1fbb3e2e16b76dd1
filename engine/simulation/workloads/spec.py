"""Workloads as they are asked for: by a generator's name with parameters, or by a trace's file."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.arrivals import (
    ArrivalProcess,
    Traffic,
    checked_rate,
    gamma_arrivals,
    parse_process,
    stretch,
    trace_traffic,
    uniform_lengths,
    window,
    with_process,
)
from octavo.engine.simulation.workloads.bench_requests import Range, parse_range
from octavo.engine.simulation.workloads.generator import Generator, Mix
from octavo.engine.simulation.workloads.generators import GENERATORS
from octavo.engine.simulation.workloads.traces import read_trace
from octavo.engine.simulation.workloads.traffic import Arrival

DEFAULT_DURATION_S = 300.0
"""For how long requests arrive where neither their number nor a time is asked for."""

MIX = "mix"
"""The name of all kinds but `chat`, in equal parts or those that its parameters give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Traffic at any rate.

    Attributes:
        name: of the workload.
        traffic: its arrivals by rate and seed.
        rate: requests a second where none is asked for: a trace's own.
        max_model_len: most tokens of prompt and output of a request.
        max_output: most output tokens of a request.
    """

    name: str
    traffic: Traffic
    rate: float
    max_model_len: int
    max_output: int

    def changed(self, change: Callable[[list[Arrival], int], list[Arrival]]) -> Workload:
        """The workload with its arrivals changed: `change` takes them and the seed."""
        traffic = self.traffic
        return dataclasses.replace(
            self, traffic=lambda rate, seed: change(traffic(rate, seed), seed)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where a workload ends, whichever comes first.

    Attributes:
        num_requests: requests in all; None: no limit.
        duration_s: seconds for which they arrive; None: no limit, or, of what would never end,
            `DEFAULT_DURATION_S` if `num_requests` is None too.

    Raises:
        InvalidConfigError: a number below 1, or a time that is not a finite number above 0.
    """

    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is not None and self.num_requests < 1:
            raise InvalidConfigError("num_requests", self.num_requests, "at least 1")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise InvalidConfigError("duration", self.duration_s, "a finite number above 0")

    @property
    def limits(self) -> dict[str, Any]:
        """For what would never end."""
        if self.num_requests is None and self.duration_s is None:
            return {"num_requests": None, "duration_s": DEFAULT_DURATION_S}
        duration_s = math.inf if self.duration_s is None else self.duration_s
        return {"num_requests": self.num_requests, "duration_s": duration_s}


def drawn_workload(
    input_len: Range,
    output_len: Range,
    extent: Extent | None = None,
    *,
    burstiness: float = 1.0,
) -> Workload:
    """Requests of uniform lengths that share nothing and are promised nothing.

    Args:
        input_len, output_len: inclusive ranges of tokens.
        extent: where it ends.
        burstiness: as for `gamma_arrivals`.
    """
    limits = (extent or Extent()).limits
    lengths = uniform_lengths(input_len, output_len)

    def traffic(rate: float, seed: int) -> list[Arrival]:
        checked_rate(rate)
        duration_s, count = limits["duration_s"], limits["num_requests"]
        if count is not None:
            # Longer than so many requests take, by 10 standard deviations and more.
            spread = 10 * math.sqrt(count / burstiness) + 100 / burstiness
            duration_s = min(duration_s, (count + spread) / rate)
        arrivals = gamma_arrivals(rate, duration_s, lengths, seed=seed, burstiness=burstiness)
        return arrivals[:count]

    return Workload(
        name="drawn",
        traffic=traffic,
        rate=1.0,
        max_model_len=input_len[1] + output_len[1],
        max_output=output_len[1],
    )


def generated_workload(
    specs: Sequence[str], extent: Extent | None = None, *, process: ArrivalProcess | None = None
) -> Workload:
    """A generator with parameters, or several side by side.

    Args:
        specs: `NAME` or `NAME:key=value,…` of each; of several, `share` (relative; 1 if it is not
            given) says how much of the rate each has.
        extent: where it ends.
        process: of sessions, in place of the generators' own.

    Raises:
        InvalidConfigError: an unknown name or parameter, or a value that cannot be.
    """
    limits = (extent or Extent()).limits
    parts = [part for spec in specs for part in _parse(spec)]
    source = parts[0][1] if len(parts) == 1 else Mix(tuple(parts))
    return Workload(
        name="+".join(specs),
        traffic=lambda rate, seed: source.arrivals(rate, seed, process=process, **limits),
        rate=source.rate,
        max_model_len=source.max_model_len,
        max_output=source.max_output,
    )


def trace_file_workload(
    path: str | Path,
    extent: Extent | None = None,
    *,
    format_name: str | None = None,
    arrivals: str | None = None,
    between_s: tuple[float, float] = (0.0, math.inf),
) -> Workload:
    """The requests of a file.

    Recorded arrivals change their rate by thinning, or by superposing the trace with itself
    shifted. With a number of requests, a stretch at a place drawn by seed is taken.

    Args:
        path: as for `read_trace`.
        extent: where it ends; a trace with its own times ends where the file ends.
        format_name: as for `read_trace`.
        arrivals: as for `parse_process`; None takes the file's times, Poisson where it has none.
        between_s: the seconds of the file that are taken.

    Raises:
        InvalidConfigError: as for `read_trace` and `parse_process`; `recorded` of a file without
            times; no request between the seconds asked for.
    """
    extent = extent or Extent()
    trace = read_trace(path, format_name=format_name)
    taken = trace.arrivals
    if between_s != (0.0, math.inf):
        taken = window(taken, *between_s)
    if not taken:
        raise InvalidConfigError("trace", trace.path, "a trace with requests in the window")
    process = parse_process(arrivals or ("recorded" if trace.has_times else "poisson"))
    if process is None and not trace.has_times:
        raise InvalidConfigError(
            "arrivals", arrivals, "poisson or gamma:cv=…: the trace has no times"
        )

    def drawn(rate: float, seed: int) -> list[Arrival]:
        assert process is not None
        return with_process(
            taken, process, rate=rate, seed=seed, shuffled=not trace.has_times, **extent.limits
        )

    by_rate = trace_traffic(taken)

    def recorded(rate: float, seed: int) -> list[Arrival]:
        found = by_rate(rate, seed)
        if extent.duration_s is not None:
            found = window(found, 0.0, extent.duration_s)
        return found if extent.num_requests is None else stretch(found, extent.num_requests, seed)

    return Workload(
        name=str(path),
        traffic=recorded if process is None else drawn,
        rate=len(taken) / (taken[-1].arrival_s or 1.0) if trace.has_times else 1.0,
        max_model_len=max(a.num_input + a.num_output for a in taken),
        max_output=max(a.num_output for a in taken),
    )


def _parse(spec: str) -> list[tuple[float, Generator]]:
    """(share, generator) of each part of a spec."""
    name, _, rest = spec.partition(":")
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key in values:
            raise InvalidConfigError("workload", spec, f"key=value, each key once; not {part!r}")
        values[key] = value
    share = _number(spec, "share", values.pop("share", "1"))
    name = name.replace("_", "-")
    if name == MIX:
        shares = {key.replace("_", "-"): _number(spec, key, text) for key, text in values.items()}
        _known(spec, shares, [kind for kind in GENERATORS if kind != MIX])
        shares = shares or {kind: 1.0 for kind in GENERATORS if kind != "chat"}
        total = sum(shares.values())
        return [(share * part / total, GENERATORS[kind]()) for kind, part in shares.items()]
    if name not in GENERATORS:
        raise InvalidConfigError("workload", name, ", ".join((*GENERATORS, MIX)))
    kind = GENERATORS[name]
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    _known(spec, values, names)
    return [(share, kind(**{key: _value(key, text, hints[key]) for key, text in values.items()}))]


def _known(spec: str, given: dict[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise InvalidConfigError("workload", spec, f"{', '.join((*known, 'share'))}; not {key}")


def _number(spec: str, key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidConfigError(key, text, f"a finite number above 0, in {spec}")
    return number


def _value(name: str, text: str, hint: Any) -> Any:
    """A parameter's value from its text."""
    if hint == Range:
        return parse_range(text, name)
    if hint is str:
        return text
    if hint == float | None and text == "none":
        return None
    kind = int if hint is int else float
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidConfigError(name, text, what) from None
