"""How many rows decode together so that each keeps its pace, and which are left out of a step."""

from __future__ import annotations

import math

import pytest

from octavo.engine.scheduler.policies.slo.pace import MOST_IDLE_STEPS, PaceModel, idle_rows
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_time_model import StepTimeModel
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.arrivals import gamma_arrivals, superpose
from octavo.engine.simulation.workloads.spec import Extent, generated_workload
from octavo.engine.simulation.workloads.traffic import TrafficClass

TIGHT = TrafficClass(name="tight", ttft_target_s=1.0, tpot_target_s=0.03)
LOOSE = TrafficClass(name="loose", e2e_target_s=600.0)
PLAIN = TrafficClass(name="plain")
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_pages": 257, "page_size": 8,
          "max_prefill_rows": 8, "token_edges": (64,)}  # fmt: skip


def chats(kind, rate, duration_s, seed=0):
    """Prompts of 64 to 512 tokens, outputs of 200 to 600."""

    def lengths(rng):
        return rng.randint(64, 512), rng.randint(200, 600)

    return gamma_arrivals(
        rate, duration_s, lengths, seed=seed, traffic_class=kind, prefix=f"{kind.name}-"
    )


def play(arrivals, policy):
    limits = replica_limits(kv_tokens=200_000)
    return simulate(
        arrivals, Scheduler(limits, policy=policy), NIYAMA_STEP_TIME,
        overlap=False, max_tokens=1024,
    )  # fmt: skip


@pytest.fixture
def decoding(drive, request_of):
    """A scheduler with rows that decode at 10 ms a step and 10 ms a row."""

    def make(*targets):
        model = StepTimeModel((64,), fixed_s=0.01, decode_row_s=0.01, prefill_token_s=1e-6)
        driver = drive(LIMITS, policy="slo", step_time=model, enable_prefix_caching=False)
        for index, target in enumerate(targets):
            driver.add(request_of(str(index), [index + 1] * 4, 40, **target))
        for now_s in (1.0, 1.01):  # prompts, and a step of all rows
            driver.now_s = now_s
            driver.turn()
        driver.scheduler.apply_plan()
        return driver

    return make


def snapshot_of(driver):
    table = driver.scheduler._table
    return table.snapshot(driver.now_s, table.rows.all_decode_rows())


def test_as_many_are_let_in_as_the_shares_of_the_time_allow(decoding):
    """Rows take 10 ms each of a step of 10 ms and more: in 92% of the time, at 97 ms a token, there
    is room for four beside four, and for more beside rows that need a token in twice the time."""
    driver = decoding(*[{"tpot_target_s": 0.1}] * 4)
    assert PaceModel(snapshot_of(driver)).room(0.0, 0.097) == 4
    driver = decoding(*[{"tpot_target_s": 0.2}] * 4)
    assert PaceModel(snapshot_of(driver)).room(0.0, 0.097) == 5


def test_prompts_to_be_computed_are_taken_from_what_rows_have_banked(decoding):
    driver = decoding(*[{"tpot_target_s": 0.1}] * 4)
    model = PaceModel(snapshot_of(driver))
    # 32 iterations at least are left to make up for a prompt: 0.32 s are 10 ms of each.
    assert model.room(0.32 / model._token_s, 0.097) < model.room(0.0, 0.097)


def test_without_a_pace_to_keep_nobody_is_held_back(decoding):
    snapshot = snapshot_of(decoding({}, {}, {}))
    assert PaceModel(snapshot).measure().step_s == math.inf
    assert idle_rows(snapshot) == []


def test_rows_without_a_pace_are_left_out_where_others_would_be_late(decoding):
    driver = decoding({"tpot_target_s": 0.04}, {}, {}, {})
    left_out = idle_rows(snapshot_of(driver))
    assert len(left_out) >= 2
    assert 0 not in left_out
    driver = decoding({"tpot_target_s": 0.06}, {}, {}, {})
    assert idle_rows(snapshot_of(driver)) == []


def test_nobody_is_let_in_while_a_row_that_can_keep_its_pace_would_be_given_up(decoding):
    """Eight rows take 90 ms a step: not all of them have a token every 50 ms, though each could."""
    driver = decoding(*[{"tpot_target_s": 0.05}] * 8)
    model = PaceModel(snapshot_of(driver))
    assert model.measure().step_s < math.inf
    assert model.room(0.0, 0.097) == 0


def test_tight_paces_are_kept_beyond_capacity():
    """Eight requests a second where less than six can be served: whoever is let in is in time."""
    arrivals = chats(TIGHT, 8.0, 60.0)
    slo, fcfs = play(arrivals, "slo"), play(arrivals, "fcfs")
    assert slo.attainment > 0.6
    assert fcfs.attainment < 0.4
    served = [record for record in slo.records if record.is_served]
    late = [record for record in served if not record.is_on_time]
    assert len(late) < 0.05 * len(served)


@pytest.mark.parametrize("seed", [0, 1])
def test_one_agent_too_many_is_not_everybodys_loss(seed):
    """Agents that share 8,192 tokens, at 1.5 times what can be served: rows decode over long
    contexts, and each prompt that is computed beside them takes time from all of their paces."""
    workload = generated_workload(["agents"], Extent(num_requests=300))
    limits = replica_limits(kv_tokens=64_000, max_model_len=32_768)
    report = simulate(
        workload.traffic(5.0, seed), Scheduler(limits, policy="slo", enable_prefix_caching=True),
        NIYAMA_STEP_TIME, max_tokens=workload.max_output,
    )  # fmt: skip
    assert report.attainment > 0.6
    served = [record for record in report.records if record.is_served]
    assert sum(record.is_on_time for record in served) > 0.9 * len(served)


def test_rows_that_can_wait_make_room_for_tight_paces_and_do_not_stand_still():
    arrivals = superpose(chats(TIGHT, 3.0, 40.0), chats(LOOSE, 3.0, 40.0, seed=1),
                         chats(PLAIN, 1.0, 40.0, seed=2))  # fmt: skip
    report = play(arrivals, "slo")
    tight = [record for record in report.records if record.traffic_class is TIGHT]
    assert sum(record.is_on_time for record in tight) > 0.9 * len(tight)
    others = [record for record in report.records if record.traffic_class is not TIGHT]
    assert all(record.is_served for record in others)
    # A step is of 30 ms here, a few hold more prompt tokens.
    stalls = [record.max_stall_s for record in others if not record.num_preemptions]
    assert max(stalls) < 3 * MOST_IDLE_STEPS * 0.03
