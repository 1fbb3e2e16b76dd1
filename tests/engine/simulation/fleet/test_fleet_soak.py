"""Random fleets: a piece of the soak small enough for every change."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest

from octavo.engine.simulation.executor import SimulatedExecutor
from octavo.engine.simulation.fleet import replica as replica_module
from octavo.engine.simulation.fleet.fleet import simulate_fleet
from octavo.engine.simulation.fleet.soak import check, draw_fleet, play


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="octavo.engine.faults.recovery")


# `python -m octavo.engine.simulation.fleet.soak` goes on with them.
def test_no_fleet_loses_or_doubles_a_token() -> None:
    seen: Counter[str] = Counter()
    for number in range(18):
        report = play(number)
        seen.update(record.status for record in report.records)
        seen["continued"] += report.num_continued
        seen["retried"] += report.num_retried
        seen["sizes"] += len(report.num_replicas) > 1
        seen["went on"] += sum(
            len(places) > 1 and record.is_served
            for places, record in zip(report.places, report.records, strict=True)
        )
    named = ("stop", "cancelled", "continued", "sizes", "went on")
    assert all(seen[name] for name in named), seen


def _first(wants: str) -> int:
    """The first fleet in which a disaster moves a request."""
    return next(
        number
        for number in range(200)
        if getattr(draw_fleet(number)[2].disasters, wants) and play(number).num_continued > 3
    )


def test_a_replica_that_forgets_what_it_told_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    number = _first("deaths")
    taken = replica_module.SimulatedReplica._take

    def forgetful(self, message, ended):  # type: ignore[no-untyped-def]
        if message.num_told > 1:
            message = message._replace(num_told=message.num_told - 1)
        taken(self, message, ended)

    monkeypatch.setattr(replica_module.SimulatedReplica, "_take", forgetful)

    def play_some() -> None:
        for each in range(number, number + 40):
            play(each)

    with pytest.raises(AssertionError):
        play_some()


def test_nothing_depends_on_how_many_processes_play() -> None:
    number = _first("deaths")
    scenario, machines, options = draw_fleet(number)
    plain = replace(options.replica, executor_type=SimulatedExecutor)
    digests = set()
    for num_processes in (0, 2):
        report = simulate_fleet(
            scenario.arrivals,
            machines,
            replace(options, replica=plain, num_processes=num_processes),
        )
        check(scenario, options, report)
        digests.add(report.digest())
    assert len(digests) == 1
