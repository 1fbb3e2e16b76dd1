"""`ReplicaGroup`: several replicas, wherever they run, with the face of one engine."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue

from octavo.engine.clock import Clock
from octavo.engine.config import DEFAULT_ROUTER, EngineConfig, Role
from octavo.engine.errors import EngineDeadError
from octavo.engine.input.input_processor import InputProcessor, Submission
from octavo.engine.observability.load import EngineLoad
from octavo.engine.observability.schedule import Schedule
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.output.transcript import Transcript
from octavo.engine.replicas import messages
from octavo.engine.replicas.any_replica import AnyReplica
from octavo.engine.replicas.merged_load import merge_loads
from octavo.engine.replicas.messages import Question
from octavo.engine.replicas.moves import MovePrices
from octavo.engine.replicas.placement import Placement
from octavo.engine.replicas.replica import Died, Event
from octavo.engine.request import Priority, RequestStatus
from octavo.engine.routing.policies import get_route_policy
from octavo.engine.sampling_params import RequestOutputKind
from octavo.engine.scheduler.feasibility import check_can_ever_fit

logger = logging.getLogger(__name__)

TURN_S = 1.0
"""Longest wait of a turn for news: whoever counts turns sees that the thread lives."""


class ReplicaGroup:
    """Gives each request to a replica and tells what it answers. One thread drives it.

    Args:
        config: engine arguments, as fronts show them.
        replicas: that take requests; their news come to `events`.
        events: see `Event`; None wakes whoever waits.
        ready: what a replica said when it was ready: what all have in common.
        clock: where time comes from.
        incarnation: begins the ids of requests, which all replicas share; see `RequestIds`.
        roles: of each replica; none means that each is for all.
        router: which replica takes a request: as for `get_route_policy`.

    Attributes: as those of `Engine`; `limits` are those of one replica.
    """

    def __init__(
        self,
        config: EngineConfig,
        replicas: Sequence[AnyReplica],
        events: SimpleQueue[Event | None],
        ready: messages.Ready,
        *,
        clock: Clock,
        incarnation: str | None = None,
        roles: Sequence[Role] = (),
        router: str = DEFAULT_ROUTER,
    ) -> None:
        self.config = config
        self.clock = clock
        self.waited_s = 0.0
        self._replicas = replicas
        self._events = events
        self.model_config = ready.model_config
        self.model_name = ready.model_name
        self.dtype = ready.dtype
        self.platform = ready.platform
        self.num_devices = ready.num_devices * len(replicas)
        self.limits = ready.limits
        self.max_model_len = ready.limits.max_model_len
        self.tokenizer = ready.tokenizer
        self.eos_token_ids = ready.eos_token_ids
        self.sampling_defaults = ready.sampling_defaults
        self.compile_s: Mapping[str, float] = ready.compile_s
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=config.seed,
            incarnation=incarnation,
            pooler=ready.pooler,
            generates=ready.generates,
            default_max_tokens=ready.sampling_defaults.max_tokens,
        )
        self.grammars = self.inputs.grammars
        self._placement = Placement(replicas, self.clock, get_route_policy(router), roles)
        self._reports: list[messages.LoadReport] = []
        self._answers: dict[tuple[int, Question], messages.Answer] = {}

    @property
    def num_rows(self) -> int:
        """Sequences that can run at once."""
        return self.limits.max_num_seqs * max(1, sum(1 for each in self._replicas if each.report))

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is under way, or to be told."""
        return len(self._placement) > 0 or bool(self._placement.touched)

    @property
    def is_usable(self) -> bool:
        """Whether a replica serves, or is being started again."""
        return not all(replica.is_lost for replica in self._replicas)

    def wake(self) -> None:
        """Ends a wait of `advance`; from any thread."""
        self._events.put(None)

    def recover(self, error: Exception) -> None:
        """Says that something of this engine's own went wrong; nothing under way is touched."""
        logger.error("a command failed", exc_info=error)

    def close(self) -> None:
        """Ends what the engine began. It must not be used after it."""
        self.grammars.close()

    # Requests.

    def submit(self, submission: Submission) -> None:
        """Takes a checked submission. A replica that refuses it tells so as its error.

        Raises:
            InvalidRequestError: a sequence of it could never fit.
            QuarantinedError: replicas died of its prompt a moment ago.
        """
        assert submission.request_id not in self._placement, submission.request_id
        for request in submission.sequences:
            check_can_ever_fit(
                request,
                self.limits,
                enable_chunked_prefill=self.config.enable_chunked_prefill,
            )
        self._placement.submit(submission)

    def abort(
        self,
        request_id: str,
        status: RequestStatus = RequestStatus.CANCELLED,
        error: Exception | None = None,
    ) -> bool:
        """Ends a live submission; its last output is told by a later `step`.

        Returns:
            Whether there was one with this id, the engine's own.
        """
        return self._placement.end(request_id, status, error)

    def move(self, request_id: str, replica: int) -> bool:
        """Begins to move a live submission to another replica, where it goes on.

        Returns:
            Whether it is on its way now: it is under way, elsewhere, and that replica takes it.
        """
        return self._placement.move(request_id, replica)

    @property
    def moves(self) -> MovePrices:
        """What moves took so far."""
        return self._placement.prices

    def abort_all(self) -> None:
        """Ends every live submission, telling nobody."""
        for request_id in self._placement.live_ids:
            self.abort(request_id)
        while self.has_unfinished:
            self.advance()

    def step(self) -> list[RequestOutput]:
        """Waits for news; what each touched request has to tell."""
        return [output for each in self.advance() for output in each.readings()]

    def advance(self) -> list[Transcript]:
        """As `step`, for who reads later, or in another thread.

        Raises:
            EngineDeadError: no replica is left, nor will one be.
        """
        if not self.has_unfinished:
            return []
        if not self._placement.touched:
            self._take_event(wait_s=TURN_S)
        while self._take_event():
            pass
        touched, self._placement.touched = self._placement.touched, {}
        final_only = RequestOutputKind.FINAL_ONLY
        return [each for each in touched if each.finished or each.kind is not final_only]

    def _take_event(self, *, wait_s: float = 0.0) -> bool:
        """Takes in the next event, if one comes in so many seconds; whether one did."""
        begun_s = time.monotonic()
        try:
            event = self._events.get(block=wait_s > 0, timeout=wait_s)
        except Empty:
            return False
        finally:
            self.waited_s += time.monotonic() - begun_s
        if event is None:
            return True
        where = (event.replica, event.life)
        match event.message:
            case messages.News(outputs):
                for output in outputs:
                    self._placement.tell(output, where)
            case messages.Returned():
                self._placement.take_again(event.message, where)
            case messages.PagesGiven():
                self._placement.take_pages(event.message, where)
            case messages.Ready():
                self._placement.begin(where)
            case messages.Answer(question):
                self._answers[event.replica, question] = event.message
            case Died(cause, error):
                self._bury(where, cause, error)
        return True

    # Replicas.

    def where(self, request_id: str) -> AnyReplica | None:
        """The replica that has a request; None where none has."""
        return self._placement.where(request_id)

    def _bury(self, where: tuple[int, int], cause: str, error: Exception | None) -> None:
        """Sees to what a dead replica had under way, and was asked.

        Raises:
            EngineDeadError: it was the last one.
        """
        for question in Question:
            self._answers.setdefault((where[0], question), messages.Answer(question, None))
        if error is not None and not self.is_usable:
            raise EngineDeadError(f"no replica is left: {error}") from error
        self._placement.bury(where, cause)

    def _ask_all(self, question: Question) -> list[messages.Answer]:
        """What each replica that is ready answers, once all have; news meanwhile are kept.

        Raises: what a replica's method raised.
        """
        asked = [replica for replica in self._replicas if replica.ready is not None]
        for replica in asked:
            self._answers.pop((replica.index, question), None)
            replica.send(messages.Ask(question))
        while not all((replica.index, question) in self._answers for replica in asked):
            self._take_event(wait_s=TURN_S)
        answers = [self._answers.pop((replica.index, question)) for replica in asked]
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return answers

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Forgets every cached prefix; running requests go on.

        Returns:
            Pages that held prefixes alone, on the devices and on the host.
        """
        answers = self._ask_all(Question.FLUSH_PREFIX_CACHE)
        self._placement.forget_prefixes()
        counts = [answer.value for answer in answers if answer.value is not None]
        return sum(pages for pages, _ in counts), sum(pages for _, pages in counts)

    def schedules(self) -> list[Schedule]:
        """What steps of each replica did for each row in the last seconds: see `Engine`."""
        answers = self._ask_all(Question.SCHEDULES)
        return [one for answer in answers for one in answer.value or [Schedule()]]

    def check_integrity(self) -> None:
        """Proves that every page and row of every replica is accounted for."""
        self._ask_all(Question.CHECK_INTEGRITY)

    def wait_until_compiled(self) -> None:
        """Waits for the programs that are compiled behind; the engine serves without them too."""
        self._ask_all(Question.WAIT_UNTIL_COMPILED)

    def prepare_grammars(self) -> None:
        """Makes ready for structured outputs, which the first of them would else wait for."""
        self.grammars.prepare()
        self._ask_all(Question.PREPARE_GRAMMARS)

    def load(self, num_prompt_tokens: int = 1, priority: Priority = Priority.NORMAL) -> EngineLoad:
        """How busy the replicas are together, as each last told (ten times a second while it
        works), and how soon a request of this size and class would speak."""
        serving = [replica for replica in self._replicas if not replica.is_lost]
        reports = [replica.report for replica in serving or self._replicas]
        self._reports = [each for each in reports if each] or self._reports
        load = merge_loads(self._reports, num_prompt_tokens, priority)
        return dataclasses.replace(load, num_moved=self.moves.num_moves)

    def held_pages(self) -> tuple[int, float]:
        """Pages held by live requests, and the share of their places nothing is written to."""
        load = self.load()
        return load.num_total_pages - load.num_free_pages, load.kv_waste
