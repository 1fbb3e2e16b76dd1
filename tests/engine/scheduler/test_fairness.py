"""Nobody waits for ever, no class goes without, no tenant takes all."""

from __future__ import annotations

import pytest

from octavo.engine.request import Priority
from octavo.engine.scheduler.fairness import ClassQuotas
from octavo.engine.scheduler.step_time_model import StepTimeModel

STEP_S = 0.05


def constant_machine(token_edges=(16,)):
    return StepTimeModel(token_edges, fixed_s=STEP_S, decode_row_s=0.0, prefill_token_s=0.0)


def test_a_class_below_its_quota_is_named_the_furthest_first():
    quotas = ClassQuotas((0.3, 0.2, 0.1, 0.1))
    assert quotas.below_quota() == []
    quotas.serve([(Priority.NORMAL, 60_000), (Priority.HIGH, 6_000)])
    assert quotas.below_quota() == [Priority.REALTIME, Priority.HIGH, Priority.LOW]
    assert quotas.below_quota([Priority.LOW, Priority.HIGH]) == [Priority.HIGH, Priority.LOW]
    quotas.serve([(Priority.LOW, 30_000)])
    assert Priority.LOW not in quotas.below_quota()


@pytest.mark.parametrize("priority", Priority)
def test_the_longest_wait_is_bounded_whatever_keeps_arriving(drive, request_of, priority):
    """One request nobody was promised anything about, against urgent ones that fill the machine."""
    driver = drive(
        {"max_num_seqs": 2, "num_pages": 9},
        policy="slo:max_wait_s=3,late=serve",
        step_time=constant_machine(),
        enable_prefix_caching=False,
    )
    number = 0

    def urgent():
        nonlocal number
        number += 1
        driver.add(
            request_of(
                str(number),
                [number % 20] * 4,
                8,
                arrival_s=driver.now_s,
                e2e_target_s=2.0,
                priority=Priority.REALTIME,
            )
        )

    for _ in range(4):
        urgent()
    driver.turn()
    plain = driver.add(request_of("plain", [1] * 8, 8, arrival_s=driver.now_s, priority=priority))
    for _ in range(400):
        driver.now_s += STEP_S
        while driver.scheduler.num_waiting < 4:
            urgent()
        driver.turn()
        if plain.metrics.first_scheduled_s is not None:
            break
    assert plain.metrics.first_scheduled_s is not None
    assert plain.metrics.first_scheduled_s - plain.arrival_s <= 3 + 2 * STEP_S
    while not plain.status.is_finished:  # and it is nobody's victim then
        driver.now_s += STEP_S
        urgent()
        driver.turn()
    assert plain.metrics.num_preemptions == 0


def test_the_overdue_are_served_in_the_order_of_their_wait(drive, request_of):
    driver = drive({"max_num_seqs": 1}, policy="slo:max_wait_s=1", enable_prefix_caching=False)
    driver.add(request_of("running", 4, 30, arrival_s=0.0))
    driver.turn()
    for index, length in enumerate((40, 4, 20)):
        driver.add(request_of(f"w{index}", [index] * length, 2, arrival_s=float(index)))
    driver.now_s = 10.0
    driver.drain()
    first = [r.metrics.first_scheduled_s for r in driver.requests[1:]]
    order = [row.request.request_id for p in driver.plans for row in p.prefill_rows if row.is_new]
    assert None not in first
    assert [name for name in order if name.startswith("w")] == ["w0", "w1", "w2"]


def test_a_class_with_too_few_pages_gets_what_comes_free_before_anybody_else(drive, request_of):
    """Small urgent requests would take each page as it comes free from one that needs several."""
    driver = drive(
        {"num_pages": 33, "max_num_seqs": 16, "max_num_batched_tokens": 16},
        policy="slo:late=serve",
        step_time=constant_machine(),
        enable_prefix_caching=False,
    )

    def urgent(number):
        driver.add(
            request_of(f"u{number}", [number % 20] * 8, 8, arrival_s=driver.now_s,
                       ttft_target_s=1.0, priority=Priority.HIGH)
        )  # fmt: skip

    for number in range(12):
        urgent(number)
    for _ in range(4):
        driver.turn()
    plain = driver.add(request_of("low", [21] * 24, 4, arrival_s=driver.now_s,
                                  priority=Priority.LOW))  # fmt: skip
    for number in range(12, 40):
        driver.now_s += STEP_S
        urgent(number)
        driver.turn()
        if plain.metrics.first_scheduled_s is not None:
            break
    waited_s = plain.metrics.first_scheduled_s - plain.arrival_s
    assert waited_s < 20 * STEP_S
    driver.drain()


def test_the_last_who_waits_may_be_taken_for_its_classs_quota(drive, request_of):
    """Other classes are below their quota, too, and have nobody who waits."""
    driver = drive(policy="slo:late=serve", step_time=constant_machine())
    driver.scheduler._table.quotas.serve([(Priority.NORMAL, 60_000)])
    alone = driver.add(
        request_of("a", [1] * 8, 4, ttft_target_s=1.0, arrival_s=driver.now_s,
                   priority=Priority.REALTIME)
    )  # fmt: skip
    assert len(driver.scheduler._table.quotas.below_quota()) > 1
    driver.drain()
    assert len(alone.output_token_ids) == 4


def test_waits_that_are_over_are_forgotten_long_before_their_bound(drive, request_of):
    driver = drive(
        {"max_num_seqs": 2, "num_pages": 9},
        policy="slo:max_wait_s=1e6",
        step_time=constant_machine(),
        enable_prefix_caching=False,
    )
    waits = driver.scheduler._table.places.max_wait
    for number in range(600):
        driver.add(request_of(str(number), [number % 20] * 4, 1, arrival_s=driver.now_s))
        driver.drain()
        assert len(waits) <= 65
