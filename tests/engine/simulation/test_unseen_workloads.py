"""Workloads that nothing was tuned for, on which `slo` once lost what others served."""

from __future__ import annotations

import random
from collections.abc import Callable

from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.goodput import Candidate, run_once
from octavo.engine.simulation.settings import Setting, replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.arrivals import Traffic
from octavo.engine.simulation.workloads.spec import Extent, generated_workload
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

_SOON = TrafficClass(name="soon", e2e_target_s=5.0)
_LATER = TrafficClass(name="later", e2e_target_s=20.0)
_BATCH = TrafficClass(name="batch", e2e_target_s=90.0)


_CHAT = TrafficClass(name="chat", ttft_target_s=1.0, tpot_target_s=0.05)
_CALM_CHAT = TrafficClass(name="calm chat", ttft_target_s=15.0, tpot_target_s=0.05)
_FIRST = TrafficClass(name="first tokens", ttft_target_s=2.0)
_BY_THEN = TrafficClass(name="by then", e2e_target_s=210.0)
_WHENEVER = TrafficClass(name="whenever")
_HASTY = TrafficClass(name="hasty", ttft_target_s=0.2)
_PATIENT = TrafficClass(name="patient", ttft_target_s=30.0)
_LONG_FIRST = TrafficClass(name="long first tokens", ttft_target_s=5.0)
_ANSWER = TrafficClass(name="answer", e2e_target_s=90.0)
_SLOW_CHAT = TrafficClass(name="slow chat", ttft_target_s=15.0, tpot_target_s=0.08)
_SUMMARY = TrafficClass(name="summary", e2e_target_s=17.0)

Draw = Callable[[random.Random], tuple[TrafficClass, tuple[int, int], tuple[int, int]]]
"""A request's class, and the ranges of its prompt and output."""


def _traffic(name: str, draw: Draw, num_requests: int = 500) -> Traffic:
    """Requests that come by chance."""

    def traffic(rate: float, seed: int) -> list[Arrival]:
        rng = random.Random(f"{name} {seed}")
        arrivals, now_s = [], 0.0
        for number in range(num_requests):
            now_s += rng.expovariate(rate)
            goals, inputs, outputs = draw(rng)
            arrivals.append(
                Arrival(
                    request_id=f"r{number}",
                    arrival_s=now_s,
                    num_input=rng.randint(*inputs),
                    num_output=rng.randint(*outputs),
                    traffic_class=goals,
                )
            )
        return arrivals

    return traffic


def _deadlines(rng: random.Random) -> tuple[TrafficClass, tuple[int, int], tuple[int, int]]:
    """Requests of which only the ends are due."""
    goals = rng.choices((_SOON, _LATER, _BATCH), (2, 2, 1))[0]
    inputs = (500, 6000) if goals is _BATCH else (50, 3000)
    outputs = {_SOON: (16, 120), _LATER: (50, 400), _BATCH: (200, 1200)}[goals]
    return goals, inputs, outputs


def _two_paces(rng: random.Random) -> tuple[TrafficClass, tuple[int, int], tuple[int, int]]:
    """Small requests in a hurry beside large ones that hold the pool and have half a minute."""
    goals = rng.choice((_HASTY, _PATIENT))
    return goals, *(((16, 256), (8, 64)) if goals is _HASTY else ((500, 6000), (100, 600)))


def _chats_and_a_crowd(
    rng: random.Random,
) -> tuple[TrafficClass, tuple[int, int], tuple[int, int]]:
    """Chats of two patiences before as many large prompts that nothing was promised to."""
    return rng.choices(
        (
            (_CHAT, (49, 98), (49, 392)),
            (_CALM_CHAT, (16, 32), (29, 58)),
            (_WHENEVER, (1233, 4932), (5, 10)),
        ),
        (3, 1, 3),
    )[0]


def _first_tokens(rng: random.Random) -> tuple[TrafficClass, tuple[int, int], tuple[int, int]]:
    """Requests of which only the first token is due, and more of them than the pool holds."""
    return _FIRST, (200, 2000), (100, 800)


def _first_tokens_beside_ends(
    rng: random.Random,
) -> tuple[TrafficClass, tuple[int, int], tuple[int, int]]:
    """Long prompts of which the first token is due beside small rows that are due at their ends."""
    return rng.choice(((_LONG_FIRST, (650, 8000), (185, 740)), (_ANSWER, (24, 96), (514, 1028))))


def _chats_and_summaries(
    rng: random.Random,
) -> tuple[TrafficClass, tuple[int, int], tuple[int, int]]:
    """Prompts of some thousand tokens, half of them due at their first token, half at their last,
    after about as long a wait."""
    return rng.choice(
        ((_SLOW_CHAT, (2473, 4946), (100, 100)), (_SUMMARY, (2053, 4106), (185, 185)))
    )


def _long_ends(rng: random.Random) -> tuple[TrafficClass, tuple[int, int], tuple[int, int]]:
    """Large requests that are due in some minutes beside as many that nothing was promised to."""
    return rng.choice(
        ((_BY_THEN, (1822, 12000), (161, 1288)), (_WHENEVER, (1487, 12000), (20, 80)))
    )


def _on_time(traffic: Traffic, rate: float, seed: int, *, kv_tokens: int, caches: bool) -> float:
    setting = Setting(
        name="unseen",
        limits=replica_limits(kv_tokens=kv_tokens, max_model_len=32_768),
        step_time=NIYAMA_STEP_TIME,
        link=SwapLink(),
        traffic=traffic,
        rates=(rate,),
        max_tokens=10_000,
        enable_prefix_caching=caches,
        max_request_len=32_768,
    )
    report = run_once(setting, Candidate(policy="slo"), rate, seed)
    records = [record for record in report.records if record.is_counted]
    return sum(record.is_on_time for record in records) / len(records)


def test_steps_are_short_enough_for_rows_whose_end_is_due() -> None:
    shares = [
        _on_time(_traffic("deadlines", _deadlines), 2.6, seed, kv_tokens=100_000, caches=False)
        for seed in (1, 2)
    ]
    assert sum(shares) / 2 >= 0.89, shares


def test_a_small_request_in_a_hurry_gets_a_page_of_a_full_pool() -> None:
    shares = [
        _on_time(_traffic("unseen", _two_paces), 4.15, seed, kv_tokens=100_000, caches=False)
        for seed in (1, 2)
    ]
    assert sum(shares) / 2 >= 0.9, shares


def test_a_few_hasty_rows_do_not_keep_many_prompts_out() -> None:
    traffic = generated_workload(["mix"], Extent(num_requests=500)).traffic
    assert _on_time(traffic, 1.2458552137177952, 3, kv_tokens=200_000, caches=True) >= 0.92


def test_prompts_that_nothing_was_promised_to_take_no_slack_that_rows_have_yet_to_bank() -> None:
    traffic = _traffic("crowd", _chats_and_a_crowd, 220)
    for seed in (5, 16):
        share = _on_time(traffic, 90.0, seed, kv_tokens=400_000, caches=False)
        assert share >= 0.98, (seed, share)


def test_first_tokens_come_in_time_though_the_pool_is_full_of_rows_without_a_pace() -> None:
    traffic = _traffic("first", _first_tokens, 300)
    assert _on_time(traffic, 3.5, 1, kv_tokens=32_000, caches=False) == 1.0


def test_rows_that_keep_their_word_give_way_before_those_that_could() -> None:
    """Rows whose ends are due hold few pages and take as long, page by page, to come back."""
    traffic = _traffic("first and ends", _first_tokens_beside_ends, 300)
    assert _on_time(traffic, 4.0, 1, kv_tokens=64_000, caches=False) >= 0.93


def test_who_could_end_in_time_on_an_empty_machine_alone_holds_nobody_up() -> None:
    """Begun at its last chance a row would need all steps to be as short as they can be."""
    traffic = _traffic("summaries", _chats_and_summaries, 300)
    for seed in (1, 2):
        assert _on_time(traffic, 1.8, seed, kv_tokens=64_000, caches=False) >= 0.93, seed


def test_what_was_promised_comes_before_what_was_not_however_long_that_waits() -> None:
    traffic = _traffic("ends", _long_ends, 220)
    assert _on_time(traffic, 19.0, 1, kv_tokens=100_000, caches=False) >= 0.92
