"""Octavo's own: the most requests within their targets, nobody for ever without."""

from __future__ import annotations

import math

import numpy as np

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import is_hopeless, next_due_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Admission, Place, Policy
from octavo.engine.scheduler.policies.shedding import HOPELESS
from octavo.engine.scheduler.policies.victims_by_place import last_in_order
from octavo.engine.scheduler.slack import budget_within, final_slack_s, smallest_slack_s
from octavo.engine.scheduler.snapshot import Snapshot


def make(parameters: Parameters) -> Policy:
    gamma = parameters.number("gamma", 1.0)
    floor = parameters.integer("floor", 64, least=1)
    patience_s = parameters.number("patience_s", 30.0)
    borrow = parameters.number("borrow", 1.0)
    window = parameters.integer("window", 64)
    depth = parameters.number("depth", 1.0)
    least = parameters.integer("least", 0)

    def place(request: Request, forecast: Forecast) -> Place:
        due_s = next_due_s(request)
        if due_s == math.inf:
            due_s = request.arrival_s + patience_s
        return (due_s + gamma * forecast.demand_s(request), request.arrival_s)

    def admit(snapshot: Snapshot) -> Admission:
        rejected = []
        jobs = []
        forecast, now_s = snapshot.forecast, snapshot.now_s
        prefilling = [r for r in snapshot.running if r.metrics.first_token_s is None and r.num_computed_tokens < r.num_prompt_tokens]
        for request in [*prefilling, *snapshot.waiting[:window]]:
            if is_hopeless(request, now_s, forecast):
                rejected.append((request, HOPELESS))
                continue
            jobs.append(request)
        demoted = []
        sizes = []
        t = snapshot.starts_s
        if depth:
            for request in sorted(jobs, key=next_due_s):
                if request.ttft_target_s is None or request.metrics.first_token_s is not None:
                    continue
                s = forecast.prefill_s(request.num_tokens-request.num_computed_tokens) * depth
                sizes.append((s, request))
                t += s
                if t > next_due_s(request):
                    worst = max(sizes, key=lambda x: x[0])
                    sizes.remove(worst)
                    t -= worst[0]
                    demoted.append(worst[1])
        return Admission(rejected=rejected, demoted=demoted)

    def budget(snapshot: Snapshot) -> int:
        if borrow:
            slack_s = final_slack_s(snapshot, borrow)
        else:
            slack_s = smallest_slack_s(snapshot)
        return budget_within(snapshot, slack_s, floor)

    return Policy(
        name="slo",
        place=place,
        admit=admit,
        choose_victims=last_in_order(place),
        budget=budget,
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
        uses_declared_lengths=parameters.declared_lengths(),
    )
