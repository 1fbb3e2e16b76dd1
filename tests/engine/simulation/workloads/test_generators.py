"""Generated workloads: the rate and the lengths asked for, by seed, with beginnings that recur."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import SimulationReport, simulate
from octavo.engine.simulation.step_time import ConstantStepTime
from octavo.engine.simulation.workloads.arrivals import ArrivalProcess
from octavo.engine.simulation.workloads.generator import Generator, Mix
from octavo.engine.simulation.workloads.generators import (
    GENERATORS,
    Agents,
    Bursts,
    Chat,
    Flood,
    Reasoning,
    Retrieval,
    Sessions,
    TightChat,
)
from octavo.engine.simulation.workloads.traffic import Arrival

EVERY = [*(kind() for kind in GENERATORS.values()), Mix(((2.0, Sessions()), (1.0, Flood())))]

by_name = pytest.mark.parametrize("source", EVERY, ids=lambda source: type(source).__name__)


@by_name
def test_the_same_seed_gives_the_same_requests(source: Generator | Mix) -> None:
    first = source.arrivals(2.0, 3, num_requests=60)
    assert first == source.arrivals(2.0, 3, num_requests=60)
    others = source.arrivals(2.0, 4, num_requests=60)
    assert [a.arrival_s for a in first] != [a.arrival_s for a in others]
    assert [a.num_output for a in first] != [a.num_output for a in others]
    streams = [{stream for a in side for stream, _ in a.segments} for side in (first, others)]
    assert not streams[0] & streams[1]


@by_name
def test_fewer_requests_are_the_first_of_more(source: Generator | Mix) -> None:
    many = source.arrivals(2.0, 3, duration_s=120.0)
    assert source.arrivals(2.0, 3, num_requests=50) == many[:50]
    assert source.arrivals(2.0, 3, num_requests=50, duration_s=120.0) == many[:50]
    assert source.arrivals(2.0, 3, duration_s=60.0) == [a for a in many if a.arrival_s < 60.0]


@by_name
def test_requests_come_in_order_at_the_rate_asked_for(source: Generator | Mix) -> None:
    arrivals = source.arrivals(5.0, 1, duration_s=2000.0)
    times = np.array([a.arrival_s for a in arrivals])
    assert (np.diff(times) >= 0).all()
    assert len({a.request_id for a in arrivals}) == len(arrivals)
    # Four deviations of a count of 10,000: √10,000 of Poisson, times the waits' coefficient of
    # variation, or the root of a session's turns that come together.
    cv = max(getattr(source, "cv", 1.0), 8**0.5 if isinstance(source, (Sessions, Mix)) else 1.0)
    assert abs(len(arrivals) - 10_000) < 4 * cv * 100
    # From the first second on, with sessions that were under way.
    assert abs((times < 500).sum() - 2500) < 4 * cv * 50


@by_name
def test_no_request_is_longer_than_it_may_be(source: Generator | Mix) -> None:
    arrivals = source.arrivals(5.0, 1, num_requests=3000)
    assert max(a.num_input for a in arrivals) <= source.max_input
    assert max(a.num_output for a in arrivals) <= source.max_output
    assert max(a.num_input + a.num_output for a in arrivals) <= source.max_model_len
    assert min(a.num_input for a in arrivals) >= 1
    assert all(sum(n for _, n in a.segments) <= a.num_input for a in arrivals)


def test_waits_are_as_bursty_as_asked_for() -> None:
    for source, process, cv in (
        (Bursts(), None, 4.0), (Chat(cv=2.0), None, 2.0), (Bursts(), ArrivalProcess(1.0), 1.0),
    ):  # fmt: skip
        arrivals = source.arrivals(5.0, 1, num_requests=20_000, process=process)
        waits = np.diff([a.arrival_s for a in arrivals])
        assert waits.std() / waits.mean() == pytest.approx(cv, rel=0.1)


def turns_of(arrivals: list[Arrival]) -> list[list[Arrival]]:
    sessions = collections.defaultdict(list)
    for arrival in arrivals:
        sessions[arrival.request_id.partition(".")[0]].append(arrival)
    return list(sessions.values())


def test_a_turn_holds_the_whole_history_and_comes_after_it_was_answered() -> None:
    source = Sessions()
    arrivals = source.arrivals(1.0, 1, duration_s=3000.0)
    lengths = [a.num_input for a in arrivals]
    assert min(lengths) >= 4096
    assert 20_000 < max(lengths) <= 28_672
    assert max(len(turns) for turns in turns_of(arrivals)) > 4
    for turns in turns_of(arrivals):
        (stream,) = {segment.stream for a in turns for segment in a.segments}
        for before, after in itertools.pairwise(turns):
            added = after.num_input - before.num_input - before.num_output
            assert source.new_len[0] <= added <= source.new_len[1]
            nominal_s = source.pace_ttft_s + source.pace_tpot_s * before.num_output
            assert after.arrival_s >= before.arrival_s + nominal_s
        assert [a.segments for a in turns] == [((stream, a.num_input),) for a in turns]


def test_users_think_as_long_as_they_are_said_to() -> None:
    source = Sessions(think_s=4.0, turns=(6, 6), max_context=100_000)
    gaps = [
        after.arrival_s - before.arrival_s - 0.5 - 0.03 * before.num_output
        for turns in turns_of(source.arrivals(2.0, 1, duration_s=2000.0))
        for before, after in itertools.pairwise(turns)
    ]
    assert np.mean(gaps) == pytest.approx(4.0, rel=0.1)
    hasty = Sessions(think_s=0.0).arrivals(1.0, 1, num_requests=20)
    assert len(hasty) == 20


def test_agents_begin_with_one_long_prompt() -> None:
    arrivals = Agents().arrivals(1.0, 1, num_requests=100)
    assert {a.num_input for a in arrivals} == {8192 + 256}
    assert len({a.segments for a in arrivals}) == 1
    several = Agents(num_prompts=3).arrivals(1.0, 1, num_requests=100)
    assert len({a.segments for a in several}) == 3


def test_popular_documents_recur_as_zipf_says() -> None:
    source = Retrieval(num_documents=50, zipf=1.0, documents=(1, 1))
    arrivals = source.arrivals(1.0, 1, num_requests=5000)
    counts = collections.Counter(a.segments[1] for a in arrivals)
    shares = [count / 5000 for _, count in counts.most_common(2)]
    harmonic = sum(1 / k for k in range(1, 51))
    assert shares == pytest.approx([1 / harmonic, 0.5 / harmonic], abs=0.03)
    even = Retrieval(num_documents=50, zipf=0.0, documents=(1, 1)).arrivals(
        1.0, 1, num_requests=5000
    )
    assert max(collections.Counter(a.segments[1] for a in even).values()) < 160


def test_a_prompt_holds_each_document_once_and_a_document_is_always_as_long() -> None:
    arrivals = Retrieval(num_documents=6, documents=(6, 6), zipf=3.0).arrivals(
        1.0, 1, num_requests=50
    )
    for arrival in arrivals:
        assert len({stream for stream, _ in arrival.segments[1:]}) == 6
    lengths = collections.defaultdict(set)
    for arrival in arrivals:
        for stream, num_tokens in arrival.segments:
            lengths[stream].add(num_tokens)
    assert {len(found) for found in lengths.values()} == {1}


def test_requests_carry_their_promises() -> None:
    reasoning = Reasoning().arrivals(1.0, 1, num_requests=2000)
    batch = [a for a in reasoning if a.traffic_class.name == "batch"]
    assert len(batch) / 2000 == pytest.approx(0.3, abs=0.04)
    (kind,) = {a.traffic_class for a in batch}
    assert (kind.e2e_target_s, kind.ttft_target_s, kind.priority) == (600.0, None, Priority.LOW)
    (kind,) = {a.traffic_class for a in reasoning if a not in batch}
    assert (kind.ttft_target_s, kind.tpot_target_s, kind.e2e_target_s) == (5.0, 0.06, None)
    assert np.median([a.num_output for a in reasoning]) == pytest.approx(2500, rel=0.08)

    tight = TightChat().arrivals(1.0, 1, num_requests=2000)
    assert {a.traffic_class.tpot_target_s for a in tight} == {0.03}
    inputs, outputs = [a.num_input for a in tight], [a.num_output for a in tight]
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (64, 512, 200, 600)


def test_one_tenant_floods_the_other() -> None:
    arrivals = Flood().arrivals(Flood.rate, 1, duration_s=1000.0)
    tenants = collections.Counter(a.traffic_class.tenant for a in arrivals)
    assert tenants["flood"] / 1000 == pytest.approx(10.0, rel=0.05)
    assert tenants["calm"] / 1000 == pytest.approx(1.0, rel=0.15)


def test_a_mix_has_its_parts_by_their_shares() -> None:
    mix = Mix(((3.0, Chat()), (1.0, TightChat()), (1.0, Chat(input_len=(2000, 2000)))))
    arrivals = mix.arrivals(10.0, 1, duration_s=1000.0)
    names = collections.Counter(a.traffic_class.name for a in arrivals)
    assert names["tight-chat"] / len(arrivals) == pytest.approx(0.2, abs=0.02)
    assert sum(a.num_input == 2000 for a in arrivals) / len(arrivals) == pytest.approx(
        0.2, abs=0.02
    )


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Chat, "ttft_s", 0.0), (Chat, "ttft_s", float("nan")), (Chat, "tpot_s", -1.0),
        (Chat, "tpot_s", 86_401.0), (Reasoning, "e2e_s", float("inf")), (Chat, "cv", 0.0),
        (Chat, "cv", float("nan")), (Chat, "input_len", (5, 4)), (Chat, "output_len", (0, 4)),
        (Sessions, "max_context", 5000), (Sessions, "think_s", -1.0),
        (Sessions, "turns", (0, 3)), (Agents, "shared_len", 0), (Agents, "num_prompts", 0),
        (Retrieval, "zipf", 3.5), (Retrieval, "zipf", -0.1), (Retrieval, "documents", (1, 2000)),
        (Reasoning, "batch_share", 1.1), (Reasoning, "max_output_len", 100), (Flood, "ratio", 0.0),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_is_refused_by_name(
    kind: type[Generator], field: str, value: object
) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        kind(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    for source in EVERY:
        with pytest.raises(InvalidConfigError, match="rate = "):
            source.arrivals(rate, 1, num_requests=5)


def play(source: Generator, *, caching: bool, rate: float = 1.0) -> SimulationReport:
    limits = replica_limits(kv_tokens=400_000, max_model_len=source.max_model_len)
    scheduler = Scheduler(limits, enable_prefix_caching=caching)
    arrivals = source.arrivals(rate, 1, num_requests=80)
    return simulate(arrivals, scheduler, ConstantStepTime(0.02), max_tokens=source.max_output)


@pytest.mark.parametrize(
    ("source", "spared"),
    [
        (Agents(output_len=(4, 16)), 0.9),
        (Sessions(output_len=(20, 40)), 0.4),
        (Retrieval(num_documents=20, zipf=1.5, documents=(1, 1), output_len=(4, 16)), 0.6),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shared_beginnings_are_not_computed_again(source: Generator, spared: float) -> None:
    full, shared = play(source, caching=False), play(source, caching=True)
    assert full.num_prefill_tokens == sum(record.num_input for record in full.records)
    assert shared.num_prefill_tokens < (1 - spared) * full.num_prefill_tokens
    assert {record.status for record in shared.records} == {"stop"}


def test_what_shares_nothing_is_computed_whole() -> None:
    source = dataclasses.replace(Chat(), output_len=(4, 16))
    assert play(source, caching=True).num_prefill_tokens == sum(
        record.num_input for record in play(source, caching=False).records
    )
