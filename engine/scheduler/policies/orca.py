"""Iteration-level scheduling without chunks: rows come and go at every step, prompts are whole.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
OSDI 2022.
"""

from __future__ import annotations

from octavo.engine.scheduler.policies import fcfs
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Policy


def make(parameters: Parameters) -> Policy:
    """Continuous batching of whole prompts: `prefill=mixed` (with decode rows) or `alone`."""
    alone = parameters.choice("prefill", "mixed", "alone") == "alone"
    return Policy(
        name="orca",
        place=fcfs.place,
        choose_victims=fcfs.choose_victims,
        chunks_prompts=False,
        prefills_alone=alone,
    )
