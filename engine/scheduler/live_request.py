"""A live request and what only the scheduler knows about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s

if TYPE_CHECKING:
    from octavo.engine.scheduler.tenant_lines import Line

ALWAYS_READY = 2**31 - 1


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """The scheduler's record of one request, from `add` to its terminal event.

    Attributes:
        request: the request itself.
        number: 0, 1, 2, … in order of `add`; breaks ties of a policy's order.
        pages: its KV pages.
        tenant: its tenant's number, as `TenantCounters.enter` gave it.
        stop_ids: every token id that ends it.
        num_prompt_tokens: length of the prompt.
        last_position: the position of its last possible token, whose KV is never needed: rows
            decode while `num_computed_tokens` is below it.
        end_due_s: when its last token is due; infinity if never.
        prefill_end: known tokens at its newest admission, all to be computed before it decodes.
        num_committed_tokens: of those, how many committed steps have computed.
        num_scored_prompt_tokens: prompt log-probabilities handed out so far; a recomputed prompt
            does not hand them out again.
        is_placed: whether the device row was told of this request since it was last admitted;
            false while it waits.
        place: where it stands among its tenant's while it waits: the policy's place when it began
            to.
        line: where it waits, among others of its tenant; None while it does not.
        waiting_since_s: when it last began to wait.
        is_pinned: whether it has waited its longest and comes before all that have not.
        is_demoted: whether it is served only when no other waits: it could not be in time.
        ready_position: last position whose step may be planned; `ALWAYS_READY` for a request that
            is not gated.
        is_live: false from the terminal event on.
        turn: 0, 1, 2, … in the order in which rows began to decode.
    """

    request: Request
    number: int
    pages: SequencePages
    tenant: int = 0
    stop_ids: frozenset[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    last_position: int = field(init=False)
    ready_position: int = field(init=False)
    end_due_s: float = field(init=False)
    prefill_end: int = 0
    num_committed_tokens: int = 0
    num_scored_prompt_tokens: int = 0
    is_placed: bool = False
    waiting_since_s: float = 0.0
    is_pinned: bool = False
    is_demoted: bool = False
    place: tuple[float, ...] = ()
    line: Line | None = None
    is_live: bool = True
    turn: int = 0

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.request.stop_token_ids)
        self.num_prompt_tokens = self.request.num_prompt_tokens
        self.last_position = self.request.max_total_tokens - 1
        self.end_due_s = end_due_s(self.request)
        is_gated = self.request.is_gated
        self.ready_position = self.request.num_tokens - 1 if is_gated else ALWAYS_READY

    @property
    def awaits_release(self) -> bool:
        """Whether it is gated and what its next token needs is not there yet."""
        return self.ready_position < self.request.num_tokens - 1
