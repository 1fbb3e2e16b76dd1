"""Requests that arrive together and begin alike: one computes for all."""

from __future__ import annotations

import pytest

from octavo.engine.request import RequestStatus
from octavo.engine.scheduler.policies import policy_names
from octavo.engine.scheduler.prefill_planner import MAX_FOLLOWERS
from octavo.engine.scheduler.step_time_model import StepTimeModel

PAGE_SIZE = 4
ROOMY = {
    "max_num_seqs": 8,
    "max_prefill_rows": 8,
    "max_num_batched_tokens": 64,
    "num_pages": 200,
    "token_edges": (64,),
}
PROMPT = [n % 7 + 1 for n in range(32)]


def computed(driver):
    """Prompt tokens that the plans hold."""
    return sum(row.num_tokens for plan in driver.plans for row in plan.prefill_rows)


def rows_of(driver, request):
    return [row for plan in driver.plans for row in plan.prefill_rows if row.request is request]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("policy", policy_names())
def test_equal_prompts_are_computed_once(drive, request_of, policy, depth, chunked):
    driver = drive(ROOMY, policy=policy, depth=depth, enable_chunked_prefill=chunked)
    driver.tick_s = 0.05  # for the policy that waits for a batch
    for index in range(8):
        driver.add(request_of(str(index), PROMPT, 6, ttft_target_s=100.0, tpot_target_s=100.0))
    most_owned = 0
    while driver.scheduler.has_work:
        driver.turn()
        driver.now_s += driver.tick_s
        most_owned = max(most_owned, driver.scheduler.load().num_owned_pages)
    # The others compute their last page, as a prompt's last token is always computed.
    assert computed(driver) == len(PROMPT) + 7 * PAGE_SIZE
    assert most_owned <= 7 + 8 * 3  # the shared pages, and of each its last one and two of output
    driver.check_ends()


@pytest.mark.parametrize("policy", ["static", "dynamic:batch_size=4,timeout_s=0.01"])
def test_a_batch_is_complete_although_one_computes_for_it(drive, request_of, policy):
    driver = drive(ROOMY, policy=policy)
    driver.now_s, driver.tick_s = 1.0, 0.05
    batch = [driver.add(request_of(str(index), PROMPT, 20)) for index in range(4)]
    driver.turn()
    later = driver.add(request_of("later", [9] * 8, 2, arrival_s=1.0))
    driver.turn()
    assert [request.slot is None for request in batch] == [False] * 4
    assert later.slot is None  # the next batch's
    driver.drain()


def test_the_common_beginning_is_computed_once_where_prompts_part(drive, request_of):
    driver = drive(ROOMY)
    first = driver.add(request_of("a", [*PROMPT[:16], 1, 2, 3, 4, 5], 2))
    second = driver.add(request_of("b", [*PROMPT[:16], 9, 8, 7, 6, 5], 2))
    driver.plan()
    assert (first.slot is None, second.slot is None) == (False, True)
    assert second.num_reusable_tokens == 16
    driver.commit()
    driver.plan()
    (row,) = rows_of(driver, second)
    assert (row.start, row.num_tokens) == (16, 5)
    driver.drain()


def test_a_follower_goes_on_where_prompts_part_though_its_leader_is_not_done(drive, request_of):
    driver = drive({**ROOMY, "max_num_batched_tokens": 16, "token_edges": (16,)}, policy="edf")
    leader_prompt = [*PROMPT[:16], *range(100, 140)]
    leader = driver.add(request_of("a", leader_prompt, 2, ttft_target_s=100.0))
    driver.turn()
    follower = driver.add(request_of("b", [*PROMPT[:16], 9], 2, ttft_target_s=50.0))
    driver.turn()
    assert leader.num_computed_tokens < leader.num_prompt_tokens
    assert rows_of(driver, follower)[0].start == 16
    driver.drain()


@pytest.mark.parametrize("how", ["cancel", "preempt", "fail"])
def test_a_follower_takes_over_when_its_leader_is_gone(drive, request_of, how):
    driver = drive({**ROOMY, "max_num_batched_tokens": 8, "token_edges": (8,)})
    leader = driver.add(request_of("a", PROMPT, 2))
    followers = [driver.add(request_of(name, PROMPT, 2)) for name in "bc"]
    driver.turn()
    assert leader.slot is not None
    assert [request.slot for request in followers] == [None, None]
    if how == "cancel":
        driver.cancel("a")
    elif how == "preempt":
        table = driver.scheduler._table
        driver.scheduler._planner.preemption.preempt(table.live.entry(leader), driver.now_s)
    else:
        driver.plan()
        driver.in_flight.clear()
        driver.device.lose_everything()
        driver.scheduler.recover(driver.now_s, ["a"])
    driver.scheduler.check_integrity()
    driver.drain()
    assert {r.status for r in followers} == {RequestStatus.LENGTH}
    redone = 8 if how == "fail" else 0  # the device was lost, and a step with it
    again = redone + (8 if how == "fail" else 0)
    others = 4 if how == "cancel" else 8
    assert computed(driver) == len(PROMPT) + others + again


def test_the_leader_runs_at_its_followers_urgency(drive, request_of):
    driver = drive(
        {**ROOMY, "max_num_batched_tokens": 8, "token_edges": (8,)},
        policy="edf",
    )
    leader = driver.add(request_of("slow", PROMPT, 2, ttft_target_s=1000.0))
    driver.turn()
    other = driver.add(request_of("other", [50 + n for n in range(32)], 2, ttft_target_s=500.0))
    driver.turn()
    assert rows_of(driver, other), "the more urgent goes first"
    follower = driver.add(request_of("urgent", [*PROMPT, 1], 2, ttft_target_s=400.0))
    driver.turn()  # it is passed over
    before = len(rows_of(driver, other))
    while follower.slot is None:
        driver.turn()
    assert len(rows_of(driver, other)) <= before + 1, "the leader came first"
    assert leader.num_computed_tokens >= 32
    driver.drain()


@pytest.mark.parametrize("difference", [{"cache_salt": "s"}, {"tenant": "t"}])
def test_nothing_in_flight_is_shared_across_salts_and_tenants(drive, request_of, difference):
    driver = drive(ROOMY)
    driver.add(request_of("a", PROMPT, 2))
    other = driver.add(request_of("b", PROMPT, 2, **difference))
    assert other.num_reusable_tokens == 0
    driver.plan()
    assert other.slot is not None
    driver.drain()


def test_without_the_cache_nobody_waits(drive, request_of):
    driver = drive(ROOMY, enable_prefix_caching=False)
    requests = [driver.add(request_of(str(index), PROMPT, 2)) for index in range(2)]
    driver.plan()
    assert all(request.slot is not None for request in requests)
    driver.drain()


@pytest.mark.parametrize(("starts_s", "waits"), [(0.06, True), (0.066, False), (0.2, True)])
def test_whom_waiting_would_make_late_computes_by_itself(drive, request_of, starts_s, waits):
    """A millisecond a token and ten a step: alone it takes 33 ms, behind its leader, which has
    24 tokens to go, 25 and a step."""
    model = StepTimeModel((8,), fixed_s=0.01, decode_row_s=0.0, prefill_token_s=1e-3)
    limits = {**ROOMY, "max_num_batched_tokens": 8, "token_edges": (8,)}
    driver = drive(limits, policy="edf", step_time=model)
    driver.add(request_of("leader", PROMPT, 2, ttft_target_s=10.0))
    driver.scheduler.plan(0.0)
    driver.scheduler.apply_plan()
    follower = request_of("follower", [*PROMPT, 1], 2, ttft_target_s=0.1)
    driver.scheduler.add(follower, 0.0)
    table = driver.scheduler._table
    table.forecast._full_step_token = 1e-3
    entry = table.live.entry(follower)
    leader = table.work.leader_to_await(entry, starts_s)
    assert (leader is not None, entry.goes_alone) == (waits, not waits)
    driver.scheduler.check_integrity()


def test_a_pinned_follower_is_not_overtaken_and_its_leader_comes_first(drive, request_of):
    driver = drive(
        {**ROOMY, "max_num_batched_tokens": 8, "token_edges": (8,)}, policy="slo:max_wait_s=1"
    )
    leader = driver.add(request_of("leader", PROMPT, 2))
    driver.turn()
    driver.now_s = 0.5
    follower = driver.add(request_of("follower", [*PROMPT, 1], 2, arrival_s=0.5))
    driver.turn()
    assert follower.slot is None
    driver.now_s = 1.6
    other = driver.add(request_of("other", [9] * 8, 2, arrival_s=1.5, ttft_target_s=0.5))
    driver.turn()
    assert other.slot is None
    while follower.slot is None:
        driver.turn()
        assert other.slot is None or follower.slot is not None
    assert leader.num_computed_tokens >= 32
    driver.drain()


def test_a_plan_passes_over_a_bounded_number_of_followers(drive, request_of):
    driver = drive(ROOMY)
    driver.add(request_of("leader", PROMPT, 2))
    followers = [driver.add(request_of(str(n), [*PROMPT, n], 2)) for n in range(100)]
    driver.plan()
    table = driver.scheduler._table
    assert table.work.num_awaiting == MAX_FOLLOWERS
    driver.drain()
    assert all(request.num_cached_tokens == 32 for request in followers)
