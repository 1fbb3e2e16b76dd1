"""Small replicas and workloads for simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.workloads.arrivals import gamma_arrivals, uniform_lengths
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

CHAT = TrafficClass(name="chat", ttft_target_s=1.0, tpot_target_s=0.05)


@pytest.fixture
def small_limits() -> StepLimits:
    """8 rows, 2,048 tokens of KV, 256 tokens a step."""
    return replica_limits(
        kv_tokens=2048, num_rows=8, max_num_batched_tokens=256, max_model_len=1024
    )


@pytest.fixture
def make_scheduler(small_limits: StepLimits) -> Callable[..., Scheduler]:
    """A fresh scheduler over `small_limits`."""

    def make(**arguments: Any) -> Scheduler:
        return Scheduler(arguments.pop("limits", small_limits), **arguments)

    return make


@pytest.fixture
def chats() -> Callable[..., list[Arrival]]:
    """Conversations arriving at random."""

    def make(rate: float = 4.0, duration_s: float = 20.0, seed: int = 1) -> list[Arrival]:
        lengths = uniform_lengths((4, 300), (1, 60))
        return gamma_arrivals(rate, duration_s, lengths, seed=seed, traffic_class=CHAT)

    return make
