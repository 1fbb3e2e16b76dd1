"""Priority classes, first come, first served within each."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Place, Policy
from octavo.engine.scheduler.snapshot import Snapshot


def place(request: Request, forecast: Forecast) -> Place:
    """By class, then by arrival."""
    return (request.priority, request.arrival_s)


def order(snapshot: Snapshot, requests: Sequence[Request]) -> list[Request]:
    """By class, then by arrival."""
    return sorted(requests, key=lambda request: place(request, snapshot.forecast))


def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
    """The last of the lowest class first, down to the beneficiary itself."""
    worst_first = order(snapshot, snapshot.running)[::-1]
    return worst_first[: worst_first.index(beneficiary) + 1]


def make(parameters: Parameters) -> Policy:
    """Priority with chunked prefill: `token_budget` (default: all a step can take)."""
    return Policy(
        name="priority",
        place=place,
        choose_victims=choose_victims,
        budget=parameters.static_budget(),
    )


PRIORITY = make(Parameters("priority"))
