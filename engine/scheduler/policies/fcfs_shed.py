"""First come, first served, less those who would be late whatever is done."""

from __future__ import annotations

import dataclasses

from octavo.engine.scheduler.policies import fcfs
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Policy
from octavo.engine.scheduler.policies.shedding import shed_begun_too, shed_hopeless


def make(parameters: Parameters) -> Policy:
    """FCFS that sheds: `token_budget` as for FCFS, `begun=finish` or `drop` prompts that were begun
    and will be late, `lengths=declared` to believe lengths."""
    drops = parameters.choice("begun", "finish", "drop") == "drop"
    return dataclasses.replace(
        fcfs.make(parameters),
        name="fcfs-shed",
        admit=shed_begun_too if drops else shed_hopeless,
        uses_declared_lengths=parameters.declared_lengths(),
    )
