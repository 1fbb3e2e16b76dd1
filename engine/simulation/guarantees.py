"""Whether a run kept what the scheduler guarantees: shares of classes and tenants, bounded waits.

Found from the steps as they ran and from what clients saw, apart from the scheduler's own books.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Priority
from octavo.engine.scheduler.fairness import DEFAULT_QUOTAS, WINDOW_TOKENS, TenantCounters
from octavo.engine.simulation.simulate import SimulationReport

SLACK_TOKENS = 8_192
"""Prompt tokens of which a class may lack its share: two of the largest steps, as shares are looked
at once a step and a step that is under way is not changed."""


@dataclass(slots=True)
class Stretch:
    """A request's wait of one stretch: from arrival or preemption to its next row, or its end.

    Attributes:
        since_s: when it arrived, or when the step began whose plan preempted it.
        until_s: when the step began that has it again, or when it ended.
        planned_s: when that plan was made, at the earliest: when the step before began. Since then
            the scheduler may have counted.
    """

    request_id: str
    priority: int
    since_s: float
    until_s: float
    planned_s: float


def waits(report: SimulationReport) -> list[Stretch]:
    """Every stretch that anybody waited, by its beginning.

    Args:
        report: of a run with `keep_timeline`.
    """
    open_since = {r.request_id: (r.arrival_s, r.arrival_s) for r in report.records}
    priority = {r.request_id: int(r.traffic_class.priority) for r in report.records}
    found: list[Stretch] = []

    def close(name: str, until_s: float) -> None:
        since_s, planned_s = open_since.pop(name)
        found.append(Stretch(name, priority[name], since_s, max(since_s, until_s), planned_s))

    before_s = 0.0
    for step in report.timeline:
        for request_id in step.plan.preempted:
            open_since[request_id] = step.begin_s, before_s
        before_s = step.begin_s
        begun = [row.request.request_id for row in step.plan.prefill_rows if row.is_new]
        # Whose pages are on their way has a row already.
        begun += [copy.request_id for copy in step.plan.copy_ins if copy.request_id]
        for name in begun:
            if name in open_since:
                close(name, step.begin_s)
    for record in report.records:
        if record.request_id in open_since:
            end_s = report.duration_s if record.finished_s is None else record.finished_s
            close(record.request_id, end_s)
    return sorted(found, key=lambda stretch: stretch.since_s)


def class_shares(report: SimulationReport, page_size: int) -> dict[str, dict[str, Any]]:
    """What each priority class got while any of it waited, against what it is guaranteed.

    Guaranteed is a share of the last prompt tokens (about 65,536, the older ones counting less),
    as long as the class has requests waiting. So at each step that began while it waited, its share
    of the tokens until then is taken: what a class got before it had to wait counts, and so does
    what it was given by the step that ended a wait, for the next one. Tokens whose pages
    come back from the host count as computed ones do.

    Args:
        report: of a run with `keep_timeline`.
        page_size: tokens a page.

    Returns:
        By class: `guaranteed`; `tokens`, its mean share of the last prompt tokens while it waited,
        and `pages`, its mean share of the pages held by decode rows then, guaranteed only where
        pages are short (None if it never waited); `lacked_tokens`, the most tokens that
        it was short of its share while it waited, beyond what it was short when it began to;
        `is_kept`: whether these are no more than its share of `SLACK_TOKENS`.
    """
    stretches = waits(report)
    priority = {r.request_id: int(r.traffic_class.priority) for r in report.records}
    begins = [step.begin_s for step in report.timeline]
    tokens, pages = _served(report, priority, page_size)
    result: dict[str, dict[str, Any]] = {}
    for kind in sorted(set(priority.values())):
        waited = np.zeros(len(begins) + 1, bool)
        for stretch in stretches:
            if stretch.priority == kind:
                # The first step that could hold it is the next to begin.
                first = bisect.bisect_left(begins, stretch.since_s)
                waited[first : bisect.bisect_left(begins, stretch.until_s)] = True
        held = pages[waited[:-1]].sum(axis=0)
        window = _Window(DEFAULT_QUOTAS[kind])
        lacked = at_first = 0.0
        found: list[float] = []
        for index in range(len(begins)):
            # What the step itself computes is decided when it begins.
            if waited[index] and window.total >= WINDOW_TOKENS / 16:
                if not (index and waited[index - 1]) or not found:
                    at_first = max(0.0, window.lacking)
                found.append(window.of_class / window.total)
                lacked = max(lacked, window.lacking - at_first)
            window.add(float(tokens[index, kind]), float(tokens[index].sum()))
        result[Priority(kind).name] = {
            "guaranteed": DEFAULT_QUOTAS[kind],
            "tokens": sum(found) / len(found) if found else None,
            "pages": float(held[kind] / held.sum()) if held.sum() else None,
            "lacked_tokens": lacked,
            "is_kept": lacked <= DEFAULT_QUOTAS[kind] * SLACK_TOKENS,
        }
    return result


@dataclass(slots=True)
class _Window:
    """Prompt tokens that a class and all got lately, old ones forgotten as the scheduler does."""

    share: float
    of_class: float = 0.0
    total: float = 0.0

    @property
    def lacking(self) -> float:
        """Tokens that the class is short of its share."""
        return self.share * self.total - self.of_class

    def add(self, of_class: float, total: float) -> None:
        """A step computed so many."""
        keep = 0.5 ** (total / WINDOW_TOKENS)
        self.of_class = self.of_class * keep + of_class
        self.total = self.total * keep + total


def tenant_gap(
    report: SimulationReport, *, page_size: int, num_rows: int, max_tokens: int
) -> dict[str, Any]:
    """The largest difference of service between two tenants while requests of both waited, against
    what virtual token counters promise of a policy that goes by them alone.

    A tenant is charged a request's prompt, less what was cached, when it is first begun, and twice
    each output token. It is begun only if no other tenant that waits was served less; from then on
    its counter grows by that prompt, and by what its rows emit. So counters of tenants that wait
    are never further apart than `U`, the longest prompt and twice what a batch's rows may emit, and
    what two of them get in any time in which both wait throughout differs by `2 U` at most.

    Args:
        report: of a run with `keep_timeline`, without failed steps.
        page_size: tokens a page.
        num_rows: rows of a batch.
        max_tokens: most output tokens of a request.

    Returns:
        `gap`, the largest difference of any two tenants over any such time; `bound`, `2 U`;
        `is_kept`.

    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, theorem 4.4.
    """
    records = {record.request_id: record for record in report.records}
    tenant_of = {name: record.traffic_class.tenant for name, record in records.items()}
    tenants = sorted(set(tenant_of.values()))
    begins = [step.begin_s for step in report.timeline]
    waiting = {tenant: np.zeros(len(begins), bool) for tenant in tenants}
    for stretch in waits(report):
        # Plans that saw it wait and left it waiting: made when the step before began.
        first = bisect.bisect_left(begins, stretch.since_s) + 1
        last = bisect.bisect_left(begins, stretch.until_s)
        waiting[tenant_of[stretch.request_id]][first:last] = True
    service = {tenant: np.zeros(len(begins)) for tenant in tenants}
    for index, (name, num_tokens) in _charges(report, page_size):
        service[tenant_of[name]][index] += num_tokens
    gap = 0.0
    for at, first_tenant in enumerate(tenants):
        for second_tenant in tenants[at + 1 :]:
            both = waiting[first_tenant] & waiting[second_tenant]
            low = high = total = 0.0
            differences = service[first_tenant] - service[second_tenant]
            for waits_on, difference in zip(both.tolist(), differences.tolist(), strict=True):
                total = total + difference if waits_on else 0.0
                low, high = (min(low, total), max(high, total)) if waits_on else (0.0, 0.0)
                gap = max(gap, high - low)
    longest = max((record.num_input for record in report.records), default=0)
    bound = 2 * (longest + TenantCounters.OUTPUT_WEIGHT * num_rows * max_tokens)
    return {"gap": gap, "bound": bound, "is_kept": gap <= bound}


def _charges(report: SimulationReport, page_size: int) -> Iterator[tuple[int, tuple[str, float]]]:
    """(step, (request, tokens)) of all that tenants are charged for."""
    left = {record.request_id: record.num_output for record in report.records}
    begun: set[str] = set()
    records = {record.request_id: record for record in report.records}
    for index, step in enumerate(report.timeline):
        recalled = {
            copy.request_id: len(copy.device_pages) * page_size
            for copy in step.plan.copy_ins
            if copy.request_id
        }
        for name in (*recalled, *(row.request.request_id for row in step.plan.prefill_rows)):
            if name not in begun:
                begun.add(name)
                record = records[name]
                yield index, (name, record.num_input - record.cached_tokens - recalled.get(name, 0))
        rows = step.plan.decode_rows
        emitted = list(zip(rows.requests, rows.max_new_tokens.tolist(), strict=True))
        emitted += [(row.request, 1) for row in step.plan.prefill_rows if row.samples]
        for request, count in emitted:
            name = request.request_id
            count = min(count, left[name])  # what a row was to emit past its end it did not
            left[name] -= count
            yield index, (name, TenantCounters.OUTPUT_WEIGHT * count)


def _served(
    report: SimulationReport, priority: Mapping[str, int], page_size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Prompt tokens computed or brought back, and context tokens held by decode rows times seconds:
    [step, class] each."""
    tokens = np.zeros((len(report.timeline), len(Priority)))
    pages = np.zeros_like(tokens)
    known: tuple[Any, ...] = ()
    of_row = np.zeros(0, np.int64)
    for index, step in enumerate(report.timeline):
        for chunk in step.plan.prefill_rows:
            tokens[index, priority[chunk.request.request_id]] += chunk.num_tokens
        for copy in step.plan.copy_ins:
            if copy.request_id:
                tokens[index, priority[copy.request_id]] += len(copy.device_pages) * page_size
        rows = step.plan.decode_rows
        if len(rows):
            if rows.requests != known:
                known = rows.requests
                of_row = np.array([priority[request.request_id] for request in known])
            held = np.bincount(of_row, rows.starts, len(Priority))
            pages[index] = held * (step.end_s - step.begin_s)
    return tokens, pages


def longest_wait(report: SimulationReport, max_wait_s: float) -> dict[str, Any]:
    """The longest stretch that anybody waited, against the stated bound on starvation.

    The bound says: whoever has waited `max_wait_s` is begun before anybody who has not, and so
    waits no longer than that, the step under way, and whoever has waited longer still. A request
    that was begun while another had been over the bound since the step before, and was not over it
    itself, breaks it. Only trials come before it: whoever was in a step that failed may be begun
    with nobody beside it, while all others are held back, to see whether it was the cause.

    Args:
        report: of a run with `keep_timeline`.
        max_wait_s: the policy's; infinity for none.
    """
    stretches = waits(report)
    longest_s = max((s.until_s - s.since_s for s in stretches), default=0.0)
    overtaken = 0
    if max_wait_s < math.inf and longest_s > max_wait_s:
        failed_s = _first_failures(report)
        overdue = [s for s in stretches if s.until_s - s.since_s > max_wait_s]
        # Once over the bound, a request keeps its claim if it is preempted.
        claims: dict[str, float] = {}
        for stretch in overdue:
            claims.setdefault(stretch.request_id, stretch.since_s + max_wait_s)
        planned = {(s.request_id, s.until_s): s.planned_s for s in stretches}
        before_s = 0.0
        for step in report.timeline:
            begun = [row.request.request_id for row in step.plan.prefill_rows if row.is_new]
            if begun and any(
                # A plan is made no earlier than the step before it began.
                s.since_s + max_wait_s < before_s and s.until_s > step.begin_s
                for s in overdue
            ):
                for name in begun:
                    if failed_s.get(name, math.inf) <= step.begin_s:
                        continue
                    planned_s = planned.get((name, step.begin_s))
                    # Whoever may have been over the bound when this step was planned is not meant.
                    if planned_s is not None and planned_s + max_wait_s > step.begin_s:
                        overtaken += claims.get(name, math.inf) > step.begin_s
            before_s = step.begin_s
    return {
        "longest_s": longest_s,
        "max_wait_s": max_wait_s if max_wait_s < math.inf else None,
        "num_overtaken": overtaken,
        "is_kept": overtaken == 0,
    }


def _first_failures(report: SimulationReport) -> dict[str, float]:
    """By request, when the first step that it was part of ended in an error."""
    found: dict[str, float] = {}
    for step in report.timeline:
        if step.fails:
            rows = [row.request for row in step.plan.prefill_rows]
            for request in (*step.plan.decode_rows.requests, *rows):
                found.setdefault(request.request_id, step.end_s)
    return found
