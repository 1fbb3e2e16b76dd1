"""Giving up on requests that will be late whatever is done, in favour of those that need not be."""

from __future__ import annotations

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import is_hopeless
from octavo.engine.scheduler.policies.policy import Admission
from octavo.engine.scheduler.snapshot import Snapshot

MAX_LOOKED_AT = 64
"""Waiting requests that one plan looks at: the first in the order are the first to be late."""

HOPELESS = "could no longer meet its target"


def shed_hopeless(snapshot: Snapshot) -> Admission:
    """Rejects those who come next and would be late, up to a few who would not."""
    rejected: list[tuple[Request, str]] = []
    num_sound = 0
    for request in snapshot.waiting[:MAX_LOOKED_AT]:
        if is_hopeless(request, snapshot.now_s, snapshot.forecast):
            rejected.append((request, HOPELESS))
        else:
            num_sound += 1
            if num_sound == 4:
                break
    return Admission(rejected=rejected)
