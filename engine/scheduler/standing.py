"""How a scheduler stands, in numbers that cost a few microseconds: for whoever routes requests.

`SchedulerLoad` says more, and walks over every live request for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from octavo.engine.request import Priority
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.request_table import RequestTable


class Standing(NamedTuple):
    """Figures of one moment.

    Attributes:
        num_running, num_waiting: live requests with and without a row.
        num_rows: rows that there are.
        kv_tokens: tokens that the KV pool has room for.
        free_tokens: of those, not held by live requests.
        prompt_tokens: by class, prompt tokens left to compute for requests of that class or above,
            all running prompts included.
        output_tokens: tokens that the running rows are expected to emit still.
        busy_s: seconds until the steps that are dispatched end.
        prompt_token_s: seconds of the device for a prompt token, at the size of step that prompts
            run in.
        step_s: seconds of a decode iteration at the present load.
        fixed_s, row_s: seconds that a step of decode rows costs by itself, and for each row.
        pace_rate: tokens a second that running rows were promised.
        least_pace_s: the smallest promised time a token; infinity for none.
    """

    num_running: int
    num_waiting: int
    num_rows: int
    kv_tokens: int
    free_tokens: int
    prompt_tokens: tuple[int, ...]
    output_tokens: float
    busy_s: float
    prompt_token_s: float
    step_s: float
    fixed_s: float
    row_s: float
    pace_rate: float
    least_pace_s: float


UNKNOWN = Standing(
    num_running=0, num_waiting=0, num_rows=1, kv_tokens=0, free_tokens=0,
    prompt_tokens=(0,) * len(Priority), output_tokens=0.0, busy_s=0.0, prompt_token_s=1e-4,
    step_s=0.02, fixed_s=0.02, row_s=1e-4, pace_rate=0.0, least_pace_s=math.inf,
)  # fmt: skip
"""Of a scheduler that has not told anything yet: idle, of a guessed speed."""


def merge_standings(standings: Sequence[Standing]) -> Standing:
    """Several schedulers, among which requests are spread, as one of that much more speed.

    Args:
        standings: one at least.
    """
    if len(standings) == 1:
        return standings[0]
    count = len(standings)
    backlogs = zip(*(each.prompt_tokens for each in standings), strict=True)

    def total(name: str) -> Any:
        return sum(getattr(each, name) for each in standings)

    return Standing(
        num_running=total("num_running"),
        num_waiting=total("num_waiting"),
        num_rows=total("num_rows"),
        kv_tokens=total("kv_tokens"),
        free_tokens=total("free_tokens"),
        prompt_tokens=tuple(map(sum, backlogs)),
        output_tokens=total("output_tokens"),
        busy_s=min(each.busy_s for each in standings),
        prompt_token_s=1.0 / sum(1.0 / each.prompt_token_s for each in standings),
        step_s=total("step_s") / count,
        fixed_s=total("fixed_s") / count,
        row_s=total("row_s") / count**2,  # of all rows, each step has a share
        pace_rate=total("pace_rate"),
        least_pace_s=min(each.least_pace_s for each in standings),
    )


def standing_of(table: RequestTable, forecast: Forecast, now_s: float) -> Standing:
    """Where a scheduler stands. Only reads.

    Args:
        table: its requests.
        forecast: what it expects of steps.
        now_s: engine clock.
    """
    rows, pool, limits = table.rows, table.kv.pool, forecast.limits
    waiting, columns = table.waiting, table.waiting.columns
    prompts = rows.prefilling if rows.num_prefilling else ()
    running = sum([e.prefill_end - e.request.num_computed_tokens for e in prompts])
    if len(columns):
        work = np.bincount(columns.priority.astype(np.intp), columns.work_tokens, len(Priority))
        by_class = work.tolist()
    else:
        by_class = [0.0] * len(Priority)
        for entry in waiting:
            by_class[entry.request.priority] += entry.request.num_missing_tokens
    total, backlog = float(running), []
    for tokens in by_class:
        total += tokens
        backlog.append(int(total))
    holds = rows.number >= 0
    num_running = int(np.count_nonzero(holds))
    context = float(rows.num_computed.sum(where=holds)) / max(num_running, 1)
    fixed_s, row_s = forecast.step_time.decode_cost_s(num_running, context)
    emitted = np.maximum(rows.num_computed - rows.last_prompt, 0.0)
    left = np.maximum(rows.length - emitted, 1.0)
    paces = rows.tpot_s[holds & (rows.tpot_s > 0)]
    tokens_per_page = limits.page_size / limits.needs.num_groups
    return Standing(
        num_running=num_running,
        num_waiting=len(waiting) + len(table.held),
        num_rows=limits.max_num_seqs,
        kv_tokens=int(pool.num_usable * tokens_per_page),
        free_tokens=int(pool.num_available * tokens_per_page),
        prompt_tokens=tuple(backlog),
        output_tokens=float(left.sum(where=holds)),
        busy_s=max(0.0, table.busy_until_s - now_s),
        prompt_token_s=forecast.prefill_token_s,
        step_s=forecast.step_s,
        fixed_s=fixed_s,
        row_s=row_s,
        pace_rate=float((1.0 / paces).sum()) if len(paces) else 0.0,
        least_pace_s=float(paces.min(axis=0, initial=math.inf)),
    )
