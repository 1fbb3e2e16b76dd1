"""Baseline policies: what the field schedules by, each a short function that `slo` is held to.

From the plainest to those that know targets: `static`, `dynamic` and `orca` differ in when a batch
changes; `fcfs`, `priority`, `sjf` and `mlfq` in the order; `edf` and `least-slack` order by due
times; `fcfs-shed` and `edf-shed` reject requests that will be late; `niyama` weighs due times and
work. All but `static`, `dynamic` and `orca` split prompts over steps (chunked prefill). The module
is long because the policies are read, and borrow from each other, side by side.

Source: of chunked prefill beside decode rows: Agrawal et al., "Taming Throughput-Latency Tradeoff
    in LLM Inference with Sarathi-Serve", OSDI 2024.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s, next_due_s
from octavo.engine.scheduler.feasibility import will_be_late
from octavo.engine.scheduler.forecast import GENEROUS, Forecast
from octavo.engine.scheduler.live_request import Place
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.slo.slack import budget_within, smallest_slack_s
from octavo.engine.scheduler.policy import HOPELESS, Admission, Policy, Snapshot

PlaceOf = Callable[[Request, Forecast], Place]

# Batches.


def static(parameters: Parameters) -> Policy:
    """Static batching: a whole batch is served to its end before the next one is begun.

    `batch_size` (default 0: as many requests as wait when the last batch has ended). With a batch
    size, a batch is begun only when it is full: the last requests may wait for ever.

    Source: what the papers on `dynamic` and `orca` compare with, as in FasterTransformer.
    """
    batch_size = parameters.integer("batch_size", 0)
    return Policy(
        name="static",
        place=by_arrival,
        admit=admit_batch(batch_size, math.inf),
        choose_victims=last_to_come(by_arrival),
    )


def dynamic(parameters: Parameters) -> Policy:
    """Dynamic batching: a batch is begun when it is full, or its first request has waited long.

    `batch_size` (default 8) and `timeout_s` (default 0.1).

    Source: Crankshaw et al., "Clipper: A Low-Latency Online Prediction Serving System", NSDI 2017
        (delayed batching).
    """
    batch_size = parameters.integer("batch_size", 8, least=1)
    timeout_s = parameters.number("timeout_s", 0.1)
    return Policy(
        name="dynamic",
        place=by_arrival,
        admit=admit_batch(batch_size, timeout_s),
        choose_victims=last_to_come(by_arrival),
    )


def admit_batch(batch_size: int, timeout_s: float) -> Callable[[Snapshot], Admission]:
    """Admits no request while a batch runs, then a full batch, or what waits at the timeout.

    A batch that was preempted, or that waits for pages which one of its requests computes for all,
    is completed first.

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


def orca(parameters: Parameters) -> Policy:
    """Iteration-level scheduling of whole prompts: rows come and go at every step.

    `prefill=mixed` (prompts beside decode rows) or `alone` (in steps of their own).

    Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
        OSDI 2022.
    """
    alone = parameters.choice("prefill", "mixed", "alone") == "alone"
    return Policy(
        name="orca",
        place=by_arrival,
        choose_victims=last_to_come(by_arrival),
        chunks_prompts=False,
        prefills_alone=alone,
    )


# Orders that know no targets.


def by_arrival(request: Request, forecast: Forecast) -> Place:
    """By arrival. A preempted request comes back to where it stood."""
    return (request.arrival_s,)


def fcfs(parameters: Parameters) -> Policy:
    """First come, first served: the last to arrive waits, and gives way.

    `token_budget` (default: all a step can take).

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
        PagedAttention", SOSP 2023, section 4.5.
    """
    return Policy(
        name="fcfs",
        place=by_arrival,
        choose_victims=last_to_come(by_arrival),
        budget=parameters.static_budget(),
    )


def by_priority(request: Request, forecast: Forecast) -> Place:
    """By priority class, then by arrival."""
    return (request.priority, request.arrival_s)


def priority(parameters: Parameters) -> Policy:
    """Priority classes; first come, first served within each.

    `token_budget` (default: all a step can take).
    """
    return Policy(
        name="priority",
        place=by_priority,
        choose_victims=last_to_come(by_priority),
        budget=parameters.static_budget(),
    )


def last_to_come(place: PlaceOf) -> Callable[[Snapshot, Request, int], list[Request]]:
    """Takes victims from the last in the order on, down to the beneficiary itself."""

    def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
        forecast = snapshot.forecast
        worst_first = sorted(snapshot.running, key=lambda request: place(request, forecast))[::-1]
        return worst_first[: worst_first.index(beneficiary) + 1]

    return choose_victims


def by_work_left(request: Request, forecast: Forecast) -> Place:
    """By the seconds of work that are left: prompt, then expected output."""
    missing = request.num_missing_tokens
    work_s = forecast.prefill_s(missing) + forecast.remaining_tokens(request) * forecast.step_s
    return (work_s, request.arrival_s)


def sjf(parameters: Parameters) -> Policy:
    """Shortest job first: the request that is expected to be done soonest.

    `lengths=declared` to believe lengths, `token_budget` as for `fcfs`. Rows that run are not
    preempted for shorter ones, but are the victims of them when pages run out. Long requests may
    starve.

    Source: Smith, "Various optimizers for single-stage production", 1956.
    """
    return Policy(
        name="sjf",
        place=by_work_left,
        choose_victims=last_in_order(by_work_left),
        budget=parameters.static_budget(),
        uses_declared_lengths=parameters.declared_lengths(),
    )


PROMPT_TOKENS_PER_OUTPUT_TOKEN = 32
"""Prompt tokens that count like one output token: about what a step computes of each."""


def level(request: Request, quantum: int) -> int:
    """0 for the first level: quanta of 1, 2, 4, … times `quantum` output tokens' worth."""
    service = request.num_prompt_tokens / PROMPT_TOKENS_PER_OUTPUT_TOKEN
    service += len(request.output_token_ids)
    return int(service / quantum + 1).bit_length() - 1


def mlfq(parameters: Parameters) -> Policy:
    """Skip-join multi-level feedback queue: new and short answers first, without knowing lengths.

    A request joins the level whose quantum its prompt fits, and sinks a level with every quantum of
    service it has used. A level is worth a fixed time of waiting, so that nobody starves.

    `quantum` (tokens of the first level, default 32), `promote_s` (seconds of waiting that outweigh
    a level, default 5) and `token_budget` as for `fcfs`.

    Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe),
        2023.
    """
    quantum = parameters.integer("quantum", 32, least=1)
    promote_s = parameters.number("promote_s", 5.0)

    def place(request: Request, forecast: Forecast) -> Place:
        return (request.arrival_s + level(request, quantum) * promote_s, request.arrival_s)

    return Policy(
        name="mlfq",
        place=place,
        choose_victims=last_in_order(place),
        budget=parameters.static_budget(),
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
    )


# Victims, where the order also says who matters less.

PINNED_AFTER = 2
"""Preemptions after which a request no longer gives way to waiting ones: else two whose urgency
changes as they run could take each other's pages for ever."""


def last_in_order(
    place: PlaceOf, *, if_in_time: bool = False
) -> Callable[[Snapshot, Request, int], list[Request]]:
    """Takes from the last in the order first, and only from those behind the beneficiary.

    A running beneficiary comes last itself. For a waiting one the list is as short as is enough,
    counting every page of a victim as freed, and empty if all of them together are not. Then
    taking turns must be worth what it costs: a victim's place, which is in seconds, must lie
    behind by more than the seconds that computing it again takes from everybody, and who was
    preempted himself takes nobody's place. Without that, rows whose places move as they emit
    preempt one another without end, and the machine computes nothing but prompts, again and again.

    Args:
        place: the policy's order, its first component in seconds.
        if_in_time: nobody gives way to a waiting request that will be late all the same.
    """

    def choose_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
        forecast = snapshot.forecast
        own = place(beneficiary, forecast)
        is_running = beneficiary.slot is not None
        if not is_running:
            if beneficiary.metrics.num_preemptions:
                return []
            if if_in_time and will_be_late(beneficiary, snapshot.now_s, forecast):
                return []
        behind = [
            (place(request, forecast), index, request)
            for index, request in enumerate(snapshot.running)
        ]
        behind.sort(reverse=True)
        victims = [request for key, _, request in behind if key > own or request is beneficiary]
        if is_running:
            return victims[: victims.index(beneficiary) + 1]
        worth_it = [
            request
            for key, _, request in behind
            if request.metrics.num_preemptions < PINNED_AFTER
            and key > own
            and key[0] > own[0] + forecast.prefill_s(request.num_computed_tokens)
        ]
        return enough(snapshot, worth_it, num_pages)

    return choose_victims


def enough(snapshot: Snapshot, victims: list[Request], num_pages: int) -> list[Request]:
    """The first of `victims` whose pages (and row) are enough; none if all are not."""
    needs = snapshot.limits.needs
    num_freed = 0
    for count, victim in enumerate(victims, 1):
        num_freed += needs.held(victim.num_computed_tokens)
        if num_freed >= num_pages:
            return victims[:count]
    return []


# Orders by due time.


def by_due_time(request: Request, forecast: Forecast) -> Place:
    """By due time, then by arrival; requests without targets come last."""
    return (next_due_s(request), request.arrival_s)


def edf(parameters: Parameters) -> Policy:
    """Earliest deadline first: the next milestone that is due, preempting requests due later.

    `token_budget` as for `fcfs`, `lengths=declared` to believe lengths.

    Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
        Environment", 1973.
    """
    return _preempting(parameters, "edf", by_due_time)


def by_latest_start(request: Request, forecast: Forecast) -> Place:
    """By the latest time to begin: due time less the seconds still needed. The present time is the
    same for all and left out."""
    missing = request.num_missing_tokens
    prefill_s = forecast.prefill_s(missing)
    begin_s = next_due_s(request) - prefill_s
    decode_s = forecast.remaining_tokens(request) * forecast.step_s
    return (min(begin_s, end_due_s(request) - prefill_s - decode_s), request.arrival_s)


def least_slack(parameters: Parameters) -> Policy:
    """Least slack first: the least time to spare beyond the work that is left.

    `token_budget` as for `fcfs`, `lengths=declared` to believe lengths.

    Source: Mok, "Fundamental Design Problems of Distributed Systems for the Hard-Real-Time
        Environment", 1983.
    """
    return _preempting(parameters, "least-slack", by_latest_start)


def _preempting(parameters: Parameters, name: str, place: PlaceOf) -> Policy:
    """An order by due time in which waiting requests preempt running ones."""
    return Policy(
        name=name,
        place=place,
        choose_victims=last_in_order(place, if_in_time=True),
        budget=parameters.static_budget(),
        preempts_for_waiting=True,
        merges_prompts=True,
        max_skipped=16,
        uses_declared_lengths=parameters.declared_lengths(),
    )


# The same, with requests given up that will be late whatever is done.

MAX_LOOKED_AT = 64
"""Waiting requests that one plan looks at: the first in the order are the first to be late."""


def fcfs_shed(parameters: Parameters) -> Policy:
    """First come, first served, less the requests that will be late: they are rejected.

    `token_budget` as for `fcfs`, `begun=finish` or `drop` prompts that were begun and will be late,
    `lengths=declared` to believe lengths.

    Source: Gujarati et al., "Serving DNNs like Clockwork: Performance Predictability from the
        Bottom Up", OSDI 2020 (requests that cannot meet their target are dropped before they run).
    """
    admit = _shedding(parameters)
    return dataclasses.replace(
        fcfs(parameters),
        name="fcfs-shed",
        admit=admit,
        uses_declared_lengths=parameters.declared_lengths(),
    )


def edf_shed(parameters: Parameters) -> Policy:
    """Earliest deadline first, less the requests that will be late; parameters of `fcfs-shed`."""
    admit = _shedding(parameters)
    return dataclasses.replace(edf(parameters), name="edf-shed", admit=admit)


def _shedding(parameters: Parameters) -> Callable[[Snapshot], Admission]:
    drops = parameters.choice("begun", "finish", "drop") == "drop"
    return shed_begun_too if drops else shed_hopeless


def shed_hopeless(snapshot: Snapshot) -> Admission:
    """Rejects the waiting requests that would be late if they came next."""
    late = late_ones(snapshot.waiting[:MAX_LOOKED_AT], snapshot)
    return Admission(rejected=[(request, HOPELESS) for request in late]) if late else Admission()


def shed_begun_too(snapshot: Snapshot) -> Admission:
    """The same, and gives up prompts under way that will not be done in time."""
    requests = [*snapshot.prefilling, *snapshot.waiting[:MAX_LOOKED_AT]]
    late = late_ones(requests, snapshot)
    return Admission(rejected=[(request, HOPELESS) for request in late]) if late else Admission()


def late_ones(requests: Iterable[Request], snapshot: Snapshot) -> list[Request]:
    """The requests that will be late at the present pace even if they are served next."""
    now_s, forecast = snapshot.now_s, snapshot.forecast
    return [request for request in requests if will_be_late(request, now_s, forecast)]


# After a paper, in its published form too.


def relegate_late(snapshot: Snapshot) -> Admission:
    """Sends those behind all others who would be late even if they came next, begun or not."""
    requests = [*snapshot.prefilling, *snapshot.waiting[:MAX_LOOKED_AT]]
    return Admission(demoted=late_ones(requests, snapshot))


def niyama(parameters: Parameters) -> Policy:
    """Deadline plus a share of the work left, chunks from the smallest slack, relegation of the
    late.

    `alpha` (seconds of delay for each second of prefill left, default 1), `floor` (prompt tokens
    that every step may take, default 64), `decode`: what the tokens to come change for a request
    that is due at its end. By `work`, as in the paper, they add to the work left; by `due`, as in
    its published code, the due time comes forward by the time that they take; or `none`. Both
    expect many tokens to come: the paper takes the mean and two standard deviations, this module
    the 90% quantile.

    Source: Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025, section 3; the
        published code is microsoft/sarathi-serve, branch niyama_asplos2026, deadline_scheduler.py.
    """
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
