"""Giving up on requests that will be late whatever is done, in favour of those that need not be."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import will_be_late
from octavo.engine.scheduler.policies.policy import Admission
from octavo.engine.scheduler.snapshot import Snapshot

MAX_LOOKED_AT = 64
"""Waiting requests that one plan looks at: the first in the order are the first to be late."""

HOPELESS = "could no longer meet its target"


def shed_hopeless(snapshot: Snapshot) -> Admission:
    """Rejects those of the queue who would be late if they came next."""
    late = late_ones(snapshot.waiting[:MAX_LOOKED_AT], snapshot)
    return Admission(rejected=[(request, HOPELESS) for request in late]) if late else Admission()


def shed_begun_too(snapshot: Snapshot) -> Admission:
    """The same, and gives up prompts under way that will not be done in time."""
    requests = [*snapshot.prefilling, *snapshot.waiting[:MAX_LOOKED_AT]]
    late = late_ones(requests, snapshot)
    return Admission(rejected=[(request, HOPELESS) for request in late]) if late else Admission()


def late_ones(requests: Iterable[Request], snapshot: Snapshot) -> list[Request]:
    """Those who will be late at the present pace even if they are served next."""
    now_s, forecast = snapshot.now_s, snapshot.forecast
    return [request for request in requests if will_be_late(request, now_s, forecast)]
