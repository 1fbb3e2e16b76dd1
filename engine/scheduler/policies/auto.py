"""The default: tenants in turn until a request has a target, and `slo` while any has one.

Without targets there is nothing to weigh. Within a tenant requests are served as they arrive; the
tenant that was served least comes next, so that one that floods the queue delays none of the
others. With a single tenant every decision is that of `fcfs`. The step-time and length estimates
are learned all along, so that `slo` begins with them.
"""

from __future__ import annotations

import dataclasses

from octavo.engine.request import Request
from octavo.engine.scheduler.policies import slo
from octavo.engine.scheduler.policies.baselines import fcfs
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policy import Policy, Snapshot, TenantTurns, nothing_is_due

TURNS = TenantTurns(token_s=lambda forecast: 1.0, has_due=nothing_is_due)
"""The least served tenant comes first: as nothing is due, what a token is worth does not matter."""


def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
    """The requests of the tenant furthest ahead first, of one tenant the last to arrive first,
    down to the beneficiary itself."""
    leads: dict[str, float] = {}
    for request in snapshot.running:
        if request.tenant not in leads:
            leads[request.tenant] = snapshot.lead(request)
    last = sorted(snapshot.running, key=lambda r: (leads[r.tenant], r.arrival_s))[::-1]
    return last[: last.index(beneficiary) + 1]


def make(parameters: Parameters) -> Policy:
    """FCFS by tenant and `slo` in turn: `token_budget` as for FCFS, and what `slo` takes."""
    return dataclasses.replace(
        fcfs(parameters),
        name="auto",
        turns=TURNS,
        choose_victims=choose_victims,
        with_targets=slo.make(parameters),
    )
