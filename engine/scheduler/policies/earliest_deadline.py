"""Earliest deadline first: whoever's next milestone is due first, preempting whoever's is later."""

from __future__ import annotations

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import next_due_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Place, Policy, admit_everyone
from octavo.engine.scheduler.policies.shedding import shed_hopeless
from octavo.engine.scheduler.policies.victims_by_place import last_in_order


def place(request: Request, forecast: Forecast) -> Place:
    """By due time, then by arrival; requests without targets come last."""
    return (next_due_s(request), request.arrival_s)


def _make(parameters: Parameters, name: str, *, sheds: bool) -> Policy:
    return Policy(
        name=name,
        place=place,
        admit=shed_hopeless if sheds else admit_everyone,
        choose_victims=last_in_order(place),
        budget=parameters.static_budget(),
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
        uses_declared_lengths=parameters.declared_lengths(),
    )


def make(parameters: Parameters) -> Policy:
    """Earliest deadline first: `token_budget` as for FCFS."""
    return _make(parameters, "edf", sheds=False)


def make_shedding(parameters: Parameters) -> Policy:
    """The same, and hopeless requests are rejected; `lengths=declared` to believe lengths."""
    return _make(parameters, "edf-shed", sheds=True)
