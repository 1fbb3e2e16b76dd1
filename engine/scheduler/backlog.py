"""The work that stands before a new request, and when it would have its first token."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from octavo.engine.request import Priority, Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.request_table import RequestTable

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
    prompts = table.running.prefilling if table.running.num_prefilling else []
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
    num_decode = len(table.running.decoding)
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
    pool, num_running = table.kv.pool, len(table.running)
    num_free = len(table.running.free_slots)
    if num_tokens > pool.num_available * table.kv.page_size:
        num_free = 0
    num_short = num_waiting + 1 - num_free
    if num_short <= 0 or not num_running:
        return 0.0
    rows = [e.request for e in itertools.islice(table.running, _ROWS_LOOKED_AT)]
    lengths = [forecast.remaining_tokens(r) + len(r.output_token_ids) for r in rows]
    held_s = float(np.mean(lengths)) * forecast.step_s
    return num_short * held_s / num_running


def machine_s(request: Request, forecast: Forecast) -> float:
    """Seconds of the whole machine that a new request takes: the larger of its prompt's share of
    the steps and its own share of the rows."""
    rows_s = forecast.remaining_tokens(request) * forecast.step_s / forecast.limits.max_num_seqs
    return max(forecast.prefill_s(request.num_missing_tokens), rows_s)
