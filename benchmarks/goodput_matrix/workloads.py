"""The workloads that policies are compared on, each with a replica for it.

All replicas have 128 rows, pages of 16 tokens and the published step times of Niyama. A run has
1,000 requests, all of them with targets, and fewer where each takes long: prompts of ten thousand
tokens (500) and outputs of thousands (350). Three seeds make at least 1,000 a cell everywhere.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.settings import BATCH, CHAT, CODE, Setting, replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.arrivals import spread_classes, trace_traffic, window
from octavo.engine.simulation.workloads.spec import (
    Extent,
    Workload,
    generated_workload,
    trace_file_workload,
)
from octavo.engine.simulation.workloads.traffic import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload and its replica.

    Attributes:
        name: of the workload.
        source: a generator as `--workload` takes it, or a trace's file name.
        num_requests: of a run.
        kv_tokens: of the replica.
        max_model_len: longest request, in tokens.
        caches_prefixes: whether the prefix cache is on.
        guess: requests a second where the search for the capacity begins.
    """

    name: str
    source: str
    num_requests: int = 1000
    kv_tokens: int = 64_000
    max_model_len: int = 16_384
    caches_prefixes: bool = False
    guess: float

    @property
    def is_trace(self) -> bool:
        """Whether it reads a trace."""
        return self.source.endswith(".csv")


_LONG_PROMPTS: dict[str, Any] = {
    "num_requests": 500, "max_model_len": 32_768, "caches_prefixes": True,
}  # fmt: skip

CASES = (
    Case(name="azure-conv", source="azure_2023_conv.csv", guess=4.0),
    Case(name="azure-code", source="azure_2023_code.csv", guess=1.0),
    Case(name="multi-turn", source="sessions", kv_tokens=200_000, guess=1.0, **_LONG_PROMPTS),
    Case(name="agents", source="agents", guess=8.0, **_LONG_PROMPTS),
    Case(name="retrieval", source="retrieval", kv_tokens=200_000, guess=1.0, **_LONG_PROMPTS),
    Case(name="reasoning-64k", source="reasoning", num_requests=350, guess=0.4),
    Case(name="reasoning-400k", source="reasoning", num_requests=350, kv_tokens=400_000, guess=1.2),
    Case(name="tight-chat", source="tight-chat", guess=3.0),
    Case(name="bursts", source="bursts", guess=5.0),
    Case(name="flood", source="flood", guess=8.0),
    Case(name="mix", source="mix", kv_tokens=200_000, guess=1.0, **_LONG_PROMPTS),
)
"""By name, in the order of the table."""


def get_case(name: str) -> Case:
    """The case of that name.

    Raises:
        InvalidConfigError: there is none.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise InvalidConfigError("workload", name, ", ".join(case.name for case in CASES))


def setting_of(case: Case, trace_dir: str | Path | None) -> Setting:
    """The case as the simulation takes it.

    Raises:
        InvalidConfigError: it reads a trace and the folder is not given, or has no such file.
    """
    if case.is_trace:
        workload = _azure(_trace(case, trace_dir), case.num_requests)
    else:
        workload = generated_workload([case.source], Extent(num_requests=case.num_requests))
    return Setting(
        name=case.name,
        limits=replica_limits(kv_tokens=case.kv_tokens, max_model_len=case.max_model_len),
        step_time=NIYAMA_STEP_TIME,
        link=SwapLink(),
        traffic=workload.traffic,
        rates=(case.guess,),
        max_tokens=2048 if case.is_trace else workload.max_output,
        enable_prefix_caching=case.caches_prefixes,
        max_request_len=workload.max_model_len,
    )


def identity(case: Case, trace_dir: str | Path | None) -> dict[str, Any]:
    """All that a run of the case depends on besides the sources: for the key it is kept by."""
    found = {name: value for name, value in asdict(case).items() if name != "guess"}
    if case.is_trace:
        digest = hashlib.sha256(_trace(case, trace_dir).read_bytes())
        found["trace_sha256"] = digest.hexdigest()[:16]
    return found


def _trace(case: Case, trace_dir: str | Path | None) -> Path:
    if trace_dir is None or not (path := Path(trace_dir) / case.source).is_file():
        raise InvalidConfigError("trace_dir", trace_dir, f"a folder with {case.source}")
    return path


def _azure(path: Path, num_requests: int) -> Workload:
    """Azure's requests with the promises of the setting `azure`: code has 1.5 s to the first token,
    conversations 1 s, but for the fifth of them that is batch work.

    A run is a window of the trace at a place drawn by seed, as long as its requests take, with so
    many of them left out, or of shifted copies added, that its own rate is the one asked for. The
    rate of the trace as a whole says little of a window: that of code varies by a factor of four.
    """
    workload = trace_file_workload(path, format_name="arrivals")
    recorded = workload.traffic(workload.rate, 0)
    span_s = recorded[-1].arrival_s

    def traffic(rate: float, seed: int) -> list[Arrival]:
        place = random.Random(f"window {seed}").random()
        length_s = min(num_requests / rate, span_s / 1.1)
        arrivals: list[Arrival] = []
        # Which ones are left out is drawn, and a window may end before its last second.
        while len(arrivals) < num_requests and length_s < span_s:
            length_s = min(span_s, 1.1 * length_s)
            begin_s = place * (span_s - length_s)
            part = window(recorded, begin_s, begin_s + length_s)
            arrivals = trace_traffic(part)(rate, seed)[:num_requests] if part else []
        if "code" in path.name:
            return [replace(arrival, traffic_class=CODE) for arrival in arrivals]
        chats = [replace(arrival, traffic_class=CHAT) for arrival in arrivals]
        return spread_classes(chats, 0.2, BATCH, seed)

    return replace(workload, traffic=traffic)
