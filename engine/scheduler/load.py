"""How busy a scheduler is, and what that means for a request that comes now."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.engine.request import Priority, Request
from octavo.engine.scheduler.forecast import Forecast, peak_pages
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.plan_builder import PlanCounts
from octavo.engine.scheduler.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """The waiting requests of one priority class.

    Attributes:
        num_waiting: how many.
        oldest_s: how long the longest has been waiting, in seconds.
        num_prompt_tokens: prompt tokens they need computed.
    """

    num_waiting: int
    oldest_s: float
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLoad:
    """Figures of one moment, and counts since the start.

    Attributes:
        num_running, num_waiting: live requests with and without a row on the device.
        num_pages, num_owned_pages, num_cached_pages: usable pages; those held by live sequences;
            those kept only to be found again.
        kv_usage: owned pages as a share of usable ones, 0 to 1.
        kv_waste: share of the token places held by running sequences that no dispatched step
            writes, 0 to 1; a shared page counts for each holder.
        num_steps: steps planned.
        num_planned_prefill_tokens: prompt (and recomputed) tokens planned.
        num_planned_decode_tokens: most tokens that planned decode rows may emit.
        num_preemptions: times a request lost its pages.
        num_finished: terminal events.
        num_free_pages: pages without a holder that hold nothing worth keeping.
        num_transfer_pages: pages being filled from the host.
        num_projected_pages: most pages that the running requests are expected to hold together
            before any of them ends.
        num_host_pages, num_host_owned_pages, num_host_cached_pages: of the host tier.
        num_swaps, num_recomputes: preemptions whose pages were copied out, and were not.
        num_swapped_tokens, num_recomputed_tokens: tokens that the victims of each had computed.
        swap_cost_s, recompute_cost_s: seconds that undoing each was expected to take: copies out
            and back, computing all of it again (no cached prefix assumed).
        num_rejected: requests rejected for lack of capacity.
        num_pinned: waiting requests that have waited their longest.
        queues: the waiting by class.
        step_s: expected seconds of a step at this moment's load.
        prefix_queried_tokens, prefix_hit_tokens: tokens looked up in the prefix cache at first
            admission, and found.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_owned_pages: int
    num_cached_pages: int
    kv_usage: float
    kv_waste: float
    num_steps: int
    num_planned_prefill_tokens: int
    num_planned_decode_tokens: int
    num_preemptions: int
    num_finished: int
    num_free_pages: int
    num_transfer_pages: int
    num_projected_pages: int
    num_host_pages: int
    num_host_owned_pages: int
    num_host_cached_pages: int
    num_swaps: int
    num_recomputes: int
    num_swapped_tokens: int
    num_recomputed_tokens: int
    swap_cost_s: float
    recompute_cost_s: float
    num_rejected: int
    num_pinned: int
    queues: dict[Priority, QueueLoad]
    step_s: float
    prefix_queried_tokens: int
    prefix_hit_tokens: int


MOST_PREDICTED = 64
"""Waiting requests beyond which a first token is predicted for one in so many alone."""

_ROWS_LOOKED_AT = 8
"""Running rows that say how long a row is held."""


class Backlog(NamedTuple):
    """Prompts that are computed before a request's.

    Attributes:
        num_tokens: of all of them, still to be computed.
        num_prompts: how many.
        num_waiting: of those, how many hold no row yet.
    """

    num_tokens: int
    num_prompts: int
    num_waiting: int


def backlog_of_class(table: RequestTable, priority: Priority) -> Backlog:
    """Running prompts, and waiting requests of a class and above."""
    waiting, columns = table.waiting, table.waiting.columns
    if len(columns):
        chosen = (columns.priority <= priority) & (columns.place < math.inf)
        work = columns.work_tokens[: len(chosen)][chosen]
        return _with_running(table, int(work.sum()), len(work))
    ahead = [entry.request for entry in waiting if entry.request.priority <= priority]
    return _with_running(table, sum(request.num_missing_tokens for request in ahead), len(ahead))


def backlog_before(table: RequestTable, entry: LiveRequest) -> Backlog:
    """Running prompts, and waiting requests that come before one that waits."""
    waiting, columns = table.waiting, table.waiting.columns
    if len(columns):
        own = entry.place[0] if entry.place else math.inf
        chosen = columns.place < own
        work = columns.work_tokens[chosen]
        return _with_running(table, int(work.sum()), len(work))
    others = [other.request for other in waiting if other is not entry]
    return _with_running(table, sum(request.num_missing_tokens for request in others), len(others))


def _with_running(table: RequestTable, num_tokens: int, num_waiting: int) -> Backlog:
    prompts = table.rows.prefilling if table.rows.num_prefilling else []
    num_tokens += sum(e.prefill_end - e.request.num_computed_tokens for e in prompts)
    return Backlog(num_tokens, len(prompts) + num_waiting, num_waiting)


def first_token_s(
    table: RequestTable, forecast: Forecast, num_tokens: int, ahead: Backlog, now_s: float
) -> float:
    """Expected seconds until a prompt that is added now has its first token.

    The steps that are dispatched come to their end; then its prompt is computed with those before
    it, beside the rows that decode now, or once a row and pages have come free for it.

    Args:
        num_tokens: of its own prompt, to be computed.
        ahead: the prompts before it.
    """
    busy_s = max(0.0, table.busy_until_s - now_s)
    total, num_prompts = ahead.num_tokens + num_tokens, ahead.num_prompts + 1
    num_decode = table.rows.num_decoding
    seconds = forecast.prompts_s(total, num_prompts, num_decode)
    if not busy_s:
        seconds += max(0.0, forecast.host_s.middle - forecast.gap_s.middle)
    row_s = _row_wait_s(table, forecast, num_tokens, ahead.num_waiting)
    if row_s:
        own_s = forecast.prompts_s(num_tokens, 1, num_decode)
        seconds = max(seconds, row_s + own_s)
    return busy_s + seconds


def _row_wait_s(
    table: RequestTable, forecast: Forecast, num_tokens: int, num_waiting: int
) -> float:
    """Seconds until a row and pages have come free for a request, and for those before it."""
    pool, num_running = table.kv.pool, len(table.rows)
    num_free = len(table.rows.free_slots)
    if table.kv.needs.held(num_tokens) > pool.num_available:
        num_free = 0
    num_short = num_waiting + 1 - num_free
    if num_short <= 0 or not num_running:
        return 0.0
    rows = [e.request for e in itertools.islice(table.rows, _ROWS_LOOKED_AT)]
    lengths = [forecast.remaining_tokens(r) + len(r.output_token_ids) for r in rows]
    held_s = float(np.mean(lengths)) * forecast.step_s
    return num_short * held_s / num_running


def machine_s(request: Request, forecast: Forecast) -> float:
    """Seconds of the whole machine that a new request takes: the larger of its prompt's share of
    the steps and its own share of the rows."""
    rows_s = forecast.remaining_tokens(request) * forecast.step_s / forecast.limits.max_num_seqs
    return max(forecast.prefill_s(request.num_missing_tokens), rows_s)


def measure_load(
    table: RequestTable,
    newcomers: Sequence[LiveRequest],
    counts: PlanCounts,
    forecast: Forecast,
    now_s: float,
) -> SchedulerLoad:
    """Figures of this moment, and counts since the start.

    Args:
        newcomers: requests that were admitted and are not among the table's running rows yet.
    """
    pool, cache, host = table.kv.pool, table.kv.cache, table.kv.host
    swaps, recomputes = counts.swaps, counts.recomputes
    entries = [*table.rows, *newcomers]
    running = [entry.request for entry in entries]
    size, num_groups = table.kv.page_size, table.kv.needs.num_groups
    num_places = sum(entry.pages.num_held for entry in entries) * size
    num_used = sum(request.num_computed_tokens for request in running) * num_groups
    num_used -= sum(sum(entry.pages.first) for entry in entries) * size
    return SchedulerLoad(
        num_running=len(entries),
        num_waiting=len(table.waiting) + len(table.held),
        num_pages=pool.num_usable,
        num_owned_pages=pool.num_owned,
        num_cached_pages=pool.num_cached,
        kv_usage=pool.num_owned / pool.num_usable,
        kv_waste=1 - num_used / num_places if num_places else 0.0,
        num_steps=counts.num_plans,
        num_planned_prefill_tokens=counts.num_prefill_tokens,
        num_planned_decode_tokens=counts.num_decode_tokens,
        num_preemptions=swaps.num_requests + recomputes.num_requests,
        num_finished=table.live.num_added - len(table.live),
        num_free_pages=pool.num_free,
        num_transfer_pages=pool.num_in_transfer,
        num_projected_pages=project_pages(running, forecast),
        num_host_pages=host.num_pages,
        num_host_owned_pages=host.num_owned,
        num_host_cached_pages=host.num_cached,
        num_swaps=swaps.num_requests,
        num_recomputes=recomputes.num_requests,
        num_swapped_tokens=swaps.num_tokens,
        num_recomputed_tokens=recomputes.num_tokens,
        swap_cost_s=swaps.cost_s,
        recompute_cost_s=recomputes.cost_s,
        num_rejected=counts.num_rejected,
        num_pinned=sum(entry.is_pinned for entry in table.waiting),
        queues=queue_loads(
            [entry.request for entry in (*table.waiting, *table.held.values())], now_s
        ),
        step_s=forecast.step_s,
        prefix_queried_tokens=cache.num_queried_tokens,
        prefix_hit_tokens=cache.num_hit_tokens,
    )


def queue_loads(waiting: list[Request], now_s: float) -> dict[Priority, QueueLoad]:
    """Depth and age of the queue by class."""
    loads = {}
    for priority in Priority:
        members = [request for request in waiting if request.priority == priority]
        oldest_s = max((now_s - request.arrival_s for request in members), default=0.0)
        num_tokens = sum(request.num_missing_tokens for request in members)
        loads[priority] = QueueLoad(
            num_waiting=len(members), oldest_s=max(oldest_s, 0.0), num_prompt_tokens=num_tokens
        )
    return loads


def project_pages(running: list[Request], forecast: Forecast) -> int:
    """Most pages that the running requests will hold together if each ends as expected."""
    contexts = np.array([float(request.num_tokens) for request in running])
    remaining = np.array([forecast.remaining_tokens(request) for request in running])
    limits = forecast.limits
    most = float(limits.num_pages - 1)
    return int(min(peak_pages(contexts, remaining, limits.needs), most))


def predict_ttft_s(
    table: RequestTable,
    forecast: Forecast,
    num_missing_tokens: int,
    priority: Priority,
    now_s: float,
) -> float:
    """Seconds from the front until a new request would have its first token, by what must be
    computed before it: the rest of the running prompts, the waiting ones of its class and above,
    and its own."""
    ahead = backlog_of_class(table, priority)
    first_s = first_token_s(table, forecast, num_missing_tokens, ahead, now_s)
    return forecast.door_s.middle * (table.busy_until_s <= now_s) + first_s


def note_prediction(
    table: RequestTable, forecast: Forecast, entry: LiveRequest, now_s: float
) -> None:
    """Notes when a request that was just accepted is expected to have its first token; if many
    wait, for some of the new ones only."""
    request = entry.request
    if len(table.waiting) <= MOST_PREDICTED or entry.number % MOST_PREDICTED == 0:
        ahead = backlog_before(table, entry)
        first_s = first_token_s(table, forecast, request.num_missing_tokens, ahead, now_s)
        request.metrics.predicted_ttft_s = now_s - request.arrival_s + first_s
