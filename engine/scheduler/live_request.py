"""A live request and what only the scheduler knows about it, and the register of all of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.prefix_lookup import NO_REUSE, Reuse
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.pooling.pooled_sum import NOTHING_POOLED, PooledSum
from octavo.engine.request import Request

Place = tuple[float, ...]
"""A request's place in an order that holds still while it waits; smaller is served first. What its
tenant was served is no part of it."""

ALWAYS_READY = 2**31 - 1

_NOBODY: dict[int, LiveRequest] = {}


def nobody() -> dict[int, LiveRequest]:
    """An empty dictionary that all records share: code that adds to it makes another first."""
    return _NOBODY


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
        prefill_end: known tokens at its newest admission, all to be computed before it decodes.
        num_committed_tokens: of those, how many committed steps have computed.
        num_scored_prompt_tokens: prompt log-probabilities handed out so far; a recomputed prompt
            does not hand them out again.
        pooled: of a pooled request, what it has summed so far.
        is_placed: whether a plan has set the device's row for this request since it was last
            admitted; false while it waits, and once forced tokens were appended.
        goes_on: whether its known tokens are what its grammar forced after it had decoded: it is
            no new prompt, and its row is served before those.
        place: where it stands among its tenant's while it waits: the policy's place when it began
            to.
        waiting_since_s: when it last began to wait.
        is_pinned: whether it has waited its longest and comes before all that have not.
        is_demoted: whether it is served only when no other waits: it could not be in time.
        ready_position: last position whose step may be planned; `ALWAYS_READY` for a request that
            has no grammar.
        is_live: false from the terminal event on.
        turn: 0, 1, 2, … in the order in which rows began to decode.

    What `RemainingWork` knows of it:

    Attributes:
        reuse: while it waits, pages that it need not compute.
        leaders: the requests that compute those of them which are not there yet, in order.
        num_first_led: pages that there will be once the first leader has computed them.
        dependents: waiting requests that it leads, by number.
        follows: the leader that it was passed over for.
        followers: the requests that were passed over for it, by number.
        computes: the first page that no other computes before it, if it is to be found by that.
        computes_at: while it waits, how many pages come before that one; -1 if `RemainingWork.seat`
            must hear of its admission in any case.
        watched: pages whose coming or going changes its estimate.
        is_stale: whether anything has changed since it was estimated.
        goes_alone: whether it was admitted although a running prompt computes its next page, as
            waiting would have made it late.
        num_queued_reusable: `Request.num_reusable_tokens` when it was put in its place.
        prefill_due_s: when its prompt must be computed.
    """

    request: Request
    number: int
    pages: SequencePages
    tenant: int = 0
    stop_ids: frozenset[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    last_position: int = field(init=False)
    ready_position: int = field(init=False)
    prefill_end: int = 0
    num_committed_tokens: int = 0
    num_scored_prompt_tokens: int = 0
    pooled: PooledSum = NOTHING_POOLED
    is_placed: bool = False
    goes_on: bool = False
    waiting_since_s: float = 0.0
    is_pinned: bool = False
    is_demoted: bool = False
    place: Place = ()
    is_live: bool = True
    turn: int = 0
    reuse: Reuse = NO_REUSE
    leaders: tuple[LiveRequest, ...] = ()
    num_first_led: int = 0
    dependents: dict[int, LiveRequest] = field(default_factory=nobody)
    follows: LiveRequest | None = None
    followers: dict[int, LiveRequest] = field(default_factory=nobody)
    computes: PageHash | None = None
    computes_at: int = 0
    watched: frozenset[PageHash] = frozenset()
    is_stale: bool = False
    goes_alone: bool = False
    num_queued_reusable: int = 0
    prefill_due_s: float = math.inf

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.request.stop_token_ids)
        self.num_prompt_tokens = self.request.num_prompt_tokens
        self.last_position = self.request.max_total_tokens - 1
        has_grammar = self.request.has_grammar
        self.ready_position = self.request.num_tokens - 1 if has_grammar else ALWAYS_READY

    @property
    def is_behind(self) -> bool:
        """Whether it is served only when no other waits: it was demoted, and so were all requests
        that wait for what it computes."""
        return self.is_demoted and all(other.is_demoted for other in self.followers.values())

    @property
    def lacks_sums(self) -> bool:
        """Whether the host holds a swapped request further than its hidden states were summed."""
        pooling = self.request.pooling
        if pooling is None or not pooling.needs_every_token:
            return False
        return self.pooled.num_tokens != self.pages.num_host_tokens

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for what its grammar allows next."""
        return self.ready_position < self.request.num_tokens - 1


class LiveRequests:
    """The register of live requests, by id, and what they are together.

    Attributes:
        num_added: requests that were ever accepted: the number of the next one.
        num_with_targets: live requests that were promised anything.
        num_with_grammar: live requests that keep to a grammar.
        stop_ids: every token id that ends a live request -> how many of them.
    """

    def __init__(self) -> None:
        self.num_added = 0
        self.num_with_targets = 0
        self.num_with_grammar = 0
        self.stop_ids: dict[int, int] = {}
        self._by_id: dict[str, LiveRequest] = {}
        # A heap of (deadline, number, record), in which ended requests stay for some time.
        self._deadlines: list[tuple[float, int, LiveRequest]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Live requests in order of acceptance."""
        return iter(self._by_id.values())

    def get(self, request_id: str) -> LiveRequest | None:
        """The live request with this id, or None."""
        return self._by_id.get(request_id)

    def entry(self, request: Request) -> LiveRequest:
        """The record of a live request."""
        return self._by_id[request.request_id]

    def find(self, request: Request) -> LiveRequest | None:
        """The record of a request, or None if it has ended."""
        return self._by_id.get(request.request_id)

    def enter(self, entry: LiveRequest) -> None:
        """A request becomes live, whose id no other has."""
        request = entry.request
        assert request.request_id not in self._by_id, request.request_id
        self._by_id[request.request_id] = entry
        for token_id in entry.stop_ids:
            self.stop_ids[token_id] = self.stop_ids.get(token_id, 0) + 1
        self.num_with_targets += request.has_target
        self.num_with_grammar += request.has_grammar
        if request.deadline_s is not None:
            if len(self._deadlines) > 2 * len(self._by_id) + 64:
                self._deadlines = [item for item in self._deadlines if item[2].is_live]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline_s, entry.number, entry))

    def pop_late(self, now_s: float) -> LiveRequest | None:
        """The live request whose deadline lies furthest before `now_s`, which the caller ends; None
        if there is none."""
        while self._deadlines and self._deadlines[0][0] < now_s:
            entry = heapq.heappop(self._deadlines)[2]
            if entry.is_live:
                return entry
        return None

    def leave(self, entry: LiveRequest) -> None:
        """A live request has ended."""
        request = entry.request
        del self._by_id[request.request_id]
        for token_id in entry.stop_ids:
            if self.stop_ids[token_id] == 1:
                del self.stop_ids[token_id]
            else:
                self.stop_ids[token_id] -= 1
        self.num_with_targets -= request.has_target
        self.num_with_grammar -= request.has_grammar
        entry.is_live = False

    def check_integrity(self) -> None:
        """Asserts that the counts are those of the live requests."""
        assert all(entry.is_live for entry in self)
        assert self.num_with_targets == sum(entry.request.has_target for entry in self)
        assert self.num_with_grammar == sum(entry.request.has_grammar for entry in self)
        stop_ids: dict[int, int] = {}
        for entry in self:
            for token_id in entry.stop_ids:
                stop_ids[token_id] = stop_ids.get(token_id, 0) + 1
        assert self.stop_ids == stop_ids
