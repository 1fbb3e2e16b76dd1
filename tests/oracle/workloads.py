"""The oracle's workloads, drawn with whole numbers alone, times in milliseconds included.

Logarithms and exponentials, which other arrival processes need, differ in the last bit between C
libraries.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo.engine.request import Priority
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.traffic import PLAIN, Arrival, TrafficClass

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
        max_tokens: every request's limit, at which some outputs are cut off: then a row's last
            token is known when it is planned. None: each request's own length.
    """

    arrivals: Callable[[random.Random], Iterator[Arrival]]
    num_pages: int = 80
    max_num_steps: int = 1
    max_num_batched_tokens: int = 48
    run_pages: int = 1
    max_tokens: int | None = 96


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
    "chat": Workload(arrivals=_chat, max_tokens=12),
    "bursts": Workload(arrivals=_bursts, max_num_steps=4, max_tokens=None),
    "prefixes": Workload(arrivals=_prefixes, num_pages=64),
    "long-prompts": Workload(arrivals=_long_prompts, num_pages=96),
    "reasoning": Workload(
        arrivals=_reasoning, num_pages=56, max_num_steps=4, run_pages=3, max_tokens=36
    ),
    "tenants": Workload(arrivals=_tenants),
    "priorities": Workload(arrivals=_priorities, num_pages=48),
    "paces": Workload(arrivals=_paces),
    "samples": Workload(arrivals=_samples, num_pages=56, max_num_batched_tokens=96),
}
