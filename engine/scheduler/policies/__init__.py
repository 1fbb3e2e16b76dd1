"""Scheduling policies, by name."""

from __future__ import annotations

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.policies.fcfs import FCFS
from octavo.engine.scheduler.policies.policy import Policy
from octavo.engine.scheduler.policies.priority import PRIORITY

POLICIES = {policy.name: policy for policy in (FCFS, PRIORITY)}


def get_policy(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        InvalidConfigError: there is none.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise InvalidConfigError("scheduling_policy", name, " or ".join(sorted(POLICIES))) from None
