"""What a scheduler tells routers is what its load says, at any moment and under any policy."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.core import EngineCore
from octavo.engine.request import Priority
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.executor import SimulatedExecutor
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.virtual_clock import VirtualClock
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass, make_request

requests = st.tuples(
    st.integers(1, 300), st.integers(1, 40), st.sampled_from(Priority), st.booleans()
)


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(("fcfs", "slo", "auto", "edf")),
    asked=st.lists(requests, min_size=1, max_size=20),
    num_turns=st.integers(0, 30),
)
def test_figures_are_those_of_the_load(policy, asked, num_turns) -> None:
    limits = replica_limits(
        kv_tokens=1024, num_rows=6, max_num_batched_tokens=128, max_model_len=512
    )
    clock = VirtualClock()
    scheduler = Scheduler(limits, policy=policy)
    executor = SimulatedExecutor(limits, clock, NIYAMA_STEP_TIME)
    core = EngineCore(scheduler, executor, clock)
    live = []
    for number, (num_input, num_output, priority, has_pace) in enumerate(asked):
        goals = TrafficClass(
            name="", priority=priority, ttft_target_s=60.0, tpot_target_s=0.5 if has_pace else None
        )
        arrival = Arrival(
            request_id=str(number), arrival_s=0.0, num_input=num_input, num_output=num_output,
            traffic_class=goals,
        )  # fmt: skip
        executor.learn_output(arrival.request_id, number, num_output)
        core.add(request := make_request(arrival, max_tokens=64, number=number))
        live.append(request)
    for _ in range(num_turns):
        core.step()
    scheduler.check_integrity()
    found, load = scheduler.standing(clock.now_s()), scheduler.load(clock.now_s())
    assert (found.num_running, found.num_waiting) == (load.num_running, load.num_waiting)
    assert found.num_rows == 6
    assert found.kv_tokens == load.num_pages * 16
    assert found.free_tokens == (load.num_free_pages + load.num_cached_pages) * 16
    waiting = [r for r in live if r.status.value == "waiting"]
    running = [r for r in live if r.status.value == "running"]
    prompts = sum(max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in running)
    for priority in Priority:
        ahead = sum(r.num_missing_tokens for r in waiting if r.priority <= priority)
        # A token that the step in flight still computed for one that was preempted is not counted.
        late = sum(r.metrics.num_preemptions > 0 for r in waiting if r.priority <= priority)
        assert found.prompt_tokens[priority] >= ahead - late
    assert found.prompt_tokens[Priority.LOW] <= prompts + sum(r.num_tokens for r in live)
    paced = [r for r in running if r.tpot_target_s is not None]
    assert (found.least_pace_s < math.inf) == bool(paced)
    assert math.isclose(found.pace_rate, len(paced) / (0.5 * 0.97), rel_tol=1e-9) or not paced
    for name in ("busy_s", "prompt_token_s", "step_s", "fixed_s", "row_s", "output_tokens"):
        assert math.isfinite(getattr(found, name)), name
        assert getattr(found, name) >= 0, name
