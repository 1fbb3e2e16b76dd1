"""Dynamic batching: a batch is begun when it is full, or when its first request has waited long."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.scheduler.policies import fcfs
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Admission, Policy
from octavo.engine.scheduler.snapshot import Snapshot


def admit_batch(batch_size: int, timeout_s: float) -> Callable[[Snapshot], Admission]:
    """Admits nobody while a batch runs, then a full batch, or what is there at the timeout.

    A batch that was preempted, or that waits for pages which one of it computes for all, is
    completed first.

    Args:
        batch_size: requests in a full batch; 0 for as many as wait.
        timeout_s: longest wait of the first request before a batch is begun that is not full.
    """

    def admit(snapshot: Snapshot) -> Admission:
        begun = sum(r.metrics.first_scheduled_s is not None for r in snapshot.waiting)
        begun += snapshot.num_awaiting
        if len(snapshot.running) or begun:
            return Admission(limit=begun)
        oldest_s = snapshot.now_s - min(request.arrival_s for request in snapshot.waiting)
        is_full = len(snapshot.waiting) >= max(batch_size, 1)
        if not is_full and oldest_s < timeout_s:
            return Admission(limit=0)
        return Admission(limit=batch_size or None)

    return admit


def make(parameters: Parameters) -> Policy:
    """Dynamic batching: `batch_size` (default 8) and `timeout_s` (default 0.1)."""
    batch_size = parameters.integer("batch_size", 8, least=1)
    timeout_s = parameters.number("timeout_s", 0.1)
    return Policy(
        name="dynamic",
        place=fcfs.place,
        admit=admit_batch(batch_size, timeout_s),
        choose_victims=fcfs.choose_victims,
    )
