"""The scheduler's state as figures, and what it means for a request that comes now."""

from __future__ import annotations

import numpy as np

from octavo.engine.request import Priority, Request
from octavo.engine.scheduler.admission import peak_pages
from octavo.engine.scheduler.backlog import backlog_of_class, first_token_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.load import QueueLoad, SchedulerLoad
from octavo.engine.scheduler.planner import Planner
from octavo.engine.scheduler.request_table import RequestTable


def measure_load(
    table: RequestTable, planner: Planner, forecast: Forecast, now_s: float
) -> SchedulerLoad:
    """Figures of this moment, and counts since the start."""
    pool, cache, host = table.kv.pool, table.kv.cache, table.kv.host
    swaps, recomputes = planner.preemption.swaps, planner.preemption.recomputes
    entries = table.all_running()
    running = [entry.request for entry in entries]
    num_pages = sum(len(entry.pages.page_ids) for entry in entries)
    num_places = num_pages * table.kv.page_size
    num_used = sum(request.num_computed_tokens for request in running)
    return SchedulerLoad(
        num_running=len(entries),
        num_waiting=len(table.waiting) + len(table.held),
        num_pages=pool.num_usable,
        num_owned_pages=pool.num_owned,
        num_cached_pages=pool.num_cached,
        kv_usage=table.kv.usage,
        kv_waste=1 - num_used / num_places if num_places else 0.0,
        num_steps=planner.num_plans,
        num_planned_prefill_tokens=planner.num_prefill_tokens,
        num_planned_decode_tokens=planner.num_decode_tokens,
        num_preemptions=table.num_preemptions,
        num_finished=table.num_finished,
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
        num_rejected=planner.num_rejected,
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
    return int(min(peak_pages(contexts, remaining, limits.page_size), most))


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
