"""Static batching: a whole batch is served to its end before the next one is begun."""

from __future__ import annotations

import math

from octavo.engine.scheduler.policies import dynamic_batching, fcfs
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Policy


def make(parameters: Parameters) -> Policy:
    """Static batching: `batch_size` (default 0: however many wait when the last batch has ended).

    With a batch size, a batch is begun only when it is full: the last requests may wait for ever.
    """
    batch_size = parameters.integer("batch_size", 0)
    return Policy(
        name="static",
        place=fcfs.place,
        admit=dynamic_batching.admit_batch(batch_size, math.inf),
        choose_victims=fcfs.choose_victims,
    )
