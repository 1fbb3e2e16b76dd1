"""The figures that metrics and benchmarks read."""

from __future__ import annotations

import pytest


def test_figures_follow_a_request(drive, request_of):
    driver = drive({"max_num_seqs": 1}, num_decode_steps=4)
    driver.add(request_of("a", 6, 6))
    driver.add(request_of("b", 4, 1, arrival_s=1.0))
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (0, 2)
    driver.turn()
    load = driver.scheduler.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert (load.num_pages, load.num_owned_pages) == (64, 2)
    assert load.kv_usage == pytest.approx(2 / 64)
    assert load.kv_waste == pytest.approx(2 / 8)  # 6 of 8 places are written
    assert load.num_planned_prefill_tokens == 6
    driver.drain()
    load = driver.scheduler.load()
    assert load.num_planned_prefill_tokens == 10
    assert load.num_planned_decode_tokens == 5
    assert load.num_steps == len(driver.plans)
    assert load.num_finished == 2
    assert (load.num_running, load.num_waiting, load.num_owned_pages) == (0, 0, 0)
    assert load.kv_waste == 0.0


def test_cached_pages_are_not_in_use(drive, request_of):
    driver = drive()
    driver.add(request_of("a", 8))
    driver.drain()
    load = driver.scheduler.load()
    assert load.num_cached_pages == 2
    assert load.kv_usage == 0.0


def test_a_step_on_its_way_is_unfinished_though_its_request_has_ended(drive, request_of):
    driver = drive(depth=1)
    driver.add(request_of("a"))
    driver.plan()
    driver.cancel("a")
    assert driver.scheduler.has_work
    driver.drain()
    assert not driver.scheduler.has_work
