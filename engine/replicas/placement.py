"""Who has which request: given to replicas, told by them, and given to others when they die."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.clock import Clock
from octavo.engine.config import Role
from octavo.engine.errors import OverloadedError, QuarantinedError
from octavo.engine.faults.quarantine import Quarantine
from octavo.engine.input.input_processor import Submission
from octavo.engine.input.resumption import rest_of
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.output.transcript import Transcript
from octavo.engine.replicas import messages
from octavo.engine.replicas.any_replica import AnyReplica
from octavo.engine.replicas.continuation import Narrator, transcript_of
from octavo.engine.replicas.messages import LoadReport
from octavo.engine.replicas.moves import Move, MovePrices
from octavo.engine.request import RequestStatus
from octavo.engine.routing.policies import RoutePolicy
from octavo.engine.routing.prefixes import prompt_chunks
from octavo.engine.routing.report import ReplicaReport
from octavo.engine.routing.request import Route, RouteRequest
from octavo.engine.routing.router import Router
from octavo.engine.sampling_params import RequestOutputKind

SUSPECT_DEATHS = 2
"""A request that so many replicas died with is tried again with no other such beside it; if one
dies with it then, it is not given to another."""
MOST_TRIES = 2
"""Replicas that a request is sent to before its client hears that they refused it."""
_NO_LIFE = (-1, 0)


@dataclass(slots=True)
class _Live:
    """A submission under way.

    Attributes:
        submission: as it is sent at first.
        narrator: writes what its readers read.
        where: replica and life; `_NO_LIFE` while none has it.
        num_deaths: replicas that died with it.
        ending: how it is to end, once its replica says so; None while nobody asked.
        move: on its way to another replica, from where it goes on; None while it is not.
        refused_by: replicas that had no room for it.
    """

    submission: Submission
    narrator: Narrator
    where: tuple[int, int] = _NO_LIFE
    num_deaths: int = 0
    ending: tuple[RequestStatus, Exception | None] | None = None
    move: Move | None = None
    refused_by: frozenset[int] = frozenset()


class Placement:
    """The requests under way over several replicas. One thread drives it.

    Args:
        replicas: that take them.
        clock: where time comes from.
        policy: which replica takes a request.
        roles: of each replica; none means that each is for all.

    Attributes:
        touched: whose transcripts have something to tell; whoever reads them empties it.
        prices: of moves.
    """

    def __init__(
        self,
        replicas: Sequence[AnyReplica],
        clock: Clock,
        policy: RoutePolicy,
        roles: Sequence[Role] = (),
    ) -> None:
        self.prices = MovePrices()
        self._roles = roles
        self.touched: dict[Transcript, None] = {}
        self._replicas = replicas
        self._clock = clock
        self._router = Router(len(replicas), policy)
        self._heard: list[LoadReport | None] = [None] * len(replicas)
        self._num_heard = 0
        self._quarantine = Quarantine()
        self._live: dict[str, _Live] = {}
        self._waiting: deque[str] = deque()
        self._suspects: deque[str] = deque()
        self._on_trial: str | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def live_ids(self) -> list[str]:
        """Ids of the submissions that have not ended."""
        return list(self._live)

    def where(self, request_id: str) -> AnyReplica | None:
        """The replica that has a request; None where none has."""
        live = self._live.get(request_id)
        return None if live is None or live.where == _NO_LIFE else self._replicas[live.where[0]]

    def forget_prefixes(self) -> None:
        """No replica has anything cached any more."""
        for replica in self._replicas:
            self._router.prefixes.forget(replica.index)

    def submit(self, submission: Submission) -> None:
        """Gives a submission to a replica, or has it wait for one.

        Raises:
            QuarantinedError: replicas died of its prompt a moment ago.
        """
        for request in submission.sequences:
            self._quarantine.check(request, self._clock.now_s())
        sent = dataclasses.replace(submission, grammar=None)
        if submission.params.output_kind is RequestOutputKind.CUMULATIVE:
            # What was told need not be sent again.
            params = submission.params.replace(output_kind=RequestOutputKind.DELTA)
            sent = dataclasses.replace(sent, params=params)
        live = _Live(sent, Narrator(transcript_of(submission)))
        self._live[submission.request_id] = live
        self._place(submission.request_id, live)

    def end(self, request_id: str, status: RequestStatus, error: Exception | None) -> bool:
        """Ends a live submission, at once where no replica has it.

        Returns:
            Whether there was one with this id.
        """
        live = self._live.get(request_id)
        if live is None:
            return False
        if live.where == _NO_LIFE:
            self._end(live, status, error)
        else:
            live.ending = (status, error)
            self._replicas[live.where[0]].send(messages.Abort(request_id, status, error))
        return True

    def tell(self, output: RequestOutput, where: tuple[int, int]) -> None:
        """Takes in what a replica tells of a request; nothing, if it has it no more.

        Args:
            where: replica and life.
        """
        request_id = output.engine_id
        live = self._live.get(request_id)
        if live is None or live.where != where:
            return
        if self._tries_another(request_id, live, output):
            return
        transcript = live.narrator.transcript
        self.touched[transcript] = None
        live.narrator.take(output)
        if self._role(where[0]) == "prefill" and transcript.sequences[0].token_ids:
            self._hand_off(request_id, live)
        if transcript.finished:
            first = transcript.sequences[0]
            # Who left, or could not be served, says nothing of how long answers are.
            whole = first.finish_reason in ("stop", "length")
            self._router.ended(request_id, len(first.token_ids) if whole else None)
            self._forget(request_id)

    def _tries_another(self, request_id: str, live: _Live, output: RequestOutput) -> bool:
        """Whether a request that a replica has no room for goes to another: the first refusal is
        told unless the router expects it to be in time there."""
        if not isinstance(output.error, OverloadedError) or live.ending is not None:
            return False
        tried = live.refused_by | {live.where[0]}
        among = [index for index in self._among(live) if index not in tried]
        if len(tried) >= MOST_TRIES or not among or live.narrator.generated():
            return False
        self._router.ended(request_id)
        replica = self._route(request_id, live, among, may_refuse=True)
        if replica is None:
            return False
        live.refused_by = tried
        self._send(live, replica)
        return True

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        if request_id == self._on_trial:
            self._on_trial = None
            self._try_next()

    def _end(self, live: _Live, status: RequestStatus, error: Exception | None) -> None:
        """Ends a submission that no replica has any more."""
        request_id = live.submission.request_id
        self._router.ended(request_id)
        self._forget(request_id)
        transcript = live.narrator.transcript
        transcript.sequences[0].request.error = error
        for draft in transcript.sequences:
            draft.finish_reason = draft.finish_reason or status.value
        transcript.finished = True
        self.touched[transcript] = None

    def _place(self, request_id: str, live: _Live) -> None:
        """Gives a submission to a replica, or has it wait for one."""
        among = self._among(live)
        if not among:
            self._waiting.append(request_id)
            return
        replica = self._route(request_id, live, among)
        assert replica is not None
        self._send(live, replica)

    def _among(self, live: _Live) -> list[int]:
        """Replicas that can take a submission."""
        ready = [replica for replica in self._replicas if replica.ready is not None]
        # Those that are late with a sign of life may hang.
        among = [replica.index for replica in ready if not replica.is_quiet]
        among = among or [replica.index for replica in ready]
        return self._fit(live, among) if among else []

    def _route(
        self, request_id: str, live: _Live, among: list[int], *, may_refuse: bool = False
    ) -> int | None:
        """The replica that a submission goes to; None if it would be late at each, where that is a
        reason. Else a replica's own forecast decides whether it is refused."""
        self._hear()
        first = live.submission.sequences[0]
        num_told = sum(len(each.token_ids) for each in live.narrator.generated())
        choice = self._router.route(
            RouteRequest(
                request_id=request_id,
                num_prompt_tokens=first.num_prompt_tokens + num_told,
                chunks=prompt_chunks(
                    first.prompt_token_ids, tenant=first.tenant, cache_salt=first.cache_salt
                ),
                max_tokens=max(1, first.max_tokens - num_told),
                num_sequences=len(live.submission.sequences),
                arrival_s=first.arrival_s,
                priority=first.priority,
                ttft_target_s=None if num_told else first.ttft_target_s,
                tpot_target_s=first.tpot_target_s,
                e2e_target_s=first.e2e_target_s,
                length_class=first.priority.name,
                tried=live.refused_by,
                is_begun=not may_refuse,
            ),
            self._clock.now_s(),
            among=among,
        )
        return choice.replica if isinstance(choice, Route) else None

    def _send(self, live: _Live, replica: int) -> None:
        """Gives a submission, as it stands, to a replica."""
        live.move = None
        rest = rest_of(live.submission, live.narrator.generated())
        is_apart = self._role(replica) == "prefill" or bool(rest.generated)
        if is_apart and rest.params.output_kind is RequestOutputKind.FINAL_ONLY:
            # What comes here is a part: what another told is not told again.
            params = rest.params.replace(output_kind=RequestOutputKind.DELTA)
            rest = dataclasses.replace(rest, params=params)
        live.where = (replica, self._replicas[replica].send(messages.Submit(rest)))

    def _hear(self) -> None:
        """Takes in what replicas reported since the last time."""
        while self._router.num_replicas < len(self._replicas):
            self._router.add_replica()
            self._heard.append(None)
        for replica in self._replicas:
            report = replica.report
            if report is None or report is self._heard[replica.index]:
                continue
            self._heard[replica.index] = report
            self._num_heard += 1
            self._router.report(
                ReplicaReport(
                    replica.index, report.life, self._num_heard, report.taken_s,
                    report.load.standing,
                )
            )  # fmt: skip

    def _role(self, replica: int) -> Role:
        return self._roles[replica] if self._roles else "both"

    def _fit(self, live: _Live, among: list[int]) -> list[int]:
        """Of replicas that are ready, those that are for a submission as it stands: where it is
        moved to, or where its prompt or its decoding belongs."""
        if live.move is not None and self._is_there(live.move.target):
            return [live.move.target[0]]
        decoders = [index for index in among if self._role(index) != "prefill"]
        if live.narrator.generated() or not decoders:
            return decoders or among
        prefillers = [index for index in among if self._role(index) != "decode"]
        if len(prefillers) == len(among):
            return among
        decoder = self._replicas[self._least_busy(decoders)]
        if not prefillers or decoder.report is None or decoder.ready is None:
            return decoders
        num_tokens = live.submission.sequences[0].num_prompt_tokens
        page_size = decoder.ready.limits.page_size
        is_apart = self.prices.is_better_apart(num_tokens, page_size, decoder.report)
        return prefillers if is_apart else decoders

    def _least_busy(self, among: Sequence[int]) -> int:
        return min(among, key=lambda index: float(self._router.view.own_work[index]))

    def _is_there(self, where: tuple[int, int]) -> bool:
        """Whether a life of a replica takes requests."""
        replica = self._replicas[where[0]]
        return replica.ready is not None and replica.life == where[1] and not replica.is_quiet

    def _hand_off(self, request_id: str, live: _Live) -> None:
        """Moves a submission that has begun to speak to where it is decoded, if it can be."""
        ready = [each.index for each in self._replicas if each.ready and not each.is_quiet]
        decoders = [index for index in ready if self._role(index) != "prefill"]
        if decoders and not live.narrator.transcript.finished:
            self.move(request_id, self._least_busy(decoders))

    def move(self, request_id: str, replica: int) -> bool:
        """Begins to move a submission to another replica, where it goes on; its reader sees a short
        pause.

        Returns:
            Whether it is on its way now: it is under way, elsewhere, and that replica takes it.
        """
        live, target = self._live.get(request_id), self._replicas[replica]
        if live is None or live.move is not None or live.ending is not None:
            return False
        if live.where == _NO_LIFE or live.where[0] == replica or request_id == self._on_trial:
            return False
        where = (replica, target.life)
        if not self._is_there(where):
            return False
        live.move = Move(where, self._clock.now_s())
        self._replicas[live.where[0]].send(messages.GivePages(request_id, frozenset()))
        return True

    def take_pages(self, given: messages.PagesGiven, where: tuple[int, int]) -> None:
        """Passes on what a replica gives of a submission that is moved, and has it let go of it
        once that is nearly all.

        Args:
            where: replica and life.
        """
        live = self._live.get(given.request_id)
        if live is None or live.where != where or live.move is None:
            return
        move, source = live.move, self._replicas[where[0]]
        if not self._is_there(move.target):
            live.move = None  # it stays
        elif given.batch is not None:
            move.take(given.batch.names)
            self._replicas[move.target[0]].send(messages.TakePages(given.batch))
        elif move.is_over():
            self.prices.observe(move, self._clock.now_s())
            # Where prompts are computed, each token more takes a step of theirs.
            waits = self._role(where[0]) != "prefill"
            source.send(messages.Release(given.request_id, frozenset(move.known), waits))
        else:
            source.send(messages.GivePages(given.request_id, frozenset(move.known)))

    def begin(self, where: tuple[int, int]) -> None:
        """A replica takes requests, with nothing under way and nothing cached: also those that no
        replica could take before.

        Args:
            where: replica and life.
        """
        self._hear()
        self._router.started(*where, self._clock.now_s())
        waiting, self._waiting = self._waiting, deque()
        for request_id in waiting:
            live = self._live.get(request_id)
            if live is not None and live.where == _NO_LIFE:
                self._place(request_id, live)

    def bury(self, where: tuple[int, int], cause: str) -> None:
        """Gives what a dead replica had under way to others.

        Args:
            where: replica and life.
            cause: of its death, as a phrase.
        """
        self._hear()
        self._router.lost(where[0], where[1] + 1)
        for request_id, live in list(self._live.items()):
            if live.where == where:
                self._lose(request_id, live, cause, has_died=True)
        self._try_next()

    def take_again(self, returned: messages.Returned, where: tuple[int, int]) -> None:
        """Gives what a replica returned to another; nothing, if that replica has it no more.

        Args:
            where: replica and life.
        """
        live = self._live.get(returned.request_id)
        if live is not None and live.where == where:
            self._lose(returned.request_id, live, returned.cause, has_died=returned.has_died)
            self._try_next()

    def _lose(self, request_id: str, live: _Live, cause: str, *, has_died: bool) -> None:
        """A replica has a submission no more: another goes on with it, unless it is to blame."""
        self._router.ended(request_id)
        live.where = _NO_LIFE
        if live.ending is not None:
            self._end(live, *live.ending)
            return
        live.num_deaths += has_died
        if has_died and request_id == self._on_trial:
            reason = f"{live.num_deaths} replicas died with request {request_id} ({cause})"
            self._quarantine.put(live.submission.sequences[0], self._clock.now_s())
            self._end(live, RequestStatus.FAILED, QuarantinedError(reason))
        elif live.num_deaths < SUSPECT_DEATHS or request_id == self._on_trial:
            self._place(request_id, live)
        else:
            self._suspects.append(request_id)

    def _try_next(self) -> None:
        """Lets the next of those run that may have killed replicas, if none of them does."""
        while self._on_trial is None and self._suspects:
            request_id = self._suspects.popleft()
            live = self._live.get(request_id)
            if live is not None:
                self._on_trial = request_id
                self._place(request_id, live)
