"""Runs of the matrix: made in processes, kept by what they depend on, and never made twice."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.goodput_matrix.workloads import Case, identity, setting_of
from octavo.engine.simulation.goodput import Candidate, run_once
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.settings import Setting
from octavo.engine.simulation.simulate import SimulationReport
from octavo.engine.simulation.work_bound import work_bound

ROOT = Path(__file__).resolve().parents[2]

SOURCES = (
    "engine/clock.py",
    "engine/core.py",
    "engine/errors.py",
    "engine/executor.py",
    "engine/request.py",
    "engine/sampling_params.py",
    "engine/faults/*.py",
    "engine/kv/**/*.py",
    "engine/scheduler/**/*.py",
    "engine/simulation/**/*.py",
    "benchmarks/goodput_matrix/runs.py",
    "benchmarks/goodput_matrix/workloads.py",
)
"""What a run's figures come from."""

OWN_SOURCES = tuple(
    f"engine/scheduler/policies/slo/{name}.py"
    for name in ("__init__", "admission", "pace", "slo_policy", "victims")
)
"""Those of them that no figures of other policies come from: what is changed most often changes
nothing for eight runs of nine."""

QUARTILES = ("shortest", "short", "long", "longest")
"""Of prompt lengths, in order."""

BOUND = "bound"
"""In place of a policy: the bound on attainment that no scheduler exceeds."""


class OutOfTimeError(Exception):
    """The time that the command was given is over; what was run is kept."""


def source_hash(policy: str, root: Path = ROOT) -> str:
    """Digest of the sources that a policy's figures come from; changes with any of them."""
    digest = hashlib.sha256()
    is_own = policy.partition(":")[0] in ("slo", "auto")
    left_out = () if is_own else {root / name for name in OWN_SOURCES}
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern)} - {*left_out}):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        case: workload and replica; its number of requests is the run's.
        policy: name with parameters, or `BOUND`.
        token_budget: tokens of a step; None for the replica's.
        rate: requests a second.
        seed: of the traffic.
    """

    case: Case
    policy: str
    token_budget: int | None = None
    rate: float
    seed: int


def figures(run: Run, trace_dir: str | None) -> dict[str, Any]:
    """A run's figures, made now. Fit for JSON.

    Returns:
        `num_requests` with targets, the share of them on time (`attainment`), and the same by
        quartile of prompt length, by tenant and by class as [count, attainment].
    """
    begun_s = time.process_time()
    setting = _setting(run.case, trace_dir)
    if run.policy == BOUND:
        bound = work_bound(
            setting.traffic(run.rate, run.seed), setting.step_time, setting.limits,
            max_tokens=setting.max_tokens, shares_prefixes=setting.enable_prefix_caching,
        )  # fmt: skip
        return {"attainment": bound, "run_s": time.process_time() - begun_s}
    candidate = Candidate(policy=run.policy, token_budget=run.token_budget)
    found = report_figures(run_once(setting, candidate, run.rate, run.seed))
    return {**found, "run_s": time.process_time() - begun_s}


@functools.lru_cache(maxsize=4)
def _setting(case: Case, trace_dir: str | None) -> Setting:
    """Traces are read once a process."""
    return setting_of(case, trace_dir)


def report_figures(report: SimulationReport) -> dict[str, Any]:
    """What the matrix keeps of a report."""
    records = [record for record in report.records if has_target(record)]
    edges = np.percentile([record.num_input for record in records], (25, 50, 75))

    def quartile(record: RequestRecord) -> str:
        # A length that many share belongs to one quartile: those above an edge come after it.
        return QUARTILES[int(np.searchsorted(edges, record.num_input, side="left"))]

    return {
        "num_requests": len(records),
        "attainment": sum(record.is_on_time for record in records) / len(records),
        "quartiles": _shares(records, quartile),
        "tenants": _shares(records, lambda record: record.traffic_class.tenant),
        "classes": _shares(records, lambda record: record.traffic_class.name),
        "duration_s": report.duration_s,
    }


def has_target(record: RequestRecord) -> bool:
    """Whether the request was promised anything."""
    goals = record.traffic_class
    targets = (goals.ttft_target_s, goals.tpot_target_s, goals.e2e_target_s)
    return any(target is not None for target in targets)


def _shares(
    records: Sequence[RequestRecord], group: Callable[[RequestRecord], str]
) -> dict[str, list[float]]:
    counts: dict[str, list[int]] = {}
    for record in records:
        count = counts.setdefault(group(record), [0, 0])
        count[0] += 1
        count[1] += record.is_on_time
    return {name: [n, on_time / n] for name, (n, on_time) in sorted(counts.items())}


class RunStore:
    """Figures of runs by what they depend on. Those that a file holds are not made again.

    Args:
        path: the file, JSON lines; None keeps nothing.
        trace_dir: folder of the traces.
        workers: processes; 0 makes runs in this one.
        deadline_s: of `time.monotonic`; after it no run is begun. None: no such time.
        make: makes a run's figures.
        sources: gives a policy's digest of the sources; runs that were kept under another are not
            used.

    Attributes:
        num_made, num_kept: runs that were made now, and that the file held.
        made_s: processor seconds of those that were made.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        trace_dir: str | None = None,
        workers: int = 0,
        deadline_s: float | None = None,
        make: Callable[[Run, str | None], dict[str, Any]] = figures,
        sources: Callable[[str], str] = source_hash,
    ) -> None:
        self._path = path
        self._trace_dir = trace_dir
        self._make = make
        self._deadline_s = deadline_s
        self._sources = functools.cache(sources)
        self._kept: dict[str, dict[str, Any]] = {}
        self._identities: dict[Case, dict[str, Any]] = {}
        self.num_made = self.num_kept = 0
        self.made_s = 0.0
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                kept = json.loads(line)
                self._kept[kept["key"]] = kept["figures"]
        self._num_workers = workers
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=context) if workers else None

    def key(self, run: Run) -> str:
        """All that the run's figures depend on."""
        if run.case not in self._identities:
            self._identities[run.case] = identity(run.case, self._trace_dir)
        parts = {
            **{name: value for name, value in asdict(run).items() if name != "case"},
            "case": self._identities[run.case],
            "sources": self._sources(run.policy),
        }
        return json.dumps(parts, sort_keys=True)

    def get(self, runs: Iterable[Run]) -> list[dict[str, Any]]:
        """Figures of the runs, in their order; those that are not kept are made, side by side.

        Raises:
            OutOfTimeError: the time is over and a run would have to be made.
        """
        runs = [replace(run, rate=round(run.rate, 6)) for run in runs]
        keys = [self.key(run) for run in runs]
        missing = {key: run for key, run in zip(keys, runs, strict=True) if key not in self._kept}
        self.num_kept += len(runs) - len(missing)
        if self._pool is None:
            for key, run in missing.items():
                self._check_time()
                self._keep(key, self._make(run, self._trace_dir))
        else:
            self._make_in_pool(self._pool, missing)
        return [self._kept[key] for key in keys]

    def _make_in_pool(self, pool: ProcessPoolExecutor, missing: dict[str, Run]) -> None:
        """No more are handed to the pool than run, so that none is begun when time is over."""
        left = list(missing.items())[::-1]
        begun: dict[Future[dict[str, Any]], str] = {}
        out_of_time: OutOfTimeError | None = None
        while left or begun:
            while left and len(begun) < self._num_workers and out_of_time is None:
                try:
                    self._check_time()
                except OutOfTimeError as error:
                    out_of_time, left = error, []
                    break
                key, run = left.pop()
                begun[pool.submit(self._make, run, self._trace_dir)] = key
            if not begun:
                break
            done, _ = wait(begun, return_when="FIRST_COMPLETED")
            for future in done:
                self._keep(begun.pop(future), future.result())
        if out_of_time is not None:
            raise out_of_time

    def _check_time(self) -> None:
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise OutOfTimeError

    def _keep(self, key: str, found: dict[str, Any]) -> None:
        self._kept[key] = found
        self.num_made += 1
        self.made_s += found.get("run_s", 0.0)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "figures": found}) + "\n")

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
