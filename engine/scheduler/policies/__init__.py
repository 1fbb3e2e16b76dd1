"""Scheduling policies, by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.policies import auto, baselines, niyama, slo
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policy import Policy

ENTRY_POINT_GROUP = "octavo.scheduling_policies"
"""Third parties' policies: an entry point's name is the policy's, its object a `PolicyMaker`."""

PolicyMaker = Callable[[Parameters], Policy]

POLICIES: dict[str, PolicyMaker] = {
    "auto": auto.make,
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
    "niyama": niyama.make,
    "slo": slo.make,
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
