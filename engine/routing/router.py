"""`Router`: a front's memory of its fleet around a policy, which is a pure function of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from octavo.engine.request import Priority
from octavo.engine.routing.baselines import OUTPUT_WEIGHT
from octavo.engine.routing.policies import RoutePolicy
from octavo.engine.routing.prefixes import CHUNK_TOKENS, MAX_CHUNKS, PrefixMemory
from octavo.engine.routing.report import ReplicaReport
from octavo.engine.routing.request import Route, RouteRefusal, RouteRequest
from octavo.engine.routing.view import FleetView

FIRST_OUTPUT_LEN = 128
"""Tokens that an answer is taken to have while none has ended."""
LENGTH_SHARE = 0.05
"""Of the newest answer in the running mean of lengths."""
NOBODY_RETRY_S = 1.0
"""After how long a client comes back that no replica could take."""


class _Taken(NamedTuple):
    """A request under way."""

    replica: int
    work: float
    length_class: str


class _Sent(NamedTuple):
    """What a request adds to a replica's report until one tells of it."""

    sent_s: float
    request_id: str
    priority: Priority
    prompt_tokens: float
    output: float
    kv_tokens: float
    rate: float
    pace_s: float


class Router:
    """Chooses replicas, and keeps what it knows of them. No clock, no I/O; not thread-safe.

    The same reports, requests and times give the same answers. Several routers over one fleet share
    nothing: each sees the others' requests in the replicas' reports.

    Args:
        num_replicas: how many there are; indices that no replica has yet may be among them.
        policy: chooses.
        most_chunks: beginnings of prompts remembered of each replica that reports no capacity.
        quiet_s: a replica that told nothing for so long takes requests only if all did; None where
            nobody reports, or somebody else watches for that.
    """

    def __init__(
        self,
        num_replicas: int,
        policy: RoutePolicy,
        *,
        most_chunks: int = MAX_CHUNKS,
        quiet_s: float | None = None,
    ) -> None:
        self.view = FleetView.blank(num_replicas)
        self.prefixes = PrefixMemory(num_replicas, most_chunks)
        self._policy = policy
        self._quiet_s = quiet_s
        self._taken: dict[str, _Taken] = {}
        self._sent: list[deque[_Sent]] = [deque() for _ in range(num_replicas)]
        self._newest = [(0, -1)] * num_replicas  # (life, sequence)
        self._taken_s = np.zeros(num_replicas)
        self._mean_output_len: dict[str, float] = {}
        self._can_take = np.ones(num_replicas, np.bool_)

    @property
    def num_replicas(self) -> int:
        """How many there are."""
        return len(self._sent)

    def add_replica(self) -> None:
        """There is one more, of the next index, of which nothing is known."""
        self.view.add_replica()
        self.prefixes.add_replica()
        self._sent.append(deque())
        self._newest.append((0, -1))
        self._taken_s = np.append(self._taken_s, 0.0)
        self._can_take = np.append(self._can_take, True)

    # What it hears.

    def report(self, report: ReplicaReport) -> None:
        """Takes in a replica's report, unless a newer one came before it."""
        at = report.replica
        if (report.life, report.sequence) <= self._newest[at]:
            return
        self._newest[at] = (report.life, report.sequence)
        self._taken_s[at] = report.taken_s
        self._can_take[at] = not report.is_draining
        self.view.take(report)
        self.prefixes.limit(at, max(1, report.standing.kv_tokens // CHUNK_TOKENS))
        for chunks in report.prefixes:
            self.prefixes.learn(at, chunks)
        sent, is_changed = self._sent[at], False
        while sent and sent[0].sent_s <= report.taken_s:
            sent.popleft()
            is_changed = True
        if is_changed:
            self._sum_up(at)

    def started(self, replica: int, life: int, now_s: float) -> None:
        """A replica serves from now on: idle, and with nothing cached."""
        self.lost(replica, life)
        self._taken_s[replica] = now_s
        self._can_take[replica] = True

    def lost(self, replica: int, life: int) -> None:
        """A replica is gone until `started`; its requests are reported by `ended`.

        Args:
            life: reports of earlier ones count no more.
        """
        self.prefixes.forget(replica)
        self._newest[replica] = (life, -1)
        self._sent[replica].clear()
        self._sum_up(replica)
        self.view.num_running[replica] = self.view.num_waiting[replica] = 0.0
        self.view.prompt_tokens[:, replica] = 0.0
        self.view.busy_s[replica] = self.view.output_tokens[replica] = 0.0
        self.view.pace_rate[replica] = 0.0
        self.view.least_pace_s[replica] = np.inf
        self.view.free_tokens[replica] = self.view.kv_tokens[replica]
        self._can_take[replica] = False

    def drain(self, replica: int) -> None:
        """A replica takes no new requests from now on."""
        self._can_take[replica] = False

    # What it decides.

    def route(
        self, request: RouteRequest, now_s: float, *, among: Collection[int] | None = None
    ) -> Route | RouteRefusal:
        """Places a request, which counts until `ended`.

        Args:
            request: to be placed; its id is of none under way.
            now_s: on the clock of the reports.
            among: replicas that can take it; None for all that are not lost or draining.
        """
        view = self.view
        candidates = self._candidates(request, now_s, among)
        if not len(candidates):
            return RouteRefusal("no replica takes requests", NOBODY_RETRY_S)
        known = self.prefixes.num_known(request.chunks)
        view.candidates, view.cached_tokens = candidates, CHUNK_TOKENS * known
        view.output_len = request.num_sequences * min(
            float(request.max_tokens), self.expected_len(request.length_class)
        )
        view.age_s = now_s - self._taken_s
        choice = self._policy(view, request, now_s)
        if isinstance(choice, Route):
            self._take(choice.replica, request, now_s)
        return choice

    def expected_len(self, length_class: str) -> float:
        """Tokens that an answer of a class is expected to have."""
        return self._mean_output_len.get(length_class, float(FIRST_OUTPUT_LEN))

    def ended(self, request_id: str, output_len: int | None = None) -> None:
        """A request is over, or taken back.

        Args:
            output_len: tokens of its first answer; None where that tells nothing of others.
        """
        taken = self._taken.pop(request_id, None)
        if taken is None:
            return
        at, view = taken.replica, self.view
        view.own_requests[at] -= 1
        # Nothing under way is no work at all, whatever was lost in adding up.
        left = view.own_work[at] - taken.work
        view.own_work[at] = left if view.own_requests[at] else 0.0
        if output_len is not None:
            mean = self.expected_len(taken.length_class)
            mean += LENGTH_SHARE * (output_len - mean)
            self._mean_output_len[taken.length_class] = mean
        if any(sent.request_id == request_id for sent in self._sent[at]):
            self._sent[at] = deque(s for s in self._sent[at] if s.request_id != request_id)
            self._sum_up(at)

    def _candidates(
        self, request: RouteRequest, now_s: float, among: Collection[int] | None
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if among is not None:
            return np.array(sorted(among), np.int64)
        can_take = self._can_take
        if self._quiet_s is not None:
            heard = can_take & (now_s - self._taken_s <= self._quiet_s)
            can_take = heard if heard.any() else can_take
        if request.tried:
            can_take = can_take.copy()
            can_take[list(request.tried)] = False
        return can_take.nonzero()[0]

    def _take(self, at: int, request: RouteRequest, now_s: float) -> None:
        view = self.view
        missing = max(0, request.num_prompt_tokens - int(view.cached_tokens[at]))
        work = missing + OUTPUT_WEIGHT * view.output_len
        self._taken[request.request_id] = _Taken(at, work, request.length_class)
        view.num_routed += 1
        view.own_work[at] += work
        view.own_requests[at] += 1
        sent = _Sent(
            now_s, request.request_id, request.priority, float(max(missing, 1)), view.output_len,
            missing + view.output_len, 1.0 / (request.tpot_target_s or np.inf),
            request.tpot_target_s or np.inf,
        )  # fmt: skip
        self._sent[at].append(sent)
        self._add(at, sent)
        self.prefixes.learn(at, request.chunks)

    def _add(self, at: int, sent: _Sent) -> None:
        view = self.view
        view.sent_tokens[sent.priority :, at] += sent.prompt_tokens
        view.sent_requests[at] += 1
        view.sent_output[at] += sent.output
        view.sent_kv[at] += sent.kv_tokens
        view.sent_rate[at] += sent.rate
        view.sent_least_pace_s[at] = min(view.sent_least_pace_s[at], sent.pace_s)

    def _sum_up(self, at: int) -> None:
        view = self.view
        view.sent_tokens[:, at] = 0.0
        for column in (view.sent_requests, view.sent_output, view.sent_kv, view.sent_rate):
            column[at] = 0.0
        view.sent_least_pace_s[at] = np.inf
        for sent in self._sent[at]:
            self._add(at, sent)
