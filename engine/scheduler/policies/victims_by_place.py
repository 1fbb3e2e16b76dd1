"""Victims for policies whose order also says who matters less."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.request import Request
from octavo.engine.scheduler.feasibility import will_be_late
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import Place
from octavo.engine.scheduler.policy import Snapshot

PINNED_AFTER = 2
"""Preemptions after which a request no longer gives way to waiting ones: else two whose urgency
changes as they run could take each other's pages for ever."""

PlaceOf = Callable[[Request, Forecast], Place]


def last_in_order(
    place: PlaceOf, *, if_in_time: bool = False
) -> Callable[[Snapshot, Request, int], list[Request]]:
    """Takes from the last in the order first, and only from those behind the beneficiary.

    A running beneficiary comes last itself. For a waiting one the list is as short as is enough,
    counting every page of a victim as freed, and empty if all of them together are not. Then
    taking turns must be worth what it costs: a victim's place, which is in seconds, must lie
    behind by more than the seconds that computing it again takes from everybody, and who was
    preempted himself takes nobody's place. Without that, rows whose places move as they emit
    preempt one another without end, and the machine computes nothing but prompts, again and again.

    Args:
        place: the policy's order, its first component in seconds.
        if_in_time: nobody gives way to a waiting request that will be late all the same.
    """

    def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
        forecast = snapshot.forecast
        own = place(beneficiary, forecast)
        is_running = beneficiary.slot is not None
        if not is_running:
            if beneficiary.metrics.num_preemptions:
                return []
            if if_in_time and will_be_late(beneficiary, snapshot.now_s, forecast):
                return []
        behind = [
            (place(request, forecast), index, request)
            for index, request in enumerate(snapshot.running)
        ]
        behind.sort(reverse=True)
        victims = [request for key, _, request in behind if key > own or request is beneficiary]
        if is_running:
            return victims[: victims.index(beneficiary) + 1]
        worth_it = [
            request
            for key, _, request in behind
            if request.metrics.num_preemptions < PINNED_AFTER
            and key > own
            and key[0] > own[0] + forecast.prefill_s(request.num_computed_tokens)
        ]
        return enough(snapshot, worth_it, num_pages)

    return choose_victims


def enough(snapshot: Snapshot, victims: list[Request], num_pages: int) -> list[Request]:
    """The first of `victims` whose pages (and row) are enough; none if all are not."""
    needs = snapshot.limits.needs
    num_freed = 0
    for count, victim in enumerate(victims, 1):
        num_freed += needs.held(victim.num_computed_tokens)
        if num_freed >= num_pages:
            return victims[:count]
    return []
