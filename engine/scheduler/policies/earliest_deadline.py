"""Earliest deadline first: whoever's next milestone is due first, preempting whoever's is later."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import next_due_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Admission, Place, Policy, admit_everyone
from octavo.engine.scheduler.policies.shedding import shed_begun_too, shed_hopeless
from octavo.engine.scheduler.policies.victims_by_place import last_in_order
from octavo.engine.scheduler.snapshot import Snapshot


def place(request: Request, forecast: Forecast) -> Place:
    """By due time, then by arrival; requests without targets come last."""
    return (next_due_s(request), request.arrival_s)


def _make(parameters: Parameters, name: str, admit: Callable[[Snapshot], Admission]) -> Policy:
    return Policy(
        name=name,
        place=place,
        admit=admit,
        choose_victims=last_in_order(place, if_in_time=True),
        budget=parameters.static_budget(),
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
        uses_declared_lengths=parameters.declared_lengths(),
    )


def make(parameters: Parameters) -> Policy:
    """Earliest deadline first: `token_budget` as for FCFS."""
    return _make(parameters, "edf", admit_everyone)


def make_shedding(parameters: Parameters) -> Policy:
    """The same, and hopeless requests are rejected; `begun` and `lengths` as for `fcfs-shed`."""
    drops = parameters.choice("begun", "finish", "drop") == "drop"
    return _make(parameters, "edf-shed", shed_begun_too if drops else shed_hopeless)
