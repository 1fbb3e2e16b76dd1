"""Random fleets that try to lose a token: `python -m octavo.engine.simulation.fleet.soak`.

Each scenario is drawn from one number: machines, routers, fronts, reports that are late or lost,
deaths, hangs, slow machines, partitions, autoscaling, steps and copies that fail, clients that
leave. Every replica's device checks each plan (`CheckedExecutor`), its pages are proved to be
conserved, and every answer must be what the request would say with no fault at all, each token
told once.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace

from octavo.engine.routing.autoscaler import SIGNALS, Autoscaling
from octavo.engine.routing.policies import POLICIES
from octavo.engine.simulation.checked_executor import CheckedExecutor
from octavo.engine.simulation.fleet.disasters import Disasters
from octavo.engine.simulation.fleet.fleet import FleetOptions, simulate_fleet
from octavo.engine.simulation.fleet.machines import Machine
from octavo.engine.simulation.fleet.replica import ReplicaOptions
from octavo.engine.simulation.fleet.report import FleetReport
from octavo.engine.simulation.soak import Scenario, draw_scenario, is_pooled
from octavo.engine.simulation.step_time import LinearCost, TwoRegimeStepTime

_COST = LinearCost(
    base=0.01, token=1e-4, prefill=2e-4, decode=1e-4, decode_context=1e-6, prefill_context=2e-6
)
_STEP_TIME = TwoRegimeStepTime(_COST, _COST, edge=16)


def draw_fleet(number: int) -> tuple[Scenario, list[tuple[Machine, float]], FleetOptions]:
    """The fleet of a number: the requests and replicas of a scenario of one engine, several times.

    Returns:
        (the scenario, kinds of machines with their shares, the fleet's options).
    """
    rng = random.Random(f"fleet {number}")
    while is_pooled(scenario_number := rng.randrange(100_000)):
        pass
    scenario = draw_scenario(scenario_number)
    machine = Machine(limits=scenario.limits, step_time=_STEP_TIME)
    machines = [(machine, 1.0)]
    if rng.random() < 0.5:
        machines.append((replace(machine, speed=rng.choice((0.3, 2.0)), name="other"), 1.0))
    rate = rng.choice((0.0, 0.0, 60.0, 600.0))
    disasters = Disasters(
        deaths=rng.choice((0.0, rate)),
        hangs=rng.choice((0.0, rate)),
        slows=rng.choice((0.0, rate)),
        partitions=rng.choice((0.0, rate)),
        hang_s=rng.choice((0.3, 10.0)),
        slow_s=1.0,
        partition_s=rng.choice((0.2, 2.0)),
        restart_s=rng.choice((0.5, 3.0)),
        watch_s=2.0,
        detect_s=0.3,
    )
    scaling = None
    if rng.random() < 0.3:
        scaling = Autoscaling(
            signal=rng.choice(SIGNALS), least=1, most=5, high=0.3, low=0.1, every_s=0.5,
            start_s=1.0, calm_looks=2,
        )  # fmt: skip
    options = FleetOptions(
        num_replicas=rng.randint(1, 4),
        router=rng.choice(sorted(POLICIES)),
        num_fronts=rng.choice((1, 1, 4)),
        report_age_s=rng.choice((0.02, 0.1, 1.0)),
        report_delay_s=rng.choice((0.0, 0.01, 0.5)),
        report_loss=rng.choice((0.0, 0.0, 0.5)),
        num_tries=rng.randint(1, 3),
        disasters=disasters,
        autoscaling=scaling,
        seed=number,
        replica=ReplicaOptions(
            scheduler_args=scenario.scheduler_args,
            overlap=scenario.options["overlap"],
            host=scenario.options["host"],
            link=scenario.options["link"],
            faults=replace(scenario.options["faults"], cancelled_share=0.0),
            max_tokens=scenario.max_tokens,
            executor_type=CheckedExecutor,
            checks=True,
        ),
    )
    arrivals = [
        replace(a, cancel_s=a.arrival_s + rng.expovariate(1.0)) if rng.random() < 0.1 else a
        for a in scenario.arrivals
    ]
    return replace(scenario, arrivals=arrivals), machines, options


def play(number: int) -> FleetReport:
    """Plays a fleet to its end.

    Raises:
        AssertionError, BrokenPlanError: something that must hold does not.
    """
    scenario, machines, options = draw_fleet(number)
    report = simulate_fleet(scenario.arrivals, machines, options)
    check(scenario, options, report)
    return report


def check(scenario: Scenario, options: FleetOptions, report: FleetReport) -> None:
    """Asserts what must hold of any run that was played to its end."""
    assert all(record.status for record in report.records), "a request never ended"
    for arrival, record in zip(scenario.arrivals, report.records, strict=True):
        if record.is_served:
            expected = min(arrival.num_output, scenario.max_tokens)
            assert record.num_output == expected, (record, expected)
        if record.num_output:
            assert record.first_token_s is not None, record
            assert record.last_token_s is not None, record
            assert record.arrival_s <= record.first_token_s <= record.last_token_s, record
    told = sum(record.num_output for record in report.records)
    said = sum(count.num_tokens for count in report.counts.values())
    if not options.disasters.partitions:  # what is said into a cut line is told to nobody
        assert said == told, f"{said} tokens were said, {told} told"
    for index, count in report.counts.items():
        num_live, num_owned = sum(count.final[:2]), sum(count.final[2:3])
        assert num_live == num_owned == 0, f"replica {index} keeps {num_live}, {num_owned} pages"


def main() -> int:
    """Soaks from the command line."""
    import logging

    logging.getLogger("octavo.engine.faults.recovery").setLevel(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fleets", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet")
    args = parser.parse_args()
    for number in range(args.first, args.first + args.fleets):
        try:
            play(number)
        except BaseException:
            print(f"fleet {number} failed; again: --first {number} --fleets 1", file=sys.stderr)
            raise
    print(f"{args.fleets} fleets")
    return 0


if __name__ == "__main__":
    sys.exit(main())
