"""Who has which request: given to replicas, told by them, and given to others when they die."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.clock import Clock
from octavo.engine.config import Role
from octavo.engine.errors import QuarantinedError
from octavo.engine.faults.quarantine import Quarantine
from octavo.engine.input.input_processor import Submission
from octavo.engine.input.resumption import rest_of
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.output.transcript import Transcript
from octavo.engine.replicas import messages
from octavo.engine.replicas.any_replica import AnyReplica
from octavo.engine.replicas.continuation import Narrator, transcript_of
from octavo.engine.replicas.moves import Move, MovePrices
from octavo.engine.replicas.router import Router
from octavo.engine.request import RequestStatus
from octavo.engine.sampling_params import RequestOutputKind

SUSPECT_DEATHS = 2
"""A request that so many replicas died with is tried again with no other such beside it; if one
dies with it then, it is not given to another."""
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
    """

    submission: Submission
    narrator: Narrator
    where: tuple[int, int] = _NO_LIFE
    num_deaths: int = 0
    ending: tuple[RequestStatus, Exception | None] | None = None
    move: Move | None = None


class Placement:
    """The requests under way over several replicas. One thread drives it.

    Args:
        replicas: that take them.
        clock: where time comes from.
        roles: of each replica; none means that each is for all.

    Attributes:
        touched: whose transcripts have something to tell; whoever reads them empties it.
        prices: of moves.
    """

    def __init__(
        self, replicas: Sequence[AnyReplica], clock: Clock, roles: Sequence[Role] = ()
    ) -> None:
        self.prices = MovePrices()
        self._roles = roles or ("both",) * len(replicas)
        self.touched: dict[Transcript, None] = {}
        self._replicas = replicas
        self._clock = clock
        self._router = Router(len(replicas))
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
            self._router.forget(replica.index)

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
        transcript = live.narrator.transcript
        self.touched[transcript] = None
        live.narrator.take(output)
        if self._roles[where[0]] == "prefill" and transcript.sequences[0].token_ids:
            self._hand_off(request_id, live)
        if transcript.finished:
            first = transcript.sequences[0]
            # Who left, or could not be served, says nothing of how long answers are.
            whole = first.finish_reason in ("stop", "length")
            self._router.ended(request_id, len(first.token_ids) if whole else None)
            self._forget(request_id)

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
        ready = [replica for replica in self._replicas if replica.ready is not None]
        if not ready:
            self._waiting.append(request_id)
            return
        # Those that are late with a sign of life may hang.
        among = [replica.index for replica in ready if not replica.is_quiet]
        among = self._fit(live, among or [replica.index for replica in ready])
        first = live.submission.sequences[0]
        chosen = self._router.choose(
            request_id,
            first.prompt_token_ids,
            first.max_tokens,
            num_sequences=len(live.submission.sequences),
            tenant=first.tenant,
            cache_salt=first.cache_salt,
            among=among,
        )
        live.move = None
        rest = rest_of(live.submission, live.narrator.generated())
        is_apart = self._roles[chosen] == "prefill" or bool(rest.generated)
        if is_apart and rest.params.output_kind is RequestOutputKind.FINAL_ONLY:
            # What comes here is a part: what another told is not told again.
            params = rest.params.replace(output_kind=RequestOutputKind.DELTA)
            rest = dataclasses.replace(rest, params=params)
        live.where = (chosen, self._replicas[chosen].send(messages.Submit(rest)))

    def _fit(self, live: _Live, among: list[int]) -> list[int]:
        """Of replicas that are ready, those that are for a submission as it stands: where it is
        moved to, or where its prompt or its decoding belongs."""
        if live.move is not None and self._is_there(live.move.target):
            return [live.move.target[0]]
        decoders = [index for index in among if self._roles[index] != "prefill"]
        if live.narrator.generated() or not decoders:
            return decoders or among
        prefillers = [index for index in among if self._roles[index] != "decode"]
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
        return min(among, key=self._router.work)

    def _is_there(self, where: tuple[int, int]) -> bool:
        """Whether a life of a replica takes requests."""
        replica = self._replicas[where[0]]
        return replica.ready is not None and replica.life == where[1] and not replica.is_quiet

    def _hand_off(self, request_id: str, live: _Live) -> None:
        """Moves a submission that has begun to speak to where it is decoded, if it can be."""
        ready = [each.index for each in self._replicas if each.ready and not each.is_quiet]
        decoders = [index for index in ready if self._roles[index] != "prefill"]
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
        once that is all.

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
            source.send(messages.Release(given.request_id))
        else:
            source.send(messages.GivePages(given.request_id, frozenset(move.known)))

    def place_waiting(self) -> None:
        """Gives replicas what no replica could take before."""
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
        self._router.forget(where[0])
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
