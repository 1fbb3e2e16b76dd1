"""How many rows may decode together for each to keep its pace, and which may be left out of a step.

A step of n rows takes `fixed + n · row` seconds. A row that needs a token every `e` seconds takes
part in one of `e / T` steps when steps take T. So all rows keep their pace if

    fixed / T + Σ row / e  ≤  1        for T = the smallest e

Rows have banked tokens, so `e` is not the target itself: a row whose next token is due `slack` from
now, with r tokens to come, keeps its target in the mean with one every
`(slack + (r - 1) target) / r` seconds.

Source: the utilization bound of fluid (processor-sharing) schedules: Liu and Layland, "Scheduling
Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 20(1), 1973; the sizes of
batches that a pace allows: Niyama (2025) and SCORPIO (2025) bound them by measured step times.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.engine.scheduler.deadlines import pace_s
from octavo.engine.scheduler.policies.slo.slack import least_pace_kept_s
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.row_table import Floats

Bools = NDArray[np.bool_]
_Number = TypeVar("_Number", float, Floats)

MOST_IDLE_STEPS = 4
"""A row that has no pace to keep, or cannot keep it any more, decodes at least once in so many
steps."""

LONGEST_STALL_STEPS = 8
"""Every row decodes at least once in so many steps, however late its end is due: its reader sees no
long stall, and its pages come free."""

SPREAD_STEPS = 32.0
"""Iterations over which admitted prompts are computed, at the least: a row that ends sooner does
not wait for all of them."""

MOST_LOAD = 0.92
"""Share of the time up to which requests are let in beside rows that have a pace: forecasts err,
and a row that has lost its pace takes time that others need."""

CLEARLY_WITHIN = 0.7
"""Share of the smallest pace within which a step of all rows, and of as many as are let in at once,
leaves no doubt that all keep theirs."""

NUM_FIRST = 8
"""Waiting requests whose mean prompt stands for those that are let in next."""

MOST_AT_ONCE = 16
"""Requests that one plan lets in beside rows with a pace to keep."""


class Pace(NamedTuple):
    """What the rows' paces ask of a step.

    Attributes:
        step_s: seconds that a step may take; infinity if no row has a pace to keep.
        every_s: float64[slots], seconds in which each row needs a token.
    """

    step_s: float
    every_s: Floats


class PaceModel:
    """The rows' paces at one moment.

    Args:
        snapshot: whose rows; those in prefill count as if they decoded already.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        rows, forecast = snapshot.rows, snapshot.forecast
        self.now_s = snapshot.starts_s
        self._holds = rows.number >= 0
        self._num_rows = int(np.count_nonzero(self._holds))
        context = float(rows.num_computed.sum(where=self._holds)) / max(self._num_rows, 1)
        self._fixed_s, self._row_s = forecast.step_time.decode_cost_s(self._num_rows, context)
        self._token_s = forecast.marginal_token_s
        self._least_s = forecast.alone_step_s
        emitted = rows.num_computed - rows.last_prompt
        self._remaining = np.maximum(rows.length - emitted, 1.0)
        slack_s = rows.base_s + rows.tpot_s * (emitted - 1) - self.now_s
        # Before the first token nothing is banked. What is must last: for as long again as the row
        # has come, if no more is expected of it.
        slack_s = np.where(slack_s < math.inf, slack_s, 0.0)
        lasting = np.maximum(self._remaining, emitted)
        self._bank_s = slack_s / np.where(slack_s > 0, lasting, self._remaining)
        self._tpot_s = np.where(rows.tpot_s > 0, rows.tpot_s, math.inf)
        self._until_end_s = rows.end_due_s - self.now_s
        missing = sum([request.num_missing_tokens for request in snapshot.prefilling])
        self._pending_s = missing * self._token_s
        self._is_lost = ~self._holds
        self._is_lost |= self._every_s(self._pending_s) < self._least_s

    def measure(self) -> Pace:
        """The pace of the rows.

        Those that ask for more than all can have together are given up on, the hastiest first.
        """
        every_s = self._every_s(self._pending_s)
        paces_s = np.sort(every_s[every_s < math.inf])
        if not len(paces_s):
            return Pace(math.inf, every_s)
        num_free = self._num_rows - len(paces_s) + np.arange(len(paces_s), dtype=np.float64)
        rates = np.cumsum((1.0 / paces_s)[::-1])[::-1]
        (feasible,) = (self._loads(paces_s, rates, num_free) <= 1.0).nonzero()
        step_s = float(paces_s[feasible[0] if len(feasible) else -1])
        every_s[(every_s < step_s) | (every_s == math.inf)] = MOST_IDLE_STEPS * step_s
        return Pace(step_s, np.minimum(every_s, LONGEST_STALL_STEPS * step_s))

    def goals_s(self) -> Floats:
        """Paces of the rows that can keep theirs."""
        return self._tpot_s[~self._is_lost & (self._tpot_s < math.inf)]

    def give_up(self, least_s: float) -> bool:
        """Rows with a hastier pace than `least_s` have none to keep any more; whether there are."""
        hastier = ~self._is_lost & (self._tpot_s < least_s)
        self._is_lost |= hastier
        return bool(hastier.any())

    def room(self, num_tokens: float, pace_s: float) -> int:
        """How many requests more could be let in, so that each row that can keep its pace without
        them keeps it; at most `MOST_AT_ONCE`.

        Args:
            num_tokens: prompt tokens that each takes.
            pace_s: seconds a token that each is promised; infinity for nothing.
        """
        kept = self._every_s(self._pending_s) < math.inf
        room, step = 0, MOST_AT_ONCE
        while step:
            count = room + step
            if self._load(kept, count * num_tokens * self._token_s, pace_s, count) <= MOST_LOAD:
                room = count
            step //= 2
        return min(room, MOST_AT_ONCE)

    def _load(self, kept: Bools, work_s: float, pace_s: float, num_new: int) -> float:
        """Share of the time that these rows and some new ones take, all at their paces."""
        every_s = self._every_s(self._pending_s + work_s)[kept]
        least_s = min(float(every_s.min(0, initial=math.inf)), pace_s)
        if least_s == math.inf:
            return 0.0
        if least_s < self._least_s:
            return math.inf
        rate = float((1.0 / every_s).sum()) + num_new / min(pace_s, MOST_IDLE_STEPS * least_s)
        return self._loads(least_s, rate, self._num_rows - len(every_s))

    def _loads(self, step_s: _Number, rates: _Number, num_free: _Number) -> _Number:
        """Shares of the time that are taken if steps take `step_s` seconds.

        Args:
            rates: tokens a second of the rows that keep their pace.
            num_free: rows that have none to keep.
        """
        free_rates = num_free / (MOST_IDLE_STEPS * step_s)
        return self._fixed_s / step_s + self._row_s * (rates + free_rates)

    def _every_s(self, work_s: float) -> Floats:
        """Seconds in which each row needs a token once `work_s` of prompts are computed; infinity
        without a goal, or if it could not keep up even alone."""
        every_s = self._tpot_s + self._bank_s - work_s / np.maximum(self._remaining, SPREAD_STEPS)
        every_s = np.minimum(every_s, (self._until_end_s - work_s) / self._remaining)
        every_s[self._is_lost] = math.inf
        return every_s


def most_admissions(snapshot: Snapshot) -> int | None:
    """How many waiting requests can be admitted so that all rows keep their paces; None for any
    number."""
    num_rows, forecast = len(snapshot.running), snapshot.forecast
    if not len(snapshot.waiting) or not num_rows or not forecast.is_sound:
        return None
    goals_s = snapshot.rows.tpot_s
    own_s = pace_s(snapshot.waiting[0]) or math.inf
    least_s = min(own_s, float(goals_s.min(0, initial=math.inf, where=goals_s > 0)))
    if least_s == math.inf:
        return None
    context = float(snapshot.rows.num_computed.sum()) / num_rows
    num_more = num_rows + MOST_AT_ONCE
    fixed_s, row_s = forecast.step_time.decode_cost_s(num_more, context)
    if fixed_s + row_s * num_more <= CLEARLY_WITHIN * least_s:
        return None  # as nearly always
    prompts = snapshot.waiting_columns.work_tokens[:NUM_FIRST]
    paces = PaceModel(snapshot)
    limit = paces.room(float(prompts.mean()), own_s)
    if limit < len(snapshot.waiting):
        least_s = least_pace_kept_s(snapshot, paces.goals_s())
        if paces.give_up(least_s):
            limit = max(limit, paces.room(float(prompts.mean()), own_s))
    return max(limit, 1) if snapshot.pinned else limit


def idle_rows(snapshot: Snapshot) -> list[int]:
    """The decode rows to leave out of this step, by index, so that the others keep their pace.

    None as long as a step of all of them is short enough. Else those whose next token is due last,
    counted from their last step at the pace that each needs.
    """
    slots = snapshot.decoding.slots
    pace_s = snapshot.rows.tpot_s[slots]
    model, num_rows = snapshot.forecast.step_time, len(slots)
    context = snapshot.decoding.context / num_rows
    fixed_s, row_s = model.decode_cost_s(num_rows, context)
    step_s = fixed_s + num_rows * row_s
    if step_s <= CLEARLY_WITHIN * float(pace_s.min(0, initial=math.inf, where=pace_s > 0)):
        return []  # as nearly always
    pace = PaceModel(snapshot).measure()
    if step_s <= pace.step_s:
        return []
    due_s = snapshot.rows.last_run_s[slots] + pace.every_s[slots]
    most = max(1, int((pace.step_s - fixed_s) / row_s))
    order = due_s.argsort(kind="stable")
    is_due = int(np.count_nonzero(due_s <= snapshot.starts_s + pace.step_s))
    left_out = order[max(most, is_due) :]
    result: list[int] = np.sort(left_out).tolist()
    return result
