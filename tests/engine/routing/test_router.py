"""A router's memory: late reports, requests that were sent since, replicas that are lost."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import Priority
from octavo.engine.routing.policies import get_route_policy
from octavo.engine.routing.report import ReplicaReport
from octavo.engine.routing.request import Route, RouteRefusal, RouteRequest
from octavo.engine.routing.router import Router
from octavo.engine.scheduler.standing import UNKNOWN


def router_of(num_replicas: int = 2, **arguments: object) -> Router:
    return Router(num_replicas, get_route_policy("forecast"), **arguments)  # type: ignore[arg-type]


def send(router: Router, name: str, now_s: float, **fields: object) -> int:
    request = RouteRequest(
        request_id=name, num_prompt_tokens=100, max_tokens=10, arrival_s=now_s, **fields
    )  # type: ignore[arg-type]
    choice = router.route(request, now_s)
    assert isinstance(choice, Route)
    return choice.replica


def report(at: int, sequence: int, taken_s: float, life: int = 0, **figures: object):
    standing = UNKNOWN._replace(num_rows=8, kv_tokens=640, **figures)
    return ReplicaReport(at, life, sequence, taken_s, standing)


def test_what_was_sent_counts_until_a_report_tells_of_it() -> None:
    router = router_of(1)
    send(router, "a", 1.0, priority=Priority.LOW)
    send(router, "b", 2.0, tpot_target_s=0.05)
    assert router.view.sent_requests[0] == 2
    assert router.view.sent_tokens[:, 0].tolist() == [0, 0, 100, 200]
    router.report(report(0, 0, 1.5, num_running=1))
    assert router.view.sent_requests[0] == 1
    assert router.view.num_live[0] == 2
    assert router.view.sent_rate[0] == 20
    router.report(report(0, 1, 2.0, num_running=2))
    assert router.view.num_live[0] == 2
    assert router.view.sent_rate[0] == 0
    assert router.view.sent_least_pace_s[0] == float("inf")


def test_a_report_that_was_overtaken_is_not_heard() -> None:
    router = router_of(1)
    router.report(report(0, 4, 4.0, num_running=4))
    router.report(report(0, 3, 3.0, num_running=3))
    assert router.view.num_running[0] == 4


def test_nor_is_one_of_an_earlier_life() -> None:
    router = router_of(1)
    router.report(report(0, 4, 4.0, num_running=4))
    router.lost(0, 1)
    router.report(report(0, 5, 5.0, num_running=5))
    assert router.view.num_live[0] == 0
    router.started(0, 1, 6.0)
    router.report(report(0, 0, 6.5, life=1, num_running=1))
    assert router.view.num_live[0] == 1


def test_nobody_is_sent_to_a_lost_replica_and_none_left_is_said_so() -> None:
    router = router_of(2)
    router.lost(0, 1)
    assert [send(router, str(n), 0.0) for n in range(4)] == [1] * 4
    router.lost(1, 1)
    choice = router.route(RouteRequest(request_id="x", num_prompt_tokens=1, max_tokens=1), 0.0)
    assert isinstance(choice, RouteRefusal)
    assert choice.retry_after_s > 0


def test_a_silent_replica_is_left_alone_unless_all_are_silent() -> None:
    router = router_of(2, quiet_s=1.0)
    router.report(report(0, 0, 0.0))
    router.report(report(1, 0, 5.0, num_running=8, num_waiting=9))
    assert send(router, "a", 5.5) == 1
    assert send(router, "b", 50.0) == 0


def test_others_prompts_are_known_from_reports() -> None:
    router = router_of(2)
    router.report(report(0, 0, 0.0))
    router.report(report(1, 0, 0.0)._replace(prefixes=((7, 8),)))
    request = RouteRequest(request_id="x", num_prompt_tokens=200, max_tokens=1, chunks=(7, 8, 9))
    choice = router.route(request, 0.0)
    assert isinstance(choice, Route)
    assert (choice.replica, choice.num_cached_tokens) == (1, 128)


def test_no_more_prefixes_are_believed_in_than_a_cache_has_room_for() -> None:
    router = router_of(1)
    router.report(report(0, 0, 0.0))  # ten chunks
    send(router, "a", 0.0, chunks=tuple(range(8)))
    send(router, "b", 0.0, chunks=tuple(range(100, 106)))
    assert router.prefixes.num_known(range(8)).tolist() == [4]
    assert router.prefixes.num_known(range(100, 106)).tolist() == [6]


@given(
    st.lists(
        st.tuples(st.sampled_from(("send", "end", "report", "lose")), st.integers(0, 9)),
        max_size=80,
    )
)
def test_counts_are_those_of_what_is_under_way(events) -> None:
    """Whatever comes, ends, is reported and lost, in any order: nothing is left over."""
    router, live, now_s = router_of(3), {}, 0.0
    lives = [0, 0, 0]
    for number, (what, which) in enumerate(events):
        now_s += 1.0
        at = which % 3
        if what == "send":
            live[str(number)] = send(router, str(number), now_s)
        elif what == "end" and live:
            name = sorted(live)[which % len(live)]
            router.ended(name, which)
            del live[name]
        elif what == "report":
            running = list(live.values()).count(at)
            router.report(report(at, number, now_s, lives[at], num_running=running))
        elif what == "lose":
            lives[at] += 1
            router.lost(at, lives[at])
            for name in [name for name, where in live.items() if where == at]:
                router.ended(name)
                del live[name]
            router.started(at, lives[at], now_s)
    own = router.view.own_requests.tolist()
    assert own == [list(live.values()).count(at) for at in range(3)]
    assert [work > 0 for work in router.view.own_work] == [count > 0 for count in own]
    for name in list(live):
        router.ended(name)
    for column in ("own_work", "own_requests", "sent_requests", "sent_output", "sent_kv"):
        assert not getattr(router.view, column).any(), column


def test_nobody_is_refused_by_guesses_of_replicas_that_have_not_reported() -> None:
    router = Router(2, get_route_policy("forecast"))
    hasty = RouteRequest(
        request_id="a", num_prompt_tokens=5000, max_tokens=8, ttft_target_s=0.05, tpot_target_s=0.01
    )
    assert isinstance(router.route(hasty, 0.0), Route)
    # Once both have said that a prompt of this length takes half a second, it is.
    for number in range(2):
        router.report(report(number, 1, 0.1, prompt_token_s=1e-4))
    later = dataclasses.replace(hasty, request_id="b", arrival_s=0.2)
    assert isinstance(router.route(later, 0.2), RouteRefusal)
