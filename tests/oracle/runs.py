"""The oracle's runs: every scheduling policy over every workload under every kind of fault.

A run is small, a hundred requests or more on a replica that is too small for them, so that rows,
pages and step tokens run short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.faults import NO_FAULTS, Faults
from octavo.engine.simulation.step_time import LinearCost, TwoRegimeStepTime
from octavo.engine.simulation.workloads.traffic import Arrival
from tests.oracle.workloads import WORKLOADS

POLICIES = (
    "auto",
    "static",
    "dynamic",
    "orca",
    "fcfs",
    "fcfs-shed",
    "priority",
    "sjf",
    "mlfq",
    "edf",
    "edf-shed",
    "least-slack",
    "niyama",
    "slo",
)
"""Every policy with its default parameters, under every fault."""

VARIANTS = (
    "dynamic:batch_size=4,timeout_s=0.3",
    "orca:prefill=alone",
    "fcfs-shed:begun=drop",
    "fcfs:token_budget=24",
    "edf-shed:begun=drop,lengths=declared",
    "priority:token_budget=24",
    "niyama:decode=due,floor=16",
    "sjf:lengths=declared",
    "mlfq:quantum=4,promote_s=1",
    "least-slack:lengths=declared",
    "slo:max_wait_s=0.5,late=serve",
)
"""Policies with other parameters, each over half of the workloads under one fault each. `static`
is missing: with a batch size the last requests may wait for ever."""

STEP_TIME = TwoRegimeStepTime(
    LinearCost(base=0.01, token=1e-4, prefill=2e-4, decode=1e-4, decode_context=1e-6,
               prefill_context=2e-6),
    LinearCost(base=0.012, token=2e-4, prefill=3e-4, decode=1e-4, decode_context=1e-6,
               prefill_context=2e-6),
    edge=16,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """What goes wrong in a run.

    Attributes:
        faults: of steps and copies.
        num_host_pages: pages of the host tier; 0 for none.
        leaves: whether clients leave.
    """

    faults: Faults = NO_FAULTS
    num_host_pages: int = 0
    leaves: bool = False


FAULTS = {
    "none": FaultKind(),
    "leaving": FaultKind(leaves=True),
    "transfers": FaultKind(
        faults=Faults(
            failed_transfer_share=0.2, stuck_transfer_share=0.1, stuck_transfer_s=0.5,
            slow_step_share=0.05,
        ),
        num_host_pages=48,
    ),
    # After a failed step the requests that were in it are tried apart, and all others are held.
    "recovery": FaultKind(
        faults=Faults(failed_step_share=0.02, hung_step_share=0.005, hung_step_s=1.0),
        num_host_pages=16,
        leaves=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation of the oracle.

    Attributes:
        policy: as `get_policy` reads it.
        workload, faults: names of a `Workload` and of a `FaultKind`.
        is_quick: whether the test suite plays it; `make oracle` plays all.
    """

    policy: str
    workload: str
    faults: str
    is_quick: bool

    @property
    def name(self) -> str:
        return f"{self.policy} / {self.workload} / {self.faults}"

    @property
    def limits(self) -> StepLimits:
        workload = WORKLOADS[self.workload]
        budget = workload.max_num_batched_tokens
        return StepLimits(
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            max_num_steps=workload.max_num_steps,
            max_prefill_rows=6,
            max_pages_per_seq=64,
            page_size=4,
            num_pages=1 + workload.num_pages,
            max_model_len=256,
            token_edges=tuple(sorted({8, 16, 32, budget})),
            num_host_pages=FAULTS[self.faults].num_host_pages,
            run_pages=workload.run_pages,
        )

    @property
    def link(self) -> SwapLink:
        return SwapLink(bytes_per_page=1 << 20, bytes_per_s=1e9)

    def arrivals(self) -> list[Arrival]:
        """Its requests, in order of arrival; the same for all policies."""
        rng = random.Random(f"oracle {self.workload}")
        arrivals = list(WORKLOADS[self.workload].arrivals(rng))
        arrivals = [replace(one, request_id=str(index)) for index, one in enumerate(arrivals)]
        return _leaving(arrivals, self.workload) if FAULTS[self.faults].leaves else arrivals


def all_runs() -> list[Run]:
    """Every run, in the order of the recorded file.

    The quick ones have each pair of a policy and a workload, of a policy and a fault, and of a
    workload and a fault.
    """
    runs = []
    for index, policy in enumerate((*POLICIES, *VARIANTS)):
        for turn, workload in enumerate(WORKLOADS):
            if policy in VARIANTS and (index + turn // 4) % 2:
                continue
            for place, faults in enumerate(FAULTS):
                is_quick = (index + turn) % len(FAULTS) == place
                if is_quick or policy in POLICIES:
                    run = Run(policy=policy, workload=workload, faults=faults, is_quick=is_quick)
                    runs.append(run)
    return runs


def _leaving(arrivals: list[Arrival], workload: str) -> list[Arrival]:
    """A fifth of the clients leave: at once, or up to two seconds after they came."""
    rng = random.Random(f"oracle leaving {workload}")
    return [
        replace(arrival, cancel_s=arrival.arrival_s + rng.choice((0, rng.randint(1, 2000))) / 1000)
        if rng.randrange(5) == 0
        else arrival
        for arrival in arrivals
    ]
