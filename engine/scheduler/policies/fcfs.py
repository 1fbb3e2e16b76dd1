"""First come, first served: whoever arrived last waits, and gives way."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.request import Request
from octavo.engine.scheduler.policies.policy import Place, Policy
from octavo.engine.scheduler.snapshot import Snapshot


def place(request: Request) -> Place:
    """By arrival. A preempted request comes back to where it stood."""
    return (request.arrival_s,)


def order(snapshot: Snapshot, requests: Sequence[Request]) -> list[Request]:
    """By arrival."""
    return sorted(requests, key=place)


def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
    """The last to arrive first, down to the beneficiary itself."""
    worst_first = order(snapshot, snapshot.running)[::-1]
    return worst_first[: worst_first.index(beneficiary) + 1]


FCFS = Policy(name="fcfs", order=order, choose_victims=choose_victims, place=place)
