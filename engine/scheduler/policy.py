"""A policy: the decisions of a scheduler that are a matter of taste, as pure functions.

`Snapshot` is what a policy sees, `Policy` what it answers. Policies themselves are in `policies/`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import Place
from octavo.engine.scheduler.row_table import RowTable
from octavo.engine.scheduler.rows import NO_ROWS, Rows
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.scheduler.waiting_columns import WaitingColumns, WaitingFigures


def _no_lead(request: Request) -> float:
    return 0.0


# Not frozen: the planner renews one in every plan, which takes less than making another.
@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """The state a policy decides on. Its requests are for reading only.

    The sequences are views of the live state, so that making a snapshot costs nothing: they hold
    still for the length of the call they are passed to.

    Attributes:
        now_s: engine clock.
        starts_s: when the device is expected to begin this step: now, or when it is done with the
            steps that were dispatched before.
        waiting: live requests without a row: in the order of their places, or of acceptance if the
            policy gives none.
        running: live requests with a row, in order of acceptance.
        num_available_pages: pages that could be allocated now.
        num_awaiting: waiting requests that would have been admitted, if a running prompt were not
            computing what they begin with.
        limits: what a step can take.
        forecast: what steps, outputs and transfers are expected to take.
        rows: the running rows' goals and figures, by slot. Requests admitted in the plan being
            made are entered before victims are looked for, or when it is done.
        waiting_columns: figures of the waiting requests, in their order, of a policy that measures.
        prefilling: running requests whose prompt is not computed yet, but for `demoted` ones.
        demoted: those of them that are served only when nobody else waits.
        decoding: the rows that can decode in the step being planned.
        pinned: ids of waiting requests that have waited their longest.
        lead: tokens by which a live request's tenant was served more than the least served tenant
            that waits, as `TenantLines.lead`; 0 for all where tenants take no turns.
    """

    now_s: float
    starts_s: float = 0.0
    waiting: Sequence[Request]
    running: Sequence[Request]
    num_available_pages: int
    limits: StepLimits
    forecast: Forecast
    rows: RowTable
    num_awaiting: int = 0
    waiting_columns: WaitingColumns = field(default_factory=WaitingColumns)
    prefilling: Sequence[Request] = ()
    demoted: Sequence[Request] = ()
    decoding: Rows = NO_ROWS
    pinned: Container[str] = ()
    lead: Callable[[Request], float] = _no_lead

    def forget_requests(self) -> None:
        """Names nobody any more who may end before it is renewed."""
        self.prefilling = self.demoted = ()
        self.decoding = NO_ROWS

    def is_pinned(self, request: Request) -> bool:
        """Whether a waiting request has waited its longest."""
        return request.request_id in self.pinned


class Admission(NamedTuple):
    """What becomes of those who wait, before any of them is tried.

    Attributes:
        limit: most requests to admit in this plan; None for as many as fit.
        rejected: waiting requests to give up now, each with the reason.
        demoted: requests to be served only when nobody else waits, until they are restored.
        restored: demoted requests to be served in their place again.
    """

    limit: int | None = None
    rejected: Sequence[tuple[Request, str]] = ()
    demoted: Sequence[Request] = ()
    restored: Sequence[Request] = ()


class TenantTurns(NamedTuple):
    """How the tenants' leads enter the order of waiting requests.

    Attributes:
        token_s: seconds that are added to the first component of a place for each token by which
            the request's tenant was served more than the least served tenant that waits.
        has_due: whether that component is a due time. Of requests that have none, those of the
            least served tenant come first, whatever their places: see `TenantLines`.
    """

    token_s: Callable[[Forecast], float]
    has_due: Callable[[Request], bool]


class Refusal(NamedTuple):
    """Why a new request is not even let in."""

    reason: str


MAX_STEPS_WHILE_WAITING = 2
"""Decode iterations in one dispatch while somebody waits for a row or for pages to come free."""

HOPELESS = "could no longer meet its target"
"""The reason of a request that is rejected or refused because it would be late."""


def in_given_order(snapshot: Snapshot, requests: Sequence[Request]) -> list[Request]:
    """Requests as they come."""
    return list(requests)


def admit_everyone(snapshot: Snapshot) -> Admission:
    """Nobody is rejected, as many are admitted as fit."""
    return Admission()


def nothing_is_due(request: Request) -> bool:
    """No request has a due time."""
    return False


def refuse_nobody(snapshot: Snapshot, request: Request) -> Refusal | None:
    """Everyone may wait."""
    return None


def whole_budget(snapshot: Snapshot) -> int:
    """As many tokens as a step can take."""
    return snapshot.limits.max_num_batched_tokens


def no_idle_rows(snapshot: Snapshot) -> Sequence[int]:
    """Every row decodes in every step."""
    return ()


def whole_chunk(snapshot: Snapshot, request: Request, num_missing: int, budget: int) -> int:
    """As much of the prompt as the step has room for."""
    return min(num_missing, budget)


def no_victims(snapshot: Snapshot, beneficiary: Request, num_pages: int) -> list[Request]:
    """Nobody but the one in need."""
    return [beneficiary]


def may_find_victims(snapshot: Snapshot, beneficiary: Request) -> bool:
    """Only `choose_victims` knows."""
    return True


def room_to_grow(snapshot: Snapshot, request: Request) -> int:
    """A page for each running row after a request's first preemption, two from then on."""
    num_preemptions = request.metrics.num_preemptions
    return min(num_preemptions, 2) * len(snapshot.running) if num_preemptions else 0


def cheaper_by_swap(snapshot: Snapshot, victim: Request) -> bool:
    """Whether copying the victim's pages out and back beats computing them again.

    Both directions are priced, at the measured speed of the copies; the prefix cache is not
    counted on, as pages are short when this is asked.
    """
    forecast = snapshot.forecast
    num_tokens = victim.num_computed_tokens
    num_pages = snapshot.limits.needs.held(num_tokens)
    return 2 * num_pages * forecast.page_copy_s < forecast.prefill_s(num_tokens)


def decode_steps(*, limit: int, longest: int, shortest: int, someone_waits: bool) -> int:
    """Decode iterations for a step without prefill: a power of two, ≥ 1.

    No iteration is spent in which every row is past its length limit. While somebody waits, no row
    is kept past its limit, and few iterations run, as a row that stops early is missed by the one
    who waits.

    Args:
        limit: most iterations that the engine was set up for.
        longest, shortest: most and fewest tokens that a row of the step may still emit, ≥ 1.
        someone_waits: whether a request waits that could not be admitted.
    """
    most = min(limit, longest)
    if someone_waits:
        most = min(most, shortest, MAX_STEPS_WHILE_WAITING)
    return 1 << (most.bit_length() - 1)


def steps_by_length(snapshot: Snapshot, limit: int, longest: int, shortest: int) -> int:
    """As many iterations as no row is kept past its end by, few while somebody waits."""
    someone_waits = len(snapshot.waiting) > 0
    return decode_steps(
        limit=limit, longest=longest, shortest=shortest, someone_waits=someone_waits
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Pure functions of a snapshot. Each has a default: a policy says only what is its own.

    Attributes:
        name: what users call it.
        order: the given requests, first to be served first. Requests come in order of acceptance,
            so a stable sort keeps that order between equals. Not asked where `place` is given.
        measure: figures to keep of each waiting request, given its place, for a policy that looks
            at many of them in every plan (`Snapshot.waiting_columns`).
        place: for an order that holds still while a request waits: the key it is sorted by, so
            that the queue is kept sorted instead of being sorted again in every plan. Asked when a
            request begins to wait, and for running ones when they are compared. None when urgency
            moves with time or load.
        turns: how tenants take turns, for a policy that gives places; None where all requests are
            one tenant's to it. With one tenant that waits it changes nothing.
        admit: who is given up before anyone is admitted, and how many may be admitted.
        refuse: asked at the door, before a request may wait.
        budget: most tokens of a step in which prompts advance. Where prompts are not split and no
            row decodes, the step's first may exceed it, as it would else wait for ever.
        idle_rows: which of the snapshot's decode rows are left out of this step, by index,
            ascending: rows whose next token is not due yet, where the others' would be late beside
            them. No row may be left out for ever.
        chunk: tokens of one prompt in this step, 1 ≤ … ≤ `budget`; called with its missing tokens
            and the budget that is left.
        choose_victims: running requests to take pages from, one after the other, until the
            beneficiary finds the pages it needs; called with it and the number of pages missing.
            A running beneficiary may be among them, and then ends the list. For a waiting one (see
            `preempts_for_waiting`) the list must be enough, or empty: then nobody gives way.
        may_choose_victims: asked before `choose_victims` is, for a waiting request: false if that
            would name nobody among the decode rows, where it can be said for less than naming them
            takes. The snapshot may name rows that have given way since; its columns are as of now.
        rules_out_victims: asked before `may_choose_victims` is: true only if that would be false,
            where the bounds of the columns say so; those who were admitted in the same plan are in
            the bounds, and in nothing else. None to ask for that at once.
        headroom: pages that must stay free when a request is admitted beside others, for all of
            them to grow into.
        may_use_watermark: whether a request that is admitted beside others may take of the pages
            that are kept free for rows to grow.
        most_headroom: asked once a plan, before `headroom` is: with the pages of a request's
            `max_tokens` added, a number that `headroom` is not above for any request. None to ask
            for that at once.
        swap_or_recompute: whether a victim's pages should be copied to the host, where there is
            a host tier. False to compute them again.
        num_steps: decode iterations of a step without prefill: a power of two, called with the
            most that the engine was set up for, and the most and fewest tokens that a row of the
            step may still emit.
        preempts_for_waiting: whether running rows may give way to a waiting request.
        merges_prompts: whether a waiting request's prompt goes before a running one that comes
            after it in the order.
        max_skipped: waiting requests that others may overtake in one plan because they do not
            fit; 0 for strict order.
        max_wait_s: how long a request waits of one stretch before it is pinned: then it comes
            before all that are not, and is victim to none of them. None for no such bound.
        chunks_prompts: whether a prompt may be split over steps.
        prefills_alone: whether a step with prompts holds no decode rows.
        uses_declared_lengths: whether `Request.known_output_len` is believed.
        with_targets: the policy that takes over while any live request has a target; None for
            this one always. Its own `with_targets` is not looked at.
    """

    name: str
    order: Callable[[Snapshot, Sequence[Request]], list[Request]] = in_given_order
    place: Callable[[Request, Forecast], Place] | None = None
    measure: Callable[[Request, Place, Forecast], WaitingFigures] | None = None
    turns: TenantTurns | None = None
    admit: Callable[[Snapshot], Admission] = admit_everyone
    refuse: Callable[[Snapshot, Request], Refusal | None] = refuse_nobody
    budget: Callable[[Snapshot], int] = whole_budget
    idle_rows: Callable[[Snapshot], Sequence[int]] = no_idle_rows
    chunk: Callable[[Snapshot, Request, int, int], int] = whole_chunk
    choose_victims: Callable[[Snapshot, Request, int], list[Request]] = no_victims
    may_choose_victims: Callable[[Snapshot, Request], bool] = may_find_victims
    rules_out_victims: Callable[[Snapshot, Request], bool] | None = None
    headroom: Callable[[Snapshot, Request], int] = room_to_grow
    may_use_watermark: Callable[[Snapshot, Request], bool] = lambda snapshot, request: False
    most_headroom: Callable[[Snapshot], float] | None = None
    swap_or_recompute: Callable[[Snapshot, Request], bool] = cheaper_by_swap
    num_steps: Callable[[Snapshot, int, int, int], int] = steps_by_length
    preempts_for_waiting: bool = False
    merges_prompts: bool = False
    max_skipped: int = 0
    max_wait_s: float | None = None
    chunks_prompts: bool = True
    prefills_alone: bool = False
    uses_declared_lengths: bool = False
    with_targets: Policy | None = None
