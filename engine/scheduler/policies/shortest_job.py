"""Shortest job first: whoever is expected to be done soonest."""

from __future__ import annotations

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Place, Policy
from octavo.engine.scheduler.policies.victims_by_place import last_in_order


def place(request: Request, forecast: Forecast) -> Place:
    """By the seconds of work that are left: prompt, then expected output."""
    missing = request.num_missing_tokens
    work_s = forecast.prefill_s(missing) + forecast.remaining_tokens(request) * forecast.step_s
    return (work_s, request.arrival_s)


def make(parameters: Parameters) -> Policy:
    """Shortest job first: `lengths=declared` to believe lengths, `token_budget` as for FCFS.

    Rows that run are not preempted for shorter ones, but are the victims of them when pages run
    out. Long requests may starve.
    """
    return Policy(
        name="sjf",
        place=place,
        choose_victims=last_in_order(place),
        budget=parameters.static_budget(),
        uses_declared_lengths=parameters.declared_lengths(),
    )
