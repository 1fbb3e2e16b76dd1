"""What every peer does alike: read the workload, measure the engine, write one JSON object.

Standard library only, because each peer runs in an environment of its own. A peer hands `main` a
function that builds its engine; an engine is anything with `generate` as below and `settings`, a
dict of what was chosen for it.

The order is the same for all: start and first token, warm-up, each batch at once, prefill alone,
single streams one after another. Only what is inside `generate` is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

STARTED_AT_VARIABLE = "PEER_STARTED_AT"
"""Environment variable: `time.time()` just before the peer's process was started."""


@dataclass(frozen=True)
class PeerRequest:
    """Generate exactly `max_tokens` greedy tokens after `prompt_token_ids`."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class PeerWorkload:
    """What a peer is asked to do.

    Attributes:
        warmup: served before anything is timed.
        batches: name -> requests submitted at once; the last one gives the headline figures.
        prefill: long prompts with one output token each, at once.
        single: served alone, one after another.
    """

    warmup: list[PeerRequest]
    batches: dict[str, list[PeerRequest]]
    prefill: list[PeerRequest]
    single: list[PeerRequest]

    @classmethod
    def read(cls, path: Path) -> PeerWorkload:
        """The workload that `workload_file.write` wrote at `path`."""
        sections = json.loads(path.read_text())

        def requests(rows: list[dict[str, Any]]) -> list[PeerRequest]:
            return [PeerRequest(**row) for row in rows]

        return cls(
            warmup=requests(sections["warmup"]),
            batches={name: requests(rows) for name, rows in sections["batches"].items()},
            prefill=requests(sections["prefill"]),
            single=requests(sections["single"]),
        )


@dataclass(frozen=True)
class Completion:
    """What came of one request; times in seconds since `generate` was called, None if unknown."""

    token_ids: list[int]
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds an output token after the first."""
        if self.first_token_s is None or self.last_token_s is None or len(self.token_ids) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (len(self.token_ids) - 1)


class Engine(Protocol):
    """A peer, started."""

    settings: dict[str, Any]

    def generate(self, requests: list[PeerRequest]) -> list[Completion]:
        """Serve all `requests`, submitted at once; results in their order."""


def percentiles_ms(values_s: list[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds, each a value that occurred; None if any is unknown."""
    known = sorted(value for value in values_s if value is not None)
    if not known or len(known) < len(values_s):
        return None

    def at(share: float) -> float:
        return round(1000 * known[max(0, math.ceil(share * len(known)) - 1)], 2)

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def measure(engine: Engine, workload: PeerWorkload) -> dict[str, Any]:
    """Serve the whole workload and return the rates.

    Raises:
        RuntimeError: the engine gave another number of tokens than it was asked for.
    """
    timed_generate(engine, workload.warmup)
    batches = {name: _measure_batch(engine, rows) for name, rows in workload.batches.items()}
    prefill_s, _ = timed_generate(engine, workload.prefill)
    num_prefill = sum(len(request.prompt_token_ids) for request in workload.prefill)
    singles = []
    for request in workload.single:
        single_s, _ = timed_generate(engine, [request])
        singles.append(request.max_tokens / single_s)
    headline = list(batches.values())[-1]
    return {
        **{key: value for key, value in headline.items() if key != "outputs"},
        "prefill_tokens_per_s": num_prefill / prefill_s,
        "single_stream_tokens_per_s": statistics.median(singles),
        "single_stream_runs": singles,
        "batches": batches,
    }


def cpu_s() -> float:
    """Processor time of this process and of those below it, which engines may start."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        seconds[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(seconds[process] for process in family)


def _measure_batch(engine: Engine, requests: list[PeerRequest]) -> dict[str, Any]:
    cpu_began_s = cpu_s()
    batch_s, completions = timed_generate(engine, requests)
    batch_cpu_s = cpu_s() - cpu_began_s
    num_prompt = sum(len(request.prompt_token_ids) for request in requests)
    num_output = sum(request.max_tokens for request in requests)
    longer = [completion for completion in completions if len(completion.token_ids) > 1]
    return {
        "num_requests": len(requests),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "batch_s": batch_s,
        # Well below batch_s times the cores: somebody else was using them.
        "batch_cpu_s": batch_cpu_s,
        "output_tokens_per_s": num_output / batch_s,
        "total_tokens_per_s": (num_prompt + num_output) / batch_s,
        "ttft_ms": percentiles_ms([completion.first_token_s for completion in completions]),
        "tpot_ms": percentiles_ms([completion.tpot_s for completion in longer]),
        "outputs": [completion.token_ids for completion in completions],
    }


def timed_generate(engine: Engine, requests: list[PeerRequest]) -> tuple[float, list[Completion]]:
    """Seconds `generate` took, and its completions, checked for their number of tokens."""
    began_s = time.perf_counter()
    completions = engine.generate(requests)
    took_s = time.perf_counter() - began_s
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        if len(completion.token_ids) != request.max_tokens:
            raise RuntimeError(
                f"request {index}: {len(completion.token_ids)} tokens came back, "
                f"{request.max_tokens} were asked for"
            )
    return took_s, completions


def main(
    name: str,
    build: Callable[[argparse.Namespace], Engine],
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The command line of every peer.

    Args:
        name: what the engine is called.
        build: starts the engine from the parsed arguments (`model`, `dtype`, `max_model_len`,
            `max_num_seqs` and the peer's own).
        add_arguments: adds the peer's own arguments.
    """
    started_at = float(os.environ.get(STARTED_AT_VARIABLE) or time.time())
    parser = argparse.ArgumentParser(description=f"Measure {name} on a workload file.")
    parser.add_argument("--workload", type=Path, required=True, help="JSON written by run.py")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON result goes")
    parser.add_argument("--model", required=True, help="directory, file or name of the model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    add_arguments(parser)
    args = parser.parse_args()
    workload = PeerWorkload.read(args.workload)
    engine = build(args)
    engine.generate([PeerRequest(workload.warmup[0].prompt_token_ids, 1)])
    start_to_first_token_s = time.time() - started_at
    settle = getattr(engine, "settle", None)
    if settle is not None:  # what it goes on doing behind, once it answers
        settle()
    result: dict[str, Any] = {
        "name": name,
        "settings": engine.settings,
        "start_to_first_token_s": start_to_first_token_s,
        "start_to_settled_s": time.time() - started_at,
        **measure(engine, workload),
    }
    args.out.write_text(json.dumps(result))
    rates = {key: round(value, 2) for key, value in result.items() if isinstance(value, float)}
    print(f"{name}: {json.dumps(rates)}", flush=True)
