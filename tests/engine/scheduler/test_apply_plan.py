"""When a plan is applied makes no difference to what is decided."""

from __future__ import annotations

import random

import pytest


def run(drive, request_of, policy, *, applies):
    """A load with cancels between plan and commit; everything that was planned and came of it."""
    rng = random.Random(7)
    driver = drive(
        {"num_pages": 14, "max_num_seqs": 6, "max_num_batched_tokens": 24, "num_host_pages": 8},
        depth=1,
        policy=policy,
    )
    driver.tick_s = 0.1
    seen = []
    for step in range(120):
        if step < 60:
            prompt = [1, 2, 3, 4] * rng.randint(0, 2) + [rng.randrange(9)] * rng.randint(1, 9)
            targets = {"ttft_target_s": 1e4, "tpot_target_s": 0.3} if rng.random() < 0.5 else {}
            driver.add(
                request_of(str(step), prompt, rng.randint(1, 12), arrival_s=driver.now_s, **targets)
            )
        driver.now_s += driver.tick_s
        plan = driver.plan()
        if applies:
            driver.scheduler.apply_plan()
        if plan is not None:
            decode = plan.decode_rows
            seen.append((decode.slots.tolist(), decode.starts.tolist(), plan.page_updates))
            seen.append([row[1:] for row in plan.prefill_rows])
            seen.append((plan.preempted, plan.copy_outs, plan.copy_ins))
            if rng.random() < 0.1 and len(decode):
                victim = rng.choice(decode.requests)
                if driver.scheduler.cancel(victim.request_id, driver.now_s) is not None:
                    driver.ended(victim)
        if len(driver.in_flight) > 1 or (plan is None and driver.in_flight):
            driver.commit()
        for transfer_id in list(driver.device.transfers):
            driver.end_transfer(transfer_id)
    driver.drain()
    seen.append(driver.scheduler.load())
    return seen, driver.streams, driver.num_ends


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
def test_applying_a_plan_early_or_late_changes_no_decision(drive, request_of, policy):
    early = run(drive, request_of, policy, applies=True)
    late = run(drive, request_of, policy, applies=False)
    assert early == late
    assert early[2]["17"] == 1
    assert early[0][-1].num_preemptions > 0


def test_nobody_is_remembered_for_having_been_in_a_plan(drive, request_of):
    driver = drive({"num_pages": 40}, policy="slo")
    driver.add(request_of("a", [1, 2, 3], 20))
    for _ in range(2):
        driver.turn()
    driver.scheduler.apply_plan()
    snapshot = driver.scheduler._planner._snapshot
    assert not len(snapshot.decoding)
    assert not len(snapshot.prefilling)
    driver.drain()


def test_figures_are_read_without_applying_the_plan(drive, request_of):
    """Any thread may ask for them, while the engine's own applies the plan."""
    driver = drive({"num_pages": 40}, policy="slo")
    for name in "ab":
        driver.add(request_of(name, [1, 2, 3], 20))
    for _ in range(2):  # the prompts, then each page's last place
        driver.turn()
    driver.scheduler.apply_plan()
    driver.add(request_of("c", [4, 5, 6], 20))
    rows = list(driver.scheduler._table.rows)
    held = [list(row.pages.page_ids) for row in rows]
    assert len(driver.plan().page_updates) == 2
    for _ in range(2):
        load = driver.scheduler.load()
        assert (load.num_running, load.num_waiting) == (3, 0)
        assert driver.scheduler.predict_ttft_s(8, driver.now_s) > 0
    assert [row.pages.page_ids for row in rows] == held
    driver.scheduler.apply_plan()
    assert [len(row.pages.page_ids) for row in rows] == [2, 2]
    assert driver.scheduler.load().num_running == 3
    driver.drain()
