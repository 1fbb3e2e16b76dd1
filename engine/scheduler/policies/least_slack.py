"""Least slack first: whoever has the least time to spare beyond the work that is left."""

from __future__ import annotations

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s, next_due_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Place, Policy
from octavo.engine.scheduler.policies.victims_by_place import last_in_order


def place(request: Request, forecast: Forecast) -> Place:
    """By the latest time to begin: due time less the seconds still needed. The present time is the
    same for all and left out."""
    missing = request.num_missing_tokens
    prefill_s = forecast.prefill_s(missing)
    begin_s = next_due_s(request) - prefill_s
    decode_s = forecast.remaining_tokens(request) * forecast.step_s
    return (min(begin_s, end_due_s(request) - prefill_s - decode_s), request.arrival_s)


def make(parameters: Parameters) -> Policy:
    """Least slack first: `token_budget` as for FCFS, `lengths=declared` to believe lengths."""
    return Policy(
        name="least-slack",
        place=place,
        choose_victims=last_in_order(place, if_in_time=True),
        budget=parameters.static_budget(),
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
        uses_declared_lengths=parameters.declared_lengths(),
    )
