"""The oracle's runs: every scheduling policy over every workload under every kind of fault.

A run is small, a hundred requests or more on a replica that is too small for them, so that rows,
pages and step tokens run short. Workloads are drawn with whole numbers alone, times in
milliseconds included: logarithms and exponentials differ in the last bit between C libraries.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo.engine.request import Priority
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.faults import NO_FAULTS, Faults
from octavo.engine.simulation.step_time import LinearCost, TwoRegimeStepTime
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.traffic import PLAIN, Arrival, TrafficClass

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

CHAT = TrafficClass(name="chat", ttft_target_s=0.3, tpot_target_s=0.03)
PATIENT = TrafficClass(name="patient", ttft_target_s=1.0, tpot_target_s=0.1)
BATCH = TrafficClass(name="batch", e2e_target_s=1.5, priority=Priority.LOW)
REASONING = TrafficClass(name="reasoning", ttft_target_s=1.0, tpot_target_s=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, and what of the replica fits them.

    Attributes:
        arrivals: draws the requests, 100 to 300 of them.
        num_pages: usable pages of the pool.
        max_num_steps: most decode iterations in a dispatch.
        max_num_batched_tokens: tokens in a step with prefill.
        run_pages: as in `StepLimits`.
    """

    arrivals: Callable[[random.Random], Iterator[Arrival]]
    num_pages: int = 80
    max_num_steps: int = 1
    max_num_batched_tokens: int = 48
    run_pages: int = 1


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


def _arrival(
    at_ms: int,
    num_input: int,
    num_output: int,
    traffic_class: TrafficClass = PLAIN,
    segments: tuple[Segment, ...] = (),
) -> Arrival:
    return Arrival(
        request_id="",
        arrival_s=at_ms / 1000,
        num_input=num_input,
        num_output=num_output,
        traffic_class=traffic_class,
        segments=segments,
    )


def _chat(rng: random.Random) -> Iterator[Arrival]:
    """Short requests with targets, some more patient, some due at their end."""
    now_ms = 0
    for _ in range(120):
        now_ms += rng.randint(0, 40)
        kind = rng.choice((CHAT, CHAT, PATIENT, BATCH))
        yield _arrival(now_ms, rng.randint(2, 60), rng.randint(1, 20), kind)


def _bursts(rng: random.Random) -> Iterator[Arrival]:
    """Requests without targets, up to 24 of them in a moment; some matter more than others."""
    now_ms = num = 0
    while num < 120:
        count = rng.randint(4, 24)
        for _ in range(count):
            priority = rng.choice((Priority.NORMAL, Priority.NORMAL, Priority.LOW, Priority.HIGH))
            kind = TrafficClass(name="burst", priority=priority)
            yield _arrival(now_ms, rng.randint(1, 50), rng.randint(1, 20), kind)
        num += count
        now_ms += rng.randint(100, 1200)


def _prefixes(rng: random.Random) -> Iterator[Arrival]:
    """Prompts that begin with one of four documents, often several at once; half have targets."""
    now_ms = 0
    for _ in range(120):
        now_ms += rng.choice((0, 0, rng.randint(1, 100)))
        document = Segment(1 + rng.choice((0, 0, 1, 2, 3)), rng.choice((16, 30, 64)))
        kind = rng.choice((PLAIN, PLAIN, CHAT, PATIENT))
        num_input = document.num_tokens + rng.randint(0, 12)
        yield _arrival(now_ms, num_input, rng.randint(1, 16), kind, (document,))


def _long_prompts(rng: random.Random) -> Iterator[Arrival]:
    """Chats beside prompts of several chunks."""
    now_ms = 0
    for _ in range(100):
        now_ms += rng.randint(0, 80)
        if rng.randrange(4) == 0:
            yield _arrival(now_ms, rng.randint(80, 200), rng.randint(1, 8), PATIENT)
        else:
            yield _arrival(
                now_ms, rng.randint(2, 30), rng.randint(1, 20), rng.choice((CHAT, PLAIN))
            )


def _reasoning(rng: random.Random) -> Iterator[Arrival]:
    """Long outputs on few pages: rows are preempted as they grow."""
    now_ms = 0
    for _ in range(100):
        now_ms += rng.randint(0, 120)
        kind = rng.choice((REASONING, REASONING, PATIENT, PLAIN))
        yield _arrival(now_ms, rng.randint(2, 24), rng.randint(16, 50), kind)


def _tenants(rng: random.Random) -> Iterator[Arrival]:
    """A tenant that floods the queue beside two that do not; hardly anybody has targets."""
    now_ms = 0
    for index in range(140):
        now_ms += rng.randint(0, 40)
        tenant = rng.choice(("flood",) * 6 + ("a", "b"))
        has_target = 60 <= index < 80 and tenant != "flood"
        kind = replace(CHAT if has_target else PLAIN, tenant=tenant)
        yield _arrival(now_ms, rng.randint(2, 50), rng.randint(1, 16), kind)


def _priorities(rng: random.Random) -> Iterator[Arrival]:
    """All four classes of priority, with targets and without."""
    now_ms = 0
    for _ in range(120):
        now_ms += rng.randint(0, 50)
        kind = replace(rng.choice((PLAIN, CHAT, BATCH)), priority=rng.choice(list(Priority)))
        yield _arrival(now_ms, rng.randint(2, 50), rng.randint(1, 20), kind)


def _samples(rng: random.Random) -> Iterator[Arrival]:
    """Requests with n from 1 to 4: as many sequences of one prompt, which may share pages."""
    now_ms = num = 0
    while num < 120:
        now_ms += rng.randint(0, 120)
        num_input, kind = rng.randint(4, 60), rng.choice((PLAIN, CHAT, PATIENT))
        prompt = (Segment(1000 + num, num_input),)
        for _ in range(rng.randint(1, 4)):
            yield _arrival(now_ms, num_input, rng.randint(1, 20), kind, prompt)
            num += 1


def _paces(rng: random.Random) -> Iterator[Arrival]:
    """Requests of two priorities and paces that all rows together cannot keep, and batch work."""
    tight = TrafficClass(name="tight", ttft_target_s=0.5, tpot_target_s=0.0118)
    even = TrafficClass(name="even", ttft_target_s=0.5, tpot_target_s=0.014)
    kinds = (tight, even, replace(even, priority=Priority.LOW), PATIENT, BATCH)
    now_ms = 0
    for _ in range(120):
        now_ms += rng.randint(0, 60)
        yield _arrival(now_ms, rng.randint(2, 20), rng.randint(4, 30), rng.choice(kinds))


WORKLOADS = {
    "chat": Workload(arrivals=_chat),
    "bursts": Workload(arrivals=_bursts, max_num_steps=4),
    "prefixes": Workload(arrivals=_prefixes, num_pages=64),
    "long-prompts": Workload(arrivals=_long_prompts, num_pages=96),
    "reasoning": Workload(arrivals=_reasoning, num_pages=56, max_num_steps=4, run_pages=3),
    "tenants": Workload(arrivals=_tenants),
    "priorities": Workload(arrivals=_priorities, num_pages=48),
    "paces": Workload(arrivals=_paces),
    "samples": Workload(arrivals=_samples, num_pages=56, max_num_batched_tokens=96),
}
