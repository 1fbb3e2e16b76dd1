"""Whether a run kept what the scheduler guarantees: classes their shares, nobody a wait too long.

Found from the steps as they ran and from what clients saw, apart from the scheduler's own books.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.engine.request import Priority
from octavo.engine.scheduler.fairness import DEFAULT_SHARES, WINDOW_TOKENS
from octavo.engine.simulation.simulate import SimulationReport


@dataclass(slots=True)
class Stretch:
    """A request's wait of one stretch: from arrival or preemption to its next row, or its end."""

    request_id: str
    priority: int
    since_s: float
    until_s: float


def waits(report: SimulationReport) -> list[Stretch]:
    """Every stretch that anybody waited, by its beginning.

    Args:
        report: of a run with `keep_timeline`.
    """
    open_since = {record.request_id: record.arrival_s for record in report.records}
    priority = {r.request_id: int(r.traffic_class.priority) for r in report.records}
    found: list[Stretch] = []
    for step in report.timeline:
        for request_id in step.plan.preempted:
            open_since[request_id] = step.begin_s
        begun = [row.request.request_id for row in step.plan.prefill_rows if row.is_new]
        # Whose pages are on their way has a row already.
        begun += [copy.request_id for copy in step.plan.copy_ins if copy.request_id]
        for name in begun:
            if name in open_since:
                since_s = open_since.pop(name)
                found.append(Stretch(name, priority[name], since_s, max(since_s, step.begin_s)))
    for record in report.records:
        if record.request_id in open_since:
            end_s = report.duration_s if record.finished_s is None else record.finished_s
            since_s = open_since[record.request_id]
            name = record.request_id
            found.append(Stretch(name, priority[name], since_s, max(since_s, end_s)))
    return sorted(found, key=lambda stretch: stretch.since_s)


def class_shares(
    report: SimulationReport, shares: Sequence[float] = DEFAULT_SHARES
) -> dict[str, dict[str, Any]]:
    """What each priority class got while any of it waited, against what it is guaranteed.

    Args:
        report: of a run with `keep_timeline`.
        shares: guaranteed to each class, of prompt tokens.

    Returns:
        By class: `guaranteed`; `tokens`, its share of the prompt tokens computed while it waited,
        and `pages`, its mean share of the pages held by decode rows then (None if it never
        waited); `is_kept`: whether it got its share, but for what the window of the guarantee
        (65,536 tokens) may carry over.
    """
    stretches = waits(report)
    priority = {r.request_id: int(r.traffic_class.priority) for r in report.records}
    begins = [step.begin_s for step in report.timeline]
    tokens = np.zeros((len(begins), len(Priority)))
    pages = np.zeros((len(begins), len(Priority)))
    known: tuple[Any, ...] = ()
    of_row = np.zeros(0, np.int64)
    for index, step in enumerate(report.timeline):
        for chunk in step.plan.prefill_rows:
            tokens[index, priority[chunk.request.request_id]] += chunk.num_tokens
        rows = step.plan.decode_rows
        if len(rows):
            if rows.requests != known:
                known = rows.requests
                of_row = np.array([priority[request.request_id] for request in known])
            held = np.bincount(of_row, rows.starts, len(Priority))
            pages[index] = held * (step.end_s - step.begin_s)
    result: dict[str, dict[str, Any]] = {}
    for kind in sorted(set(priority.values())):
        is_backlogged = np.zeros(len(begins), bool)
        for stretch in stretches:
            if stretch.priority == kind:
                # The first step that could hold it is the next to begin.
                first = bisect.bisect_left(begins, stretch.since_s)
                is_backlogged[first : bisect.bisect_left(begins, stretch.until_s)] = True
        served = tokens[is_backlogged].sum(axis=0)
        held = pages[is_backlogged].sum(axis=0)
        total = float(served.sum())
        lacking = shares[kind] * total - float(served[kind])
        result[Priority(kind).name] = {
            "guaranteed": shares[kind],
            "tokens": float(served[kind]) / total if total else None,
            "pages": float(held[kind] / held.sum()) if held.sum() else None,
            "is_kept": lacking <= shares[kind] * WINDOW_TOKENS,
        }
    return result


def longest_wait(report: SimulationReport, max_wait_s: float) -> dict[str, Any]:
    """The longest stretch that anybody waited, against the stated bound on starvation.

    The bound says: whoever has waited `max_wait_s` is begun before anybody who has not, and so
    waits no longer than that, the step under way, and whoever has waited longer still. A request
    that was begun while another had been over the bound since the step before, and was not over it
    itself, breaks it.

    Args:
        report: of a run with `keep_timeline`.
        max_wait_s: the policy's; infinity for none.
    """
    stretches = waits(report)
    longest_s = max((s.until_s - s.since_s for s in stretches), default=0.0)
    overtaken = 0
    if max_wait_s < math.inf and longest_s > max_wait_s:
        overdue = [s for s in stretches if s.until_s - s.since_s > max_wait_s]
        # Once over the bound, a request keeps its claim if it is preempted.
        claims: dict[str, float] = {}
        for stretch in overdue:
            claims.setdefault(stretch.request_id, stretch.since_s + max_wait_s)
        since = {(s.request_id, s.until_s): s.since_s for s in stretches}
        before_s = 0.0
        for step in report.timeline:
            begun = [row.request.request_id for row in step.plan.prefill_rows if row.is_new]
            if begun and any(
                # A plan is made no earlier than the step before it began.
                s.since_s + max_wait_s < before_s and s.until_s > step.begin_s
                for s in overdue
            ):
                for name in begun:
                    if claims.get(name, math.inf) > step.begin_s:
                        overtaken += (name, step.begin_s) in since
            before_s = step.begin_s
    return {
        "longest_s": longest_s,
        "max_wait_s": max_wait_s if max_wait_s < math.inf else None,
        "num_overtaken": overtaken,
        "is_kept": overtaken == 0,
    }
