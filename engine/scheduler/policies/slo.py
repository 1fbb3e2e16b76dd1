"""Octavo's own: the most requests within their targets, nobody for ever without."""

from __future__ import annotations

import math

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s, has_target, is_hopeless, next_due_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.policy import Admission, Place, Policy
from octavo.engine.scheduler.policies.shedding import HOPELESS
from octavo.engine.scheduler.slack import budget_within, smallest_slack_s
from octavo.engine.scheduler.snapshot import Snapshot
from octavo.engine.scheduler.victims import MAX_PREEMPTIONS, candidates, spare_s


def make(parameters: Parameters) -> Policy:
    gamma = parameters.number("gamma", 4.0)
    beta = parameters.number("beta", 1.0)
    floor = parameters.integer("floor", 64, least=1)
    patience_s = parameters.number("patience_s", 30.0)
    window = parameters.integer("window", 64)
    depth = parameters.number("depth", 1.0)
    kappa = parameters.number("kappa", 0.5)
    keager = parameters.number("keager", 0.1)
    stick = parameters.number("stick", 0)
    pin = parameters.integer("pin", 2)
    lazy = parameters.number("lazy", 5)

    def due(request, forecast):
        due_s = next_due_s(request)
        if due_s == math.inf:
            return request.arrival_s + patience_s
        end = end_due_s(request)
        if end <= due_s:
            due_s = end - beta * forecast.remaining_tokens(request) * forecast.step_s
        return due_s

    def place(request: Request, forecast: Forecast) -> Place:
        return (due(request, forecast) + gamma * forecast.demand_s(request), request.arrival_s)

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
            dues = [(due(r, forecast), i, r) for i, r in enumerate(jobs) if has_target(r)]
            dues.sort()
            for d, _, request in dues:
                s = forecast.prefill_s(request.num_tokens-request.num_computed_tokens) * depth
                sizes.append((s, request))
                t += s
                if t > d:
                    worst = max(sizes, key=lambda x: x[0])
                    sizes.remove(worst)
                    t -= worst[0]
                    demoted.append(worst[1])
        return Admission(rejected=rejected, demoted=demoted)

    def budget(snapshot: Snapshot) -> int:
        return budget_within(snapshot, smallest_slack_s(snapshot), floor)

    def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
        forecast = snapshot.forecast
        own = place(beneficiary, forecast)
        if beneficiary.slot is not None:
            found = candidates(snapshot, [place(r, forecast) for r in snapshot.running])
            victims = [item.request for item in found]
            return victims[: victims.index(beneficiary) + 1]
        urgent = spare_s(snapshot, beneficiary) <= lazy * forecast.step_s
        places = [place(r, forecast) for r in snapshot.running]
        left_s = (kappa if urgent else keager) * forecast.demand_s(beneficiary)
        victims, freed = [], 0
        for item in candidates(snapshot, places):
            request = item.request
            if places[item.index][0] <= own[0] + stick * forecast.step_s or not item.keeps_target:
                continue
            if request.metrics.num_preemptions >= pin:
                continue
            left_s -= item.machine_s
            if left_s < 0:
                return []
            victims.append(request)
            freed += item.num_pages
            if freed >= num_pages:
                return victims
        return []

    def headroom(snapshot: Snapshot, request: Request) -> int:
        num_iterations = 8 * min(request.metrics.num_preemptions, 2)
        return len(snapshot.running) * num_iterations // snapshot.limits.page_size

    return Policy(
        name="slo",
        place=place,
        admit=admit,
        choose_victims=choose_victims,
        headroom=headroom,
        budget=budget,
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
        uses_declared_lengths=parameters.declared_lengths(),
    )
