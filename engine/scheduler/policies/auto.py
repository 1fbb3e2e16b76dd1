"""The default: first come, first served until somebody has a target, and `slo` while anybody does.

Without targets there is nothing to weigh, and arrival is the fairest order and the cheapest to
plan. The step-time and length estimates are learned all along, so that `slo` begins with them.
"""

from __future__ import annotations

import dataclasses

from octavo.engine.scheduler.policies import fcfs, slo
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Policy


def make(parameters: Parameters) -> Policy:
    """FCFS and `slo` in turn: `token_budget` as for FCFS, and what `slo` takes."""
    return dataclasses.replace(
        fcfs.make(parameters), name="auto", with_targets=slo.make(parameters)
    )
