"""Deadline plus a share of the work left, chunks from the smallest slack, relegation of the late.

A request's place is `due + alpha * prefill left`. What is left to decode counts for requests that
are due at their end, in one of two ways: the paper adds the tokens to come to the work left; its
published code brings the due time forward by the time that they take. Both expect many tokens to
come: the paper takes the mean and two standard deviations, this module the 90% quantile.

Source: Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025, section 3; the
    published code is microsoft/sarathi-serve, branch niyama_asplos2026, deadline_scheduler.py.
"""

from __future__ import annotations

import math

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s, next_due_s
from octavo.engine.scheduler.forecast import GENEROUS, Forecast
from octavo.engine.scheduler.live_request import Place
from octavo.engine.scheduler.policies.baselines import MAX_LOOKED_AT, last_in_order, late_ones
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.slo.slack import budget_within, smallest_slack_s
from octavo.engine.scheduler.policy import Admission, Policy, Snapshot


def relegate_late(snapshot: Snapshot) -> Admission:
    """Sends those behind all others who would be late even if they came next, begun or not."""
    requests = [*snapshot.prefilling, *snapshot.waiting[:MAX_LOOKED_AT]]
    return Admission(demoted=late_ones(requests, snapshot))


def make(parameters: Parameters) -> Policy:
    """Niyama: `alpha` (seconds of delay for each second of prefill left, default 1), `floor`
    (prompt tokens that every step may take, default 64), `decode` (what the tokens to come change
    for a request due at its end: `work`, as in the paper, `due`, as in its code, or `none`)."""
    alpha = parameters.number("alpha", 1.0)
    floor = parameters.integer("floor", 64, least=1)
    decode = parameters.choice("decode", "work", "due", "none")

    def place(request: Request, forecast: Forecast) -> Place:
        due_s = next_due_s(request)
        missing: float = request.num_missing_tokens
        # Who is due at a pace is due at the next token, whatever comes after it.
        if decode != "none" and due_s == end_due_s(request) < math.inf:
            to_come = forecast.remaining_tokens(request, GENEROUS)
            if decode == "work":
                missing += to_come
            else:
                due_s -= to_come * forecast.step_s
        return (due_s + alpha * forecast.prefill_s(missing), request.arrival_s)

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
