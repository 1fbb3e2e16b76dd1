"""Octavo's policy: where a request is in time, by each replica's own forecast, at the least harm.

For each replica, from its newest report and what was sent there since:

- *When is its first token?* Prompt tokens that come before its own, less what was computed since
  the report, and its own that are not cached, at the replica's own seconds a token; and the wait
  for a row or for pages, where none is free.
- *Does everybody keep pace?* The share of the time that rows with a promised pace take: `fixed / T
  + row · rate`, with T the smallest pace there (Liu and Layland's utilization bound, as the `slo`
  scheduler has it in `pace.py`).
- *What does it cost the others?* Seconds of the machine that the request takes there: of its
  prompt, of its rows, of the smaller steps that a hastier pace than theirs forces on all; and of
  prefixes that its KV pushes out of the cache and that others compute again.

Of the replicas where it is in time the one with the least of all this takes it; if there is none,
the one where it is late by the least.

Source: the replica's forecast is that of `engine/scheduler`; routing by predicted latency against
targets: llm-d's and Dynamo's SLA routing; bins of pace: PolyServe (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from octavo.engine.routing.request import Route, RouteRefusal, RouteRequest
from octavo.engine.routing.view import FleetView, Floats

_Choose = Callable[[FleetView, RouteRequest, float], Route | RouteRefusal]

MOST_PACE_LOAD = 0.9
"""Share of the time that rows with a promised pace may take."""


def forecast(
    *,
    margin: float = 0.8,
    wait_price: float = 0.3,
    late_price: float = 1.0,
    pace_price: float = 1.0,
    evict_price: float = 2.0,
    crowd_price: float = 0.3,
    refuse_at: float = 1.0,
) -> _Choose:
    """The policy of this module.

    Args:
        margin: share of a target that a forecast may use up.
        wait_price: seconds of harm for each second that the request waits for others.
        late_price: the same for each second that it is late.
        pace_price: the same for each second that a hastier pace takes from others.
        evict_price: for each second that computing the pushed out prefixes again takes.
        crowd_price: for each second by which the rows that are there become slower; for a request
            with a pace, in the measure in which paces take up the time.
        refuse_at: share of the time to its first token at which every replica's forecast is too
            late: the request is refused.
    """

    def choose(view: FleetView, request: RouteRequest, now_s: float) -> Route | RouteRefusal:
        among = view.candidates
        missing = np.maximum(request.num_prompt_tokens - view.cached_tokens[among], 1)
        token_s, row_s = view.prompt_token_s[among], view.row_s[among]
        own_s = missing * token_s
        pace_s, load = _pace(view, request)
        wait_s = _wait_s(view, request, pace_s)
        first_s = wait_s + own_s
        output = view.output_len
        # Its rows' share of the steps, and what smaller steps cost everybody while it runs.
        fixed_s = view.fixed_s[among]
        before = np.minimum(view.least_pace_s[among], view.sent_least_pace_s[among])
        own_pace_s = request.tpot_target_s or math.inf
        runs_s = output * np.minimum(view.step_s[among], own_pace_s)
        shrink = np.maximum(1.0 / pace_s - 1.0 / before, 0.0) * fixed_s
        shrink = np.where(view.num_live[among] > 0, shrink, 0.0)
        harm_s = own_s + output * row_s + pace_price * runs_s * shrink
        harm_s += evict_price * own_s
        late_s = _late_s(view, request, first_s, now_s, margin)
        is_late = (late_s > 0) | (load > MOST_PACE_LOAD)
        left_s = (request.ttft_target_s or math.inf) - (now_s - request.arrival_s)
        soonest_s = float(first_s.min(axis=0))
        is_hopeless = soonest_s > refuse_at * left_s or (request.tried and is_late.all())
        # A replica that has not reported yet has room for no token: what it would take is a guess.
        are_known = bool((view.kv_tokens[among] > 0).all())
        if is_hopeless and are_known and not request.is_begun:
            return RouteRefusal("no replica would be in time", max(0.1, soonest_s - left_s))
        score = harm_s + wait_price * wait_s + late_price * np.maximum(late_s, 0.0)
        score += late_price * np.maximum(load - MOST_PACE_LOAD, 0.0)
        crowd_s = output * row_s * view.num_live[among]
        if request.tpot_target_s is None:  # its own tokens are slower among more rows, too
            score += (wait_price + crowd_price) * crowd_s
        else:
            score += crowd_price * crowd_s * load
        at = int(np.argmin(score))
        replica = int(among[at])
        return Route(
            replica, int(view.cached_tokens[replica]), float(first_s[at]), not bool(is_late[at])
        )

    return choose


def _wait_s(view: FleetView, request: RouteRequest, pace_s: Floats) -> Floats:
    """Seconds before the request's own prompt is computed."""
    among, priority = view.candidates, request.priority
    token_s, age_s = view.prompt_token_s[among], view.age_s[among]
    reported_s = view.busy_s[among] + view.prompt_tokens[priority, among] * token_s
    wait_s = np.maximum(reported_s - age_s, 0.0) + view.sent_tokens[priority, among] * token_s
    # Rows that there are, or that can keep the smallest pace together: one more waits for an end.
    num_live = view.num_live[among]
    room = (MOST_PACE_LOAD * pace_s - view.fixed_s[among]) / np.maximum(view.row_s[among], 1e-9)
    short = num_live + 1 - np.minimum(view.num_rows[among], np.maximum(room, 1.0))
    length = np.maximum(view.output_tokens[among] / np.maximum(view.num_running[among], 1.0), 1.0)
    row_s = length * view.step_s[among] / np.maximum(view.num_running[among], 1.0)
    wait_s = wait_s + np.maximum(short, 0.0) * row_s
    found: Floats = wait_s
    return found


def _pace(view: FleetView, request: RouteRequest) -> tuple[Floats, Floats]:
    """The smallest pace with the request, seconds a token, and the share of the time that all rows
    with a pace take then."""
    among, tpot_s = view.candidates, request.tpot_target_s
    least_s = np.minimum(view.least_pace_s[among], view.sent_least_pace_s[among])
    if tpot_s is None:
        return least_s, view.fixed_s[among] / least_s + view.row_s[among] * (
            view.pace_rate[among] + view.sent_rate[among]
        )
    pace_s = np.minimum(least_s, tpot_s)
    rate = view.pace_rate[among] + view.sent_rate[among] + 1.0 / tpot_s
    return pace_s, view.fixed_s[among] / pace_s + view.row_s[among] * rate


def _late_s(
    view: FleetView, request: RouteRequest, first_s: Floats, now_s: float, margin: float
) -> Floats:
    """Seconds by which each replica's forecast is beyond what the request's targets leave."""
    among = view.candidates
    waited_s = now_s - request.arrival_s
    late_s = np.full(len(among), -math.inf)
    if request.ttft_target_s is not None:
        late_s = np.maximum(late_s, first_s - margin * (request.ttft_target_s - waited_s))
    if request.e2e_target_s is not None:
        end_s = first_s + view.output_len * view.step_s[among]
        late_s = np.maximum(late_s, end_s - margin * (request.e2e_target_s - waited_s))
    return late_s
