"""Victims for policies whose order also says who matters less."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.policy import Place
from octavo.engine.scheduler.snapshot import Snapshot

PINNED_AFTER = 4
"""Preemptions after which a request no longer gives way to waiting ones: else two whose urgency
changes as they run could take each other's pages for ever."""

PlaceOf = Callable[[Request, Forecast], Place]


def last_in_order(place: PlaceOf) -> Callable[[Snapshot, Request, int], list[Request]]:
    """Takes from the last in the order first, and only from those behind the beneficiary.

    A running beneficiary comes last itself. For a waiting one the list is as short as is enough,
    counting every page of a victim as freed, and empty if all of them together are not.
    """

    def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
        forecast = snapshot.forecast
        own = place(beneficiary, forecast)
        behind = [
            (place(request, forecast), index, request)
            for index, request in enumerate(snapshot.running)
        ]
        behind.sort(reverse=True)
        victims = [request for key, _, request in behind if key > own or request is beneficiary]
        if beneficiary.slot is not None:
            return victims[: victims.index(beneficiary) + 1]
        not_pinned = [r for r in victims if r.metrics.num_preemptions < PINNED_AFTER]
        return enough(snapshot, not_pinned, num_pages)

    return choose_victims


def enough(snapshot: Snapshot, victims: list[Request], num_pages: int) -> list[Request]:
    """The first of `victims` whose pages (and row) are enough; none if all are not."""
    page_size = snapshot.limits.page_size
    num_freed = 0
    for count, victim in enumerate(victims, 1):
        num_freed += -(-victim.num_computed_tokens // page_size)
        if num_freed >= num_pages:
            return victims[:count]
    return []
