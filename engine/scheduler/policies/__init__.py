"""Scheduling policies, by name, and the default, `auto`, which is made of two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import entry_points

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Request
from octavo.engine.scheduler.policies import baselines
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.slo import slo_policy
from octavo.engine.scheduler.policy import Policy, Snapshot, TenantTurns, nothing_is_due

ENTRY_POINT_GROUP = "octavo.scheduling_policies"
"""Third parties' policies: an entry point's name is the policy's, its object a `PolicyMaker`."""

PolicyMaker = Callable[[Parameters], Policy]

TURNS = TenantTurns(token_s=lambda forecast: 1.0, has_due=nothing_is_due)
"""The least served tenant comes first: as nothing is due, what a token is worth does not matter."""


def furthest_ahead_first(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
    """The requests of the tenant furthest ahead first, of one tenant the last to arrive first,
    down to the beneficiary itself."""
    leads: dict[str, float] = {}
    for request in snapshot.running:
        if request.tenant not in leads:
            leads[request.tenant] = snapshot.lead(request)
    last = sorted(snapshot.running, key=lambda r: (leads[r.tenant], r.arrival_s))[::-1]
    return last[: last.index(beneficiary) + 1]


def auto(parameters: Parameters) -> Policy:
    """Tenants in turn until a request has a target, and `slo` while any has one: `token_budget` as
    for FCFS, and what `slo` takes.

    Without targets there is nothing to weigh. Within a tenant requests are served as they arrive;
    the tenant that was served least comes next, so that one that floods the queue delays none of
    the others. With a single tenant every decision is that of `fcfs`. The step-time and length
    estimates are learned all along, so that `slo` begins with them.
    """
    return dataclasses.replace(
        baselines.fcfs(parameters),
        name="auto",
        turns=TURNS,
        choose_victims=furthest_ahead_first,
        with_targets=slo_policy.make(parameters),
    )


POLICIES: dict[str, PolicyMaker] = {
    "auto": auto,
    "static": baselines.static,
    "dynamic": baselines.dynamic,
    "orca": baselines.orca,
    "fcfs": baselines.fcfs,
    "fcfs-shed": baselines.fcfs_shed,
    "priority": baselines.priority,
    "sjf": baselines.sjf,
    "mlfq": baselines.mlfq,
    "edf": baselines.edf,
    "edf-shed": baselines.edf_shed,
    "least-slack": baselines.least_slack,
    "niyama": baselines.niyama,
    "slo": slo_policy.make,
}


def get_policy(text: str) -> Policy:
    """The policy named by `text`, such as "fcfs" or "dynamic:batch_size=4,timeout_s=2".

    Raises:
        InvalidConfigError: no such policy, or a parameter that it does not have or allow.
    """
    name, _, rest = text.partition(":")
    values: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key.strip() in values:
            raise InvalidConfigError("scheduling_policy", text, "name:key=value,key=value")
        values[key.strip()] = value.strip()
    parameters = Parameters(name, values)
    policy = _maker(name)(parameters)
    parameters.check_all_taken()
    return policy


def policy_names() -> list[str]:
    """Every policy that `get_policy` knows, third parties' included."""
    return sorted({*POLICIES, *entry_points(group=ENTRY_POINT_GROUP).names})


def _maker(name: str) -> PolicyMaker:
    if name in POLICIES:
        return POLICIES[name]
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        maker: PolicyMaker = entry_point.load()
        return maker
    raise InvalidConfigError("scheduling_policy", name, " or ".join(policy_names()))
