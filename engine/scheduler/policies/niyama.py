"""Deadline plus a share of the work left, chunks from the smallest slack, relegation of the late.

Source: Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025.
"""

from __future__ import annotations

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import next_due_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Admission, Place, Policy
from octavo.engine.scheduler.policies.shedding import MAX_LOOKED_AT, late_ones
from octavo.engine.scheduler.policies.victims_by_place import last_in_order
from octavo.engine.scheduler.slack import budget_within, smallest_slack_s
from octavo.engine.scheduler.snapshot import Snapshot


def relegate_late(snapshot: Snapshot) -> Admission:
    """Sends those behind all others who would be late even if they came next, begun or not."""
    requests = [*snapshot.prefilling, *snapshot.waiting[:MAX_LOOKED_AT]]
    return Admission(demoted=late_ones(requests, snapshot))


def make(parameters: Parameters) -> Policy:
    """Niyama: `alpha` (seconds of delay for each second of prefill left, default 1) and `floor`
    (prompt tokens that every step may take, default 64)."""
    alpha = parameters.number("alpha", 1.0)
    floor = parameters.integer("floor", 64, least=1)

    def place(request: Request, forecast: Forecast) -> Place:
        missing = request.num_missing_tokens
        return (next_due_s(request) + alpha * forecast.prefill_s(missing), request.arrival_s)

    def budget(snapshot: Snapshot) -> int:
        return budget_within(snapshot, smallest_slack_s(snapshot), floor)

    return Policy(
        name="niyama",
        place=place,
        admit=relegate_late,
        choose_victims=last_in_order(place),
        budget=budget,
        merges_prompts=True,
        max_skipped=4,
        uses_declared_lengths=parameters.declared_lengths(),
    )
