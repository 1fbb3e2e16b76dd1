"""Each routing policy chooses as it says, and is a pure function."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.routing.policies import POLICIES, get_route_policy
from octavo.engine.routing.report import NUM_CLASSES, ReplicaReport
from octavo.engine.routing.request import Route, RouteRefusal, RouteRequest
from octavo.engine.routing.router import Router
from octavo.engine.scheduler.standing import UNKNOWN


def request(name: str = "r", num_prompt: int = 1000, **fields: object) -> RouteRequest:
    return RouteRequest(request_id=name, num_prompt_tokens=num_prompt, max_tokens=100, **fields)  # type: ignore[arg-type]


def report(replica: int, sequence: int = 0, taken_s: float = 0.0, **figures: object):
    known = {"num_rows": 64, "kv_tokens": 64_000, "free_tokens": 64_000, **figures}
    standing = UNKNOWN._replace(**known)
    return ReplicaReport(replica, 0, sequence, taken_s, standing)


def replica_of(choice: Route | RouteRefusal) -> int:
    assert isinstance(choice, Route)
    return choice.replica


def test_round_robin_takes_turns_among_those_that_can() -> None:
    router = Router(4, get_route_policy("round_robin"))
    router.drain(2)
    chosen = [replica_of(router.route(request(str(n)), 0.0)) for n in range(6)]
    assert chosen == [0, 1, 3, 0, 1, 3]


def test_power_of_two_never_takes_the_fuller_of_two() -> None:
    router = Router(2, get_route_policy("power_of_two"))
    router.report(report(0, num_running=10))
    router.report(report(1, num_running=2))
    assert {replica_of(router.route(request(str(n)), 0.0)) for n in range(8)} == {1}


def test_power_of_two_spreads_over_all() -> None:
    router = Router(8, get_route_policy("power_of_two"))
    chosen = [replica_of(router.route(request(str(n)), 0.0)) for n in range(80)]
    assert max(chosen.count(at) for at in range(8)) <= 14
    assert min(chosen.count(at) for at in range(8)) >= 6


def test_sessions_stay_and_only_those_of_a_lost_replica_move() -> None:
    router = Router(8, get_route_policy("session_affinity"))

    def places(turn: str) -> list[int]:
        return [
            replica_of(router.route(request(f"{n}.{turn}", session=str(n)), 0.0))
            for n in range(100)
        ]

    first, second = places("a"), places("b")
    assert first == second
    assert len(set(first)) == 8
    router.lost(3, 1)
    third = places("c")
    assert all(now == before for now, before in zip(third, first, strict=True) if before != 3)
    assert 3 not in third


CHUNKS = tuple(range(15))


def test_prefix_affinity_follows_the_prefix_until_loads_are_uneven() -> None:
    router = Router(2, get_route_policy("prefix_affinity:most_gap=5"))
    chosen = [replica_of(router.route(request(str(n), chunks=CHUNKS), 0.0)) for n in range(9)]
    assert chosen[:6] == [0] * 6
    assert chosen[6:] == [1, 1, 1]  # both hold it now


def test_forecast_takes_the_replica_that_has_the_prefix() -> None:
    router = Router(4, get_route_policy("forecast"))
    for at in range(4):
        router.report(report(at))
    first = replica_of(router.route(request("a", chunks=CHUNKS, ttft_target_s=1.0), 0.0))
    router.ended("a", 10)
    choice = router.route(request("b", chunks=CHUNKS, ttft_target_s=1.0), 0.0)
    assert replica_of(choice) == first
    assert isinstance(choice, Route)
    assert choice.num_cached_tokens == 15 * 64
    assert choice.is_in_time


def test_forecast_leaves_a_prefix_that_it_would_wait_for_too_long() -> None:
    router = Router(2, get_route_policy("forecast"))
    router.report(report(0))
    router.report(report(1))
    held = replica_of(router.route(request("a", chunks=CHUNKS, ttft_target_s=1.0), 0.0))
    busy = (40_000,) * NUM_CLASSES
    router.report(report(held, 1, 0.1, prompt_tokens=busy))
    choice = router.route(request("b", chunks=CHUNKS, ttft_target_s=1.0), 0.1)
    assert replica_of(choice) == 1 - held


def test_forecast_keeps_a_hasty_request_from_where_all_have_time() -> None:
    """Its pace would make every step of theirs small."""
    router = Router(2, get_route_policy("forecast"))
    router.report(report(0, num_running=20, pace_rate=20 / 0.06, least_pace_s=0.06))
    router.report(report(1, num_running=20, pace_rate=20 / 0.03, least_pace_s=0.03))
    hasty = request(ttft_target_s=1.0, tpot_target_s=0.03)
    assert replica_of(router.route(hasty, 0.0)) == 1


def test_forecast_prefers_the_faster_machine_and_then_shares() -> None:
    router = Router(2, get_route_policy("forecast"))
    router.report(report(0, prompt_token_s=2e-4))
    router.report(report(1, prompt_token_s=1e-4))
    chosen = [replica_of(router.route(request(str(n), ttft_target_s=1.0), 0.0)) for n in range(10)]
    assert chosen[0] == 1
    assert 0 < chosen.count(0) < chosen.count(1)


@pytest.mark.parametrize(
    "text", ["", "best", "round_robin:x=1", "forecast:margin=two", "forecast:margin=-1",
             "forecast:margin=1,margin=1", "prefix_affinity:most_gap=nan"],
)  # fmt: skip
def test_an_unknown_policy_or_parameter_is_named(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="router"):
        get_route_policy(text)


figures = st.fixed_dictionaries(
    {
        "num_running": st.integers(0, 64),
        "num_waiting": st.integers(0, 500),
        "free_tokens": st.integers(0, 64_000),
        "prompt_tokens": st.integers(0, 10**6).map(lambda n: (n,) * NUM_CLASSES),
        "output_tokens": st.floats(0, 1e5),
        "busy_s": st.floats(0, 1),
        "prompt_token_s": st.floats(1e-6, 1e-2),
        "step_s": st.floats(1e-4, 1),
        "fixed_s": st.floats(1e-9, 1),
        "row_s": st.floats(0, 1e-2),
        "pace_rate": st.floats(0, 1e4),
        "least_pace_s": st.one_of(st.just(float("inf")), st.floats(1e-3, 10)),
    }
)
targets = st.one_of(st.none(), st.floats(1e-3, 1e3))


@given(
    name=st.sampled_from(sorted(POLICIES)),
    replicas=st.lists(figures, min_size=1, max_size=5),
    asked=st.tuples(st.integers(1, 40_000), targets, targets, targets, st.sampled_from(Priority)),
    chunks=st.lists(st.integers(0, 5), max_size=6),
    gone=st.sets(st.integers(0, 4)),
    age_s=st.floats(0, 100),
    tried=st.frozensets(st.integers(0, 4), max_size=2),
)
def test_whatever_is_reported_someone_who_can_takes_it_and_the_answer_repeats(
    name, replicas, asked, chunks, gone, age_s, tried
) -> None:
    router = Router(len(replicas), get_route_policy(name))
    for at, found in enumerate(replicas):
        router.report(report(at, **found))
    for at in gone & set(range(len(replicas))):
        router.lost(at, 1)
    num_prompt, ttft_s, tpot_s, e2e_s, priority = asked
    wanted = request(
        num_prompt=num_prompt, ttft_target_s=ttft_s, tpot_target_s=tpot_s, e2e_target_s=e2e_s,
        priority=priority, chunks=tuple(chunks), tried=tried & set(range(len(replicas))),
    )  # fmt: skip
    before = copy.deepcopy(router)
    choice = router.route(wanted, age_s)
    assert before.route(wanted, age_s) == choice
    able = set(range(len(replicas))) - gone - wanted.tried
    if isinstance(choice, RouteRefusal):
        assert choice.retry_after_s > 0
        assert np.isfinite(choice.retry_after_s)
        assert not able or name == "forecast"
    else:
        assert choice.replica in able
        assert choice.num_cached_tokens >= 0


@given(name=st.sampled_from(sorted(POLICIES)), at=st.integers(0, 3))
def test_policies_change_nothing_that_they_see(name: str, at: int) -> None:
    router = Router(4, get_route_policy(name))
    router.report(report(at, num_running=3))
    router.route(request("first"), 0.0)
    view = router.view
    before = copy.deepcopy(view)
    get_route_policy(name)(view, request("second"), 1.0)
    for column in view.__slots__:
        np.testing.assert_array_equal(getattr(view, column), getattr(before, column))
