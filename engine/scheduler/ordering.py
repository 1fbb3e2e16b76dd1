"""Live requests in a policy's order."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.policies.policy import Policy
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.snapshot import Snapshot


def in_order(
    table: RequestTable, policy: Policy, entries: Sequence[LiveRequest], snapshot: Snapshot
) -> Sequence[LiveRequest]:
    """`entries`, first to be served first; equals in order of acceptance."""
    if len(entries) < 2:
        return entries
    if table.has_places:
        return sorted(entries, key=table.turn_of)
    accepted = sorted(entries, key=lambda entry: entry.number)
    ordered = policy.order(snapshot, [entry.request for entry in accepted])
    return [table.entry(request) for request in ordered]
