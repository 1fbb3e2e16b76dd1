"""Traces of real traffic, read from files: CSV, or JSON lines with prefix hash ids."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.traffic import PLAIN, Arrival, TrafficClass
from octavo.engine.simulation.workload import read_trace

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one hash id stands for in Mooncake's published traces."""


def read_csv(
    path: str | Path, traffic_class: TrafficClass = PLAIN, prefix: str = ""
) -> list[Arrival]:
    """Arrivals of a CSV with a header naming arrival_s, input_tokens and output_tokens.

    Args:
        path: the file.
        traffic_class: of all its requests.
        prefix: begins every request id.

    Raises:
        InvalidConfigError: the file cannot be read, lacks a column or holds a bad row.
    """
    arrivals = []
    for index, (arrival_s, num_input, num_output) in enumerate(read_trace(Path(path))):
        if arrival_s is None:
            raise InvalidConfigError("trace", Path(path), "a CSV with a column arrival_s")
        arrivals.append(
            Arrival(
                request_id=f"{prefix}{index}",
                arrival_s=arrival_s,
                num_input=num_input,
                num_output=num_output,
                traffic_class=traffic_class,
            )
        )
    return arrivals


def read_mooncake(
    path: str | Path, traffic_class: TrafficClass = PLAIN, prefix: str = ""
) -> list[Arrival]:
    """Arrivals of JSON lines with timestamp (ms), input_length, output_length and hash_ids.

    Args: as for `read_csv`.

    Raises:
        InvalidConfigError: the file cannot be read or holds a bad line.

    Source: Mooncake (kvcache-ai/Mooncake, FAST'25 release).
    """
    arrivals: list[Arrival] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    arrivals.append(_mooncake_line(path, number, line, traffic_class, prefix))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError("trace", Path(path), f"readable JSON lines ({error})") from None
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    return arrivals


def read_arrivals(
    path: str | Path, traffic_class: TrafficClass = PLAIN, prefix: str = ""
) -> list[Arrival]:
    """Arrivals of a file, by the end of its name: .jsonl is Mooncake's, anything else is CSV."""
    read = read_mooncake if str(path).endswith((".jsonl", ".json")) else read_csv
    return read(path, traffic_class, prefix)


def _mooncake_line(
    path: str | Path, number: int, line: str, traffic_class: TrafficClass, prefix: str
) -> Arrival:
    try:
        row = json.loads(line)
        arrival = Arrival(
            request_id=f"{prefix}{number - 1}",
            arrival_s=float(row["timestamp"]) / 1e3,
            num_input=int(row["input_length"]),
            num_output=int(row["output_length"]),
            traffic_class=traffic_class,
            block_ids=tuple(int(block) for block in row.get("hash_ids", ())),
            block_tokens=MOONCAKE_BLOCK_TOKENS,
        )
        if arrival.num_input < 1 or arrival.num_output < 1 or not arrival.arrival_s >= 0:
            raise ValueError("a count below 1 or a time below 0")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidConfigError(
            "trace",
            str(path),
            f"line {number} must hold timestamp, input_length and output_length ({error!r})",
        ) from None
    return arrival
