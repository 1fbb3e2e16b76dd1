"""The decisions of `slo`: order, admission, the size of a step, victims."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s, first_due_s, next_due_s
from octavo.engine.scheduler.feasibility import is_hopeless, prefill_due_s
from octavo.engine.scheduler.forecast import CAUTIOUS, Forecast, demand_s, peak_pages
from octavo.engine.scheduler.live_request import Place
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policies.slo.admission import (
    hopeless_ones,
    in_time_again,
    ones_to_leave_out,
)
from octavo.engine.scheduler.policies.slo.pace import idle_rows, most_admissions
from octavo.engine.scheduler.policies.slo.slack import (
    end_pace_s,
    expected_slack_s,
    first_tokens_budget,
    thrifty_budget,
)
from octavo.engine.scheduler.policies.slo.victims import price_rows
from octavo.engine.scheduler.policy import (
    HOPELESS,
    MAX_STEPS_WHILE_WAITING,
    Admission,
    Policy,
    Refusal,
    Snapshot,
    TenantTurns,
    refuse_nobody,
)
from octavo.engine.scheduler.row_table import Floats
from octavo.engine.scheduler.rows import Slots
from octavo.engine.scheduler.waiting_columns import WaitingFigures

MOST_RESUME_SHARE = 0.1
"""What bringing its victims back may cost, as a share of what a waiting request takes itself; and
what that weighs where nothing more was promised to a victim."""

PIN_AFTER = 4
"""Preemptions after which a row is no waiting request's victim. Two would do to end ping-pong; the
rules of gain end that already, and on the textbook workload a limit of 2 or 3 costs one of 72
requests, as rows that are cheap to take again and again (their swaps are free) become untouchable.
What bounds a wait is `max_wait_s`."""


def make(parameters: Parameters) -> Policy:
    """`slo`, with parameters of `SLOPolicy`."""
    return SLOPolicy(
        gamma=parameters.number("gamma", 10.0),
        floor=parameters.integer("floor", 64, least=1),
        max_wait_s=parameters.number("max_wait_s", 300.0),
        pin_after=parameters.integer("pin_after", PIN_AFTER, least=1),
        stickiness=parameters.number("stickiness", 1.0),
        rejects=parameters.choice("late", "reject", "serve") == "reject",
    ).policy(uses_declared_lengths=parameters.declared_lengths())


_TO_COME_BACK, _MOST_TO_COME_BACK = 8, 16
"""Tokens that each row has room for beside one that comes back: for each of its preemptions, and
at the most."""

_FEW_ENDS = 3
"""Ends of rows that a request must be able to wait for to leave the watermark alone."""

_ROUNDING = 1e-9
"""More than what sums of seconds differ by in other orders, as a share."""

_EVERYONE = Admission()

_ZERO, _ONE, _NEVER = np.array(0.0), np.array(1.0), np.array(math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOPolicy:
    """The policy's parameters, and its decisions as methods.

    Attributes:
        gamma: seconds of delay for each second of the whole machine that a request still takes.
        floor: prompt tokens that every step may take, however little slack there is.
        max_wait_s: after how long a waiting request comes before all that have waited less, and one
            without targets is due.
        pin_after: preemptions after which a row is nobody's victim while it runs.
        stickiness: steps by which a waiting request must come before a row to take its place.
        rejects: whether hopeless requests are rejected, or served when nobody else waits.
    """

    gamma: float
    floor: int
    max_wait_s: float
    pin_after: int
    stickiness: float
    rejects: bool

    def policy(self, *, uses_declared_lengths: bool) -> Policy:
        """These decisions as a policy."""
        return Policy(
            name="slo",
            place=self.place,
            measure=self.measure,
            turns=TenantTurns(lambda forecast: forecast.prefill_token_s, _has_due),
            admit=self.admit,
            refuse=self.refuse if self.rejects else refuse_nobody,
            budget=self.budget,
            idle_rows=idle_rows,
            choose_victims=self.choose_victims,
            may_choose_victims=self.may_choose_victims,
            rules_out_victims=self.rules_out_victims,
            headroom=self.headroom,
            may_use_watermark=self.may_use_watermark,
            # Nothing bounds the lengths that are declared.
            most_headroom=None if uses_declared_lengths else self.most_headroom,
            num_steps=self.num_steps,
            preempts_for_waiting=True,
            merges_prompts=True,
            max_skipped=16,
            max_wait_s=self.max_wait_s,
            uses_declared_lengths=uses_declared_lengths,
        )

    # Order.

    def place(self, request: Request, forecast: Forecast) -> Place:
        """By due time and by what the request still takes, then by arrival."""
        due_s = first_due_s(request)
        if due_s < math.inf:
            # Until its first token a request needs nothing but its prefill, and needs it soon.
            due_s += forecast.prefill_s(request.num_missing_tokens)
        else:
            due_s = next_due_s(request)
            if due_s == math.inf:
                # Nothing was promised: what it takes does not matter, and arrival is the order that
                # leaves no long answers for the end, when rows stand empty beside them.
                due_s = request.arrival_s + self.max_wait_s
            elif request.tpot_target_s is None or request.metrics.first_token_s is None:
                # Whoever has tokens to come at a pace is late at its next one, not at its end.
                due_s += self.gamma * forecast.demand_s(request)
        return (due_s, request.arrival_s)

    def measure(self, request: Request, place: Place, forecast: Forecast) -> WaitingFigures:
        """What `admit` looks at of every waiting request."""
        missing = request.num_missing_tokens
        prefill_s = forecast.alone_prefill_s(missing)
        due_s = prefill_due_s(request, forecast)
        last_s = first_due_s(request) - prefill_s
        end_s = end_due_s(request)
        if end_s < math.inf:
            remaining = forecast.remaining_tokens(request, CAUTIOUS)
            last_s = min(last_s, end_s - prefill_s - (remaining - 1) * forecast.alone_step_s)
        return WaitingFigures(due_s, missing, last_s, place[0], request.priority)

    # Admission.

    def refuse(self, snapshot: Snapshot, request: Request) -> Refusal | None:
        """At the door: a request that would be late even if it were the only one."""
        now_s, starts_s = snapshot.now_s, snapshot.starts_s
        is_late = is_hopeless(request, now_s, snapshot.forecast, starts_s)
        return Refusal(HOPELESS) if is_late else None

    def admit(self, snapshot: Snapshot) -> Admission:
        """Gives up who would be late, and the largest where not all can be in time."""
        gone = hopeless_ones(snapshot)
        late = ones_to_leave_out(snapshot)
        restored = [] if late else in_time_again(snapshot)
        limit = most_admissions(snapshot)
        if not gone and not late and not restored:
            return _EVERYONE if limit is None else Admission(limit=limit)
        if not self.rejects:
            return Admission(limit=limit, demoted=[*gone, *late], restored=restored)
        rejected = [(request, HOPELESS) for request in gone]
        return Admission(limit=limit, rejected=rejected, demoted=late, restored=restored)

    # Steps.

    def budget(self, snapshot: Snapshot) -> int:
        """As many tokens as the smallest banked slack of a row allows, and the first tokens that
        come at the step's end."""
        slack_s = min(expected_slack_s(snapshot, self.floor), end_pace_s(snapshot, self.floor))
        budget = thrifty_budget(snapshot, slack_s, self.floor)
        return min(budget, first_tokens_budget(snapshot, self.floor))

    def num_steps(self, snapshot: Snapshot, limit: int, longest: int, shortest: int) -> int:
        """Iterations of a decode dispatch: few while somebody waits, and none that would keep a
        waiting request from its last chance."""
        most = min(limit, longest)
        if len(snapshot.waiting):
            most = min(most, shortest, MAX_STEPS_WHILE_WAITING)
            last_s = float(snapshot.waiting_columns.last_chance_s.min(0))
            step_s = max(snapshot.forecast.step_s, 1e-9)
            if last_s - snapshot.starts_s < most * step_s:
                most = 1
        return 1 << (most.bit_length() - 1)

    # Preemption.

    def headroom(self, snapshot: Snapshot, request: Request) -> int:
        """Room for rows to grow as far as is expected of all of them together.

        None where coming back costs next to nothing (a swap, or less than a step): there pages are
        better used than kept. For one that comes back, room for every row to grow by 8 iterations
        in any case, and from the second time on by 16.
        """
        slots, needs = snapshot.decoding.slots, snapshot.limits.needs
        pages, forecast = _room_to_come_back(snapshot, request), snapshot.forecast
        if _is_cheap_to_lose(snapshot, request):
            return pages
        rows = snapshot.rows
        starts = snapshot.decoding.starts.astype(np.float64)
        prices = price_rows(snapshot, slots, starts)
        emitted = starts - rows.last_prompt[slots]
        own = forecast.remaining_tokens(request)
        # Rows without a pace that can stand still give their pages up when others need them.
        can_wait = (rows.tpot_s[slots] == 0) & (prices.spare_s > prices.delay_s)
        if not _has_due(request):
            # It has no more of a claim to them than rows that were promised nothing, either.
            can_wait &= rows.end_due_s[slots] < _NEVER
        stays = ~can_wait
        contexts = np.append(starts[stays], float(request.num_tokens))
        remaining = np.append(np.maximum(rows.length[slots] - emitted, 1.0)[stays], own)
        growth = peak_pages(contexts, remaining, needs)
        growth -= float(needs.mean_held_each(contexts).sum())
        growth -= len(contexts) * needs.num_groups
        growth -= float(prices.num_pages.sum(where=can_wait))
        return max(pages, int(growth))

    def may_use_watermark(self, snapshot: Snapshot, request: Request) -> bool:
        """A request whose first token is due before a few rows are expected to end: it cannot wait
        for their pages. Who can leaves the watermark for such ones."""
        slots, rows = snapshot.decoding.slots, snapshot.rows
        left_s = first_due_s(request) - snapshot.starts_s
        if left_s == math.inf or not len(slots):
            return False
        emitted = snapshot.decoding.starts - rows.last_prompt[slots]
        remaining = np.maximum(rows.length[slots] - emitted, 1.0)
        between_ends_s = float(remaining.mean(0)) / len(slots) * snapshot.forecast.step_s
        return left_s < _FEW_ENDS * between_ends_s

    def most_headroom(self, snapshot: Snapshot) -> float:
        """Every row at its longest, if all came there at once; or room to come back, if more."""
        limits = snapshot.limits
        # No row has more to come than its whole length.
        growth = len(snapshot.decoding) * max(snapshot.rows.most_length, 1.0)
        return limits.needs.growth(max(growth, limits.max_num_seqs * _MOST_TO_COME_BACK))

    def choose_victims(
        self, snapshot: Snapshot, beneficiary: Request, num_pages: int
    ) -> list[Request]:
        """The cheapest to lose for each page; for a waiting request only if that is a gain.

        A row gives way to a waiting request only if it comes after it, loses no target, is not
        pinned, if anything was promised to either, and if bringing all victims back takes a
        fraction of what the beneficiary takes.
        """
        running, slots = snapshot.decoding.requests, snapshot.decoding.slots
        contexts = snapshot.decoding.starts.astype(np.float64)
        given_up: list[Request] = []
        if beneficiary.slot is None:
            for request in snapshot.demoted:
                given_up.append(request)
                num_pages -= snapshot.limits.needs.held(request.num_tokens)
                if num_pages <= 0:
                    return given_up
        if not len(slots):
            return [beneficiary] if beneficiary.slot is not None else []
        forecast, rows = snapshot.forecast, snapshot.rows
        places = self._places(snapshot, slots, contexts)
        pinned = rows.is_pinned[slots]
        if beneficiary.slot is not None:
            # What a row loses tells rows apart that come back at little cost. Others cost about the
            # same for each page: the last in the order go first. Of equals, as when all came at
            # once, the last that was accepted does: else those that come back would give way again.
            prices = price_rows(snapshot, slots, contexts)
            losses = np.where(prices.resume_s <= forecast.step_s, prices.loss_per_page, 0.0)
            last_first = np.lexsort((-rows.number[slots], -places, losses, pinned))
            victims = [running[index] for index in last_first.tolist()]
            # A row that has known tokens to compute again does not decode, and is the last resort.
            is_among = beneficiary in victims
            return victims[: victims.index(beneficiary) + 1] if is_among else victims
        allowed = ~pinned
        most_s = math.inf
        if not snapshot.is_pinned(beneficiary):
            own = self.place(beneficiary, forecast)[0]
            own += snapshot.lead(beneficiary) * forecast.prefill_token_s
            allowed &= places > own + self.stickiness * forecast.step_s
            allowed &= rows.num_preemptions[slots] < self.pin_after
            if not _has_due(beneficiary):
                # Nothing was promised to it: between it and such a row nothing can be gained.
                allowed &= np.minimum(rows.base_s[slots], rows.end_due_s[slots]) < _NEVER
            most_s = MOST_RESUME_SHARE * forecast.demand_s(beneficiary)
        if not np.count_nonzero(allowed):
            return []  # as nearly always: nobody's loss need be priced
        prices = price_rows(snapshot, slots, contexts)
        if most_s < math.inf:
            # A row with a pace to keep comes back when the beneficiary's pages do: it must be able
            # to stand still that long, and is not computed again for that: where pages are short,
            # such rows would take each other's.
            stay_s = forecast.remaining_tokens(beneficiary) * forecast.step_s
            lasts = ~(rows.base_s[slots] < _NEVER) | (prices.spare_s < 0)
            is_cheap = prices.resume_s <= forecast.step_s
            lasts |= is_cheap & (prices.spare_s > prices.delay_s + stay_s)
            allowed &= prices.keeps_target & lasts
        (candidates,) = allowed.nonzero()
        if not len(candidates):
            return []
        weights = np.where(prices.spare_s < math.inf, 1.0, MOST_RESUME_SHARE)
        losses = (weights * prices.loss_per_page)[candidates]
        chosen = candidates[np.lexsort((-places[candidates], losses))]
        freed = np.cumsum(prices.num_pages[chosen])
        count = int(freed.searchsorted(num_pages)) + 1
        if count > len(chosen) or float((weights * prices.resume_s)[chosen[:count]].sum()) > most_s:
            return []
        return [*given_up, *(running[index] for index in chosen[:count].tolist())]

    def may_choose_victims(self, snapshot: Snapshot, beneficiary: Request) -> bool:
        """Whether any row comes after a waiting request: one that has not waited its longest takes
        no place of others."""
        if snapshot.is_pinned(beneficiary):
            return True
        rows = snapshot.rows
        after_s = self._after_s(snapshot, self.place(beneficiary, snapshot.forecast)[0])
        # Who comes last, at the latest: of all slots at once, as each could be a decode row's.
        contexts = rows.num_computed
        if float((rows.paced_from_s + rows.tpot_s * contexts).max(0)) > after_s:
            return True
        unpaced_s, length = float(rows.unpaced_s.max(0)), float(rows.length.max(0))
        return self._last_unpaced_s(snapshot, unpaced_s, length, int(contexts.max(0))) > after_s

    def rules_out_victims(self, snapshot: Snapshot, beneficiary: Request) -> bool:
        """As `may_choose_victims`, by bounds that were kept: as nearly always in a long queue."""
        if snapshot.is_pinned(beneficiary):
            return False
        # A place before the first token is that token's due time and more.
        place_s, rows = first_due_s(beneficiary), snapshot.rows
        if place_s == math.inf:
            place_s = self.place(beneficiary, snapshot.forecast)[0]
        after_s = self._after_s(snapshot, place_s)
        if rows.latest_pace_s > after_s:
            return False
        last_s = self._last_unpaced_s(
            snapshot, rows.latest_unpaced_s, rows.most_length, rows.most_context
        )
        return last_s <= after_s

    def _after_s(self, snapshot: Snapshot, place_s: float) -> float:
        """Where rows come at the earliest that may give way to a waiting request in that place."""
        after_s = place_s + self.stickiness * snapshot.forecast.step_s
        return after_s - _ROUNDING * (1.0 + abs(after_s))

    def _last_unpaced_s(
        self, snapshot: Snapshot, unpaced_s: float, length: float, context: int
    ) -> float:
        """Where rows without a pace to keep come at the latest, by bounds of their figures."""
        limits, remaining = snapshot.limits, max(length, 1.0)
        num_pages = limits.needs.mean_held(context + remaining)
        share = max(1 / limits.max_num_seqs, num_pages / (limits.num_pages - 1))
        demand_s = remaining * snapshot.forecast.step_s * share
        return unpaced_s + self.max_wait_s + self.gamma * demand_s

    def _places(self, snapshot: Snapshot, slots: Slots, contexts: Floats) -> Floats:
        """First components of the decode rows' places, as `place` gives them.

        Args:
            slots: theirs.
            contexts: tokens each holds.
        """
        rows, limits = snapshot.rows, snapshot.limits
        # Numbers as arrays: plain ones cost NumPy as much again as what is done with them.
        has_pace = rows.base_s[slots] < _NEVER
        emitted = contexts - rows.last_prompt[slots]
        due_s = rows.base_s[slots] + rows.tpot_s[slots] * emitted
        due_s = np.minimum(due_s, rows.end_due_s[slots])
        patient_s = rows.arrival_s[slots] + np.array(self.max_wait_s)
        is_due = due_s < _NEVER
        due_s = np.where(is_due, due_s, patient_s)
        demand = demand_s(
            np.maximum(rows.length[slots] - emitted, _ONE),
            contexts,
            step_s=snapshot.forecast.step_s,
            num_rows=limits.max_num_seqs,
            num_pages=limits.num_pages - 1,
            needs=limits.needs,
        )
        places: Floats = due_s + np.where(is_due & ~has_pace, np.array(self.gamma) * demand, _ZERO)
        return places


def _room_to_come_back(snapshot: Snapshot, request: Request) -> int:
    """Pages that are kept free for the rows beside one that was preempted before."""
    num_preemptions = request.metrics.num_preemptions
    if not num_preemptions:
        return 0
    num_tokens = min(_TO_COME_BACK * num_preemptions, _MOST_TO_COME_BACK)
    needs = snapshot.limits.needs
    return len(snapshot.running) * num_tokens * needs.num_groups // needs.page_size


def _is_cheap_to_lose(snapshot: Snapshot, request: Request) -> bool:
    """Whether nothing need be kept free beside a request: there are swaps, or it takes less than a
    step to compute, or nobody decodes."""
    forecast = snapshot.forecast
    is_short = forecast.prefill_s(request.num_tokens) <= forecast.step_s
    return is_short or snapshot.limits.num_host_pages > 0 or not len(snapshot.decoding)


def _has_due(request: Request) -> bool:
    """Whether its place is a due time, and not merely its patience."""
    return next_due_s(request) < math.inf
