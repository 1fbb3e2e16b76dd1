"""Traces of real traffic, read from files by one loader.

The format of a file is recognised from its columns (CSV with a header) or keys (JSON lines), or
named. See `FORMATS` for those that are known. A line that cannot be read is refused with the file,
the line and the field.
"""

from __future__ import annotations

import csv
import datetime
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.prompts import Segment, block_segments
from octavo.engine.simulation.workloads.traffic import PLAIN, Arrival, TrafficClass

ARRIVAL_S = "arrival_s"
"""The field of times that count from the workload's start. Other clocks start at the first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """How a trace's lines are read.

    Attributes:
        name: of the format.
        num_input, num_output: fields of prompt and output tokens.
        time: field of the arrival; None: the format is a table of lengths.
        seconds: reads that field.
        tenant: field of the tenant; lines may lack it.
        blocks: field of the ids of the blocks that the prompt consists of; lines may lack it.
        block_tokens: tokens of a block.
        other: further fields that tell it from other formats.
        skips_failed: whether a line of 0 output tokens is a request that failed, and left out.
    """

    name: str
    num_input: str
    num_output: str
    time: str | None = None
    seconds: Callable[[Any], float] = float
    tenant: str | None = None
    blocks: str | None = None
    block_tokens: int = 512
    other: tuple[str, ...] = ()
    skips_failed: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that every line has."""
        time = () if self.time is None else (self.time,)
        return (*time, self.num_input, self.num_output, *self.other)


def _milliseconds(value: Any) -> float:
    return float(value) / 1e3


def _date(value: Any) -> float:
    """A date with its time, of the world's time if it names no zone."""
    time = datetime.datetime.fromisoformat(str(value))
    return time.replace(tzinfo=time.tzinfo or datetime.UTC).timestamp()


FORMATS = (
    TraceFormat(
        name="azure", num_input="ContextTokens", num_output="GeneratedTokens",
        time="TIMESTAMP", seconds=_date,
    ),
    TraceFormat(
        name="burstgpt", num_input="Request tokens", num_output="Response tokens",
        time="Timestamp", other=("Model", "Log Type"), skips_failed=True,
    ),
    TraceFormat(
        name="servegen", num_input="input_tokens", num_output="output_tokens",
        time="timestamp", tenant="client_id",
    ),
    TraceFormat(
        name="servegen-lengths", num_input="input_length", num_output="output_length",
        time="timestamp", tenant="client_id", other=("client_id",),
    ),
    TraceFormat(
        name="mooncake", num_input="input_length", num_output="output_length",
        time="timestamp", seconds=_milliseconds, blocks="hash_ids",
    ),
    TraceFormat(
        name="arrivals", num_input="input_tokens", num_output="output_tokens", time=ARRIVAL_S,
    ),
    TraceFormat(name="lengths", num_input="input_tokens", num_output="output_tokens"),
)  # fmt: skip
"""The formats that are known; a file is of the first one whose fields it has.

Sources: Azure/AzurePublicDataset (AzureLLMInferenceTrace; Splitwise, ISCA'24). HPMLL/BurstGPT.
alibaba/ServeGen (NSDI'26). kvcache-ai/Mooncake (FAST'25 release). `arrivals` is Azure's with its
clock in seconds from the first row.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests as a file has them.

    Attributes:
        path: of the file.
        format: as it was read.
        arrivals: in order of arrival; of a table of lengths, all at second 0 and in the file's
            order.
    """

    path: Path
    format: TraceFormat
    arrivals: list[Arrival]

    @property
    def has_times(self) -> bool:
        """Whether the file says when requests arrive."""
        return self.format.time is not None


def read_trace(
    path: str | Path,
    traffic_class: TrafficClass = PLAIN,
    prefix: str = "",
    *,
    format_name: str | None = None,
) -> Trace:
    """The requests of a file: CSV with a header, or JSON lines.

    Args:
        path: the file.
        traffic_class: of all its requests, but for their tenant where the file has one.
        prefix: begins every request id.
        format_name: one of `FORMATS`; None recognises it.

    Raises:
        InvalidConfigError: the file cannot be read, is of no known format, or holds a bad line.
    """
    path = Path(path)
    lines = _json_lines(path) if path.suffix in (".jsonl", ".json") else _csv_lines(path)
    trace_format: TraceFormat | None = None
    read: list[Arrival] = []
    try:
        for number, row in lines:
            if trace_format is None:
                trace_format = _recognised(path, number, row, format_name)
            if number == 0:
                continue  # a CSV's header
            line = _Line(path, number, row, trace_format)
            if trace_format.skips_failed and line.failed():
                continue
            read.append(_arrival(line, traffic_class, f"{prefix}{len(read)}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidConfigError("trace", path, f"a readable file ({error})") from None
    if trace_format is None or not read:
        raise InvalidConfigError("trace", path, "a file with requests")
    if trace_format.time is not None:
        read.sort(key=lambda arrival: arrival.arrival_s)
        if trace_format.time != ARRIVAL_S:
            begin_s = read[0].arrival_s
            read = [replace(a, arrival_s=a.arrival_s - begin_s) for a in read]
    return Trace(path=path, format=trace_format, arrivals=read)


def read_arrivals(
    path: str | Path, traffic_class: TrafficClass = PLAIN, prefix: str = ""
) -> list[Arrival]:
    """Arrivals of a file that has their times.

    Args: as for `read_trace`.

    Raises:
        InvalidConfigError: as for `read_trace`, or the file is a table of lengths.
    """
    trace = read_trace(path, traffic_class, prefix)
    if not trace.has_times:
        raise InvalidConfigError("trace", trace.path, "a trace with times of arrival")
    return trace.arrivals


def _csv_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, row) of each row; the header comes first, as line 0."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        yield 0, dict.fromkeys(reader.fieldnames or ())
        for row in reader:
            yield reader.line_num, row


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, object) of each line that is not empty; ServeGen's `data` is taken apart."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise InvalidConfigError(
                    "trace", path, f"JSON in line {number} ({error})"
                ) from None
            if not isinstance(row, dict):
                raise InvalidConfigError("trace", path, f"an object in line {number}")
            data = row.get("data")
            yield number, {**row, **data} if isinstance(data, dict) else row


def _recognised(path: Path, number: int, row: Mapping[str, Any], name: str | None) -> TraceFormat:
    """The format of a file whose first line, or header, is `row`."""
    known = [trace_format for trace_format in FORMATS if name in (None, trace_format.name)]
    if not known:
        names = ", ".join(trace_format.name for trace_format in FORMATS)
        raise InvalidConfigError("trace_format", name, names)
    for trace_format in known:
        if set(trace_format.required) <= set(row):
            return trace_format
    nearest = max(
        reversed(known), key=lambda f: sum(field in row for field in f.required) / len(f.required)
    )
    lacking = ", ".join(field for field in nearest.required if field not in row)
    raise InvalidConfigError(
        "trace", path,
        f"a {nearest.name} trace with column {lacking}; line {number or 1} has {sorted(row)}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Line:
    """A line and where it stands, to name both in errors."""

    path: Path
    number: int
    row: Mapping[str, Any]
    format: TraceFormat

    def refuse(self, field: str, allowed: str) -> InvalidConfigError:
        found = self.row.get(field)
        return InvalidConfigError(
            "trace", self.path, f"{allowed} in line {self.number}, field {field}: {found!r}"
        )

    def count(self, field: str, least: int = 1) -> int:
        value = self.row.get(field)
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not (number >= least and number.is_integer()):
            raise self.refuse(field, f"a count from {least} on")
        return int(number)

    def seconds(self, field: str) -> float:
        value = self.row.get(field)
        try:
            time_s = self.format.seconds(value)
        except (TypeError, ValueError):
            time_s = math.nan
        if isinstance(value, bool) or not (math.isfinite(time_s) and time_s >= 0):
            raise self.refuse(field, "a time of 0 or more")
        return time_s

    def failed(self) -> bool:
        return self.count(self.format.num_output, least=0) == 0

    def tenant(self) -> str:
        value = None if self.format.tenant is None else self.row.get(self.format.tenant)
        if isinstance(value, (list, dict)):
            raise self.refuse(str(self.format.tenant), "a name or a number")
        return "" if value is None else str(value)

    def segments(self, num_input: int) -> tuple[Segment, ...]:
        field = self.format.blocks
        if field is None or field not in self.row:
            return ()
        ids, size = self.row[field], self.format.block_tokens
        if not isinstance(ids, list) or not all(type(block) is int for block in ids):
            raise self.refuse(field, "a list of whole numbers")
        if len(ids) != -(-num_input // size):
            raise self.refuse(
                field, f"{-(-num_input // size)} ids of {size} tokens for {num_input} tokens"
            )
        return block_segments(ids, size, num_input)


def _arrival(line: _Line, traffic_class: TrafficClass, request_id: str) -> Arrival:
    trace_format = line.format
    num_input = line.count(trace_format.num_input)
    return Arrival(
        request_id=request_id,
        arrival_s=0.0 if trace_format.time is None else line.seconds(trace_format.time),
        num_input=num_input,
        num_output=line.count(trace_format.num_output),
        traffic_class=_of_tenant(traffic_class, line.tenant()),
        segments=line.segments(num_input),
    )


@functools.lru_cache(maxsize=4096)
def _of_tenant(traffic_class: TrafficClass, tenant: str) -> TrafficClass:
    return replace(traffic_class, tenant=tenant) if tenant else traffic_class
