"""`ReplicatedEngine`: several engines, each in a process of its own, with the face of one."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from tqdm import tqdm

from octavo.engine.clock import MonotonicClock
from octavo.engine.config import SERVING_BATCHED_TOKENS, EngineConfig
from octavo.engine.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidConfigError,
    ModelLoadError,
    OctavoError,
    QuarantinedError,
    StepFailedError,
)
from octavo.engine.execution.available_memory import available_memory_bytes
from octavo.engine.input_processor import InputProcessor, Submission
from octavo.engine.load import EngineLoad
from octavo.engine.outputs import RequestOutput
from octavo.engine.quarantine import Quarantine
from octavo.engine.replicas import messages
from octavo.engine.replicas.continuation import DivergedError, Narrator
from octavo.engine.replicas.merged_load import merge_loads
from octavo.engine.replicas.messages import Question
from octavo.engine.replicas.replica import Died, Event, Replica
from octavo.engine.replicas.router import Router
from octavo.engine.request import Priority, RequestStatus
from octavo.engine.sampling_params import RequestOutputKind
from octavo.engine.scheduler.feasibility import check_can_ever_fit
from octavo.engine.structured.compiler import GrammarCompiler
from octavo.engine.transcript import Draft, Transcript

logger = logging.getLogger(__name__)

SUSPECT_DEATHS = 2
"""A request that so many replicas died with is tried again with no other such beside it; if one
dies with it then, it is not given to another."""
_NO_LIFE = (-1, 0)


@dataclass(slots=True)
class _Live:
    """A submission under way.

    Attributes:
        submission: as it is sent.
        narrator: writes what its readers read.
        where: replica and life; `_NO_LIFE` while none has it.
        num_deaths: replicas that died with it.
        ending: how it is to end, once its replica says so; None while nobody asked.
    """

    submission: Submission
    narrator: Narrator
    where: tuple[int, int] = _NO_LIFE
    num_deaths: int = 0
    ending: tuple[RequestStatus, Exception | None] | None = None


class ReplicatedEngine:
    """Engines in processes of their own, to be used as one `Engine`. One thread drives it.

    Each request goes to the replica that has done with it first (`Router`). One whose process dies
    is started again, and what it had under way goes to the others, from the beginning: readers see
    a pause. A request fails only if it then came to other tokens, or if replicas are found to die
    of it.

    Args:
        config: engine arguments; `data_parallel_size` is the number of replicas.
        progress: show a bar while programs compile.

    Attributes: as those of `Engine`; `limits` are those of one replica.

    Raises: as for `Engine`.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self.config = config = config.with_token_budget(SERVING_BATCHED_TOKENS)
        self.clock = MonotonicClock()
        self.waited_s = 0.0
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self.replicas = _make_replicas(config, self._events)
        self._finalizer = weakref.finalize(self, _stop, self.replicas)
        try:
            ready = self._build(progress)
        except BaseException:
            self._finalizer()
            raise
        self.model_config = ready.model_config
        self.model_name = ready.model_name
        self.dtype = ready.dtype
        self.platform = ready.platform
        self.num_devices = ready.num_devices * len(self.replicas)
        self.limits = ready.limits
        self.max_model_len = ready.limits.max_model_len
        self.tokenizer = ready.tokenizer
        self.eos_token_ids = ready.eos_token_ids
        self.compile_s: Mapping[str, float] = ready.compile_s
        self.grammars = GrammarCompiler(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )
        self.inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=config.seed,
            grammars=self.grammars,
        )
        self._router = Router(config.data_parallel_size)
        self._live: dict[str, _Live] = {}
        self._waiting: deque[str] = deque()
        self.quarantine = Quarantine()
        self._suspects: deque[str] = deque()
        self._on_trial: str | None = None
        self._touched: dict[Transcript, None] = {}
        self._answers: dict[tuple[int, Question], messages.Answer] = {}

    def _build(self, progress: bool) -> messages.Ready:
        """Starts all replicas and waits for them."""
        for replica in self.replicas:
            replica.open()
        ready: dict[int, messages.Ready] = {}
        num_done: dict[int, int] = {}
        with tqdm(desc="Compiling steps", disable=not progress) as bar:
            while len(ready) < len(self.replicas):
                event = self._events.get()
                if event is None:
                    continue
                match event.message:
                    case messages.Ready():
                        ready[event.replica] = event.message
                    case messages.Building(program, seconds, _, done, total):
                        num_done[event.replica] = done
                        bar.total = total * len(self.replicas)
                        bar.set_postfix_str(f"{program}: {seconds:.1f} s", refresh=False)
                        bar.update(sum(num_done.values()) - bar.n)
                    case Died(cause, error):
                        if isinstance(error, OctavoError) and not isinstance(
                            error, EngineDeadError
                        ):
                            raise error
                        raise ModelLoadError(f"replica {event.replica} was not built: {cause}")
        platforms = {each.platform for each in ready.values()}
        if len(platforms) > 1:
            raise InvalidConfigError(
                "data_parallel_size",
                self.config.data_parallel_size,
                f"as many as there are GPUs for: each takes {self.config.tensor_parallel_size}",
            )
        return ready[0]

    @property
    def num_rows(self) -> int:
        """Sequences that can run at once."""
        return self.limits.max_num_seqs * len(self.replicas)

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is under way, or to be told."""
        return bool(self._live or self._touched)

    @property
    def is_usable(self) -> bool:
        """Whether a replica serves, or is being started again."""
        return not all(replica.is_lost for replica in self.replicas)

    def num_turns(self, of_thread: int) -> int:
        """A number that changes while the replica that was silent for longest gets on.

        Args:
            of_thread: turns of the thread that drives this engine.
        """
        busy = {live.where[0] for live in list(self._live.values())} - {-1}
        silent = min(busy, key=lambda index: self.replicas[index].heard_s, default=None)
        if silent is None:
            return of_thread
        return self.replicas[silent].num_heard * len(self.replicas) + silent

    def wake(self) -> None:
        """Ends a wait of `advance`; from any thread."""
        self._events.put(None)

    def recover(self, error: Exception) -> None:
        """Says that something of this engine's own went wrong; nothing under way is touched."""
        logger.error("a command failed", exc_info=error)

    def close(self) -> None:
        """Ends the replicas. The engine must not be used after it."""
        self._finalizer()
        self.grammars.close()

    # Requests.

    def submit(self, submission: Submission) -> None:
        """Takes a checked submission. A replica that refuses it tells so as its error.

        Raises:
            DuplicateRequestError: its id is in flight.
            InvalidRequestError: a sequence of it could never fit.
            QuarantinedError: replicas died of its prompt a moment ago.
        """
        if submission.request_id in self._live:
            raise DuplicateRequestError(submission.request_id)
        for request in submission.sequences:
            self.quarantine.check(request, self.clock.now_s())
            check_can_ever_fit(
                request,
                self.limits,
                enable_chunked_prefill=self.config.enable_chunked_prefill,
            )
        sent = dataclasses.replace(submission, grammar=None)
        if submission.params.output_kind is RequestOutputKind.CUMULATIVE:
            # What was told need not be sent again.
            params = submission.params.replace(output_kind=RequestOutputKind.DELTA)
            sent = dataclasses.replace(sent, params=params)
        live = _Live(sent, Narrator(transcript_of(submission)))
        self._live[submission.request_id] = live
        self._place(submission.request_id, live)

    def abort(
        self,
        request_id: str,
        status: RequestStatus = RequestStatus.CANCELLED,
        error: Exception | None = None,
    ) -> bool:
        """Ends a live submission; its last output is told by a later `step`.

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
            self.replicas[live.where[0]].send(messages.Abort(request_id, status, error))
        return True

    def abort_all(self) -> None:
        """Ends every live submission, telling nobody."""
        for request_id in list(self._live):
            self.abort(request_id)
        while self.has_unfinished:
            self.advance()

    def step(self) -> list[RequestOutput]:
        """Waits for news; what each touched request has to tell."""
        return [transcript.read() for transcript in self.advance()]

    def advance(self) -> list[Transcript]:
        """As `step`, for who reads later, or in another thread.

        Raises:
            EngineDeadError: no replica is left, nor will one be.
        """
        if not self.has_unfinished:
            return []
        if not self._touched:
            self._take_event(wait=True)
        while self._take_event(wait=False):
            pass
        touched, self._touched = self._touched, {}
        final_only = RequestOutputKind.FINAL_ONLY
        return [each for each in touched if each.finished or each.kind is not final_only]

    def _take_event(self, *, wait: bool) -> bool:
        """Takes in the next event; whether there was one."""
        begun_s = time.monotonic()
        try:
            event = self._events.get(block=wait)
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
                    self._tell(output, where)
            case messages.Ready():
                self._place_waiting()
            case messages.Answer(question):
                self._answers[event.replica, question] = event.message
            case Died(cause, error):
                self._bury(where, cause, error)
        return True

    def _tell(self, output: RequestOutput, where: tuple[int, int]) -> None:
        live = self._live.get(output.request_id)
        if live is None or live.where != where:
            return
        transcript = live.narrator.transcript
        self._touched[transcript] = None
        try:
            live.narrator.take(output)
        except DivergedError:
            self.replicas[where[0]].send(
                messages.Abort(output.request_id, RequestStatus.CANCELLED, None)
            )
            reason = "its replica died, and another came to other tokens"
            self._end(live, RequestStatus.FAILED, StepFailedError(reason))
            return
        if transcript.finished:
            first = transcript.sequences[0]
            # Who left, or could not be served, says nothing of how long answers are.
            whole = first.finish_reason in ("stop", "length")
            self._router.ended(output.request_id, len(first.token_ids) if whole else None)
            self._forget(output.request_id)

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
        self._touched[transcript] = None

    # Replicas.

    def where(self, request_id: str) -> Replica | None:
        """The replica that has a request; None where none has."""
        live = self._live.get(request_id)
        return None if live is None or live.where == _NO_LIFE else self.replicas[live.where[0]]

    def _place(self, request_id: str, live: _Live) -> None:
        """Gives a submission to a replica, or has it wait for one."""
        among = [replica.index for replica in self.replicas if replica.ready is not None]
        if not among:
            self._waiting.append(request_id)
            return
        first = live.submission.sequences[0]
        chosen = self._router.choose(
            request_id,
            first.prompt_token_ids,
            first.max_tokens,
            num_sequences=len(live.submission.sequences),
            cache_salt=first.cache_salt,
            among=among,
        )
        live.where = (chosen, self.replicas[chosen].send(messages.Submit(live.submission)))

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for request_id in waiting:
            live = self._live.get(request_id)
            if live is not None and live.where == _NO_LIFE:
                self._place(request_id, live)

    def _bury(self, where: tuple[int, int], cause: str, error: Exception | None) -> None:
        """Gives what a dead replica had under way to others.

        Raises:
            EngineDeadError: it was the last one.
        """
        index = where[0]
        self._router.forget(index)
        for question in Question:
            self._answers.setdefault((index, question), messages.Answer(question, None))
        if error is not None and not self.is_usable:
            raise EngineDeadError(f"no replica is left: {error}") from error
        for request_id, live in list(self._live.items()):
            if live.where != where:
                continue
            self._router.ended(request_id)
            live.where = _NO_LIFE
            if live.ending is not None:
                self._end(live, *live.ending)
                continue
            live.num_deaths += 1
            if request_id == self._on_trial:
                reason = f"{live.num_deaths} replicas died with request {request_id} ({cause})"
                self.quarantine.put(live.submission.sequences[0], self.clock.now_s())
                self._end(live, RequestStatus.FAILED, QuarantinedError(reason))
                continue
            live.narrator.begin_again()
            if live.num_deaths < SUSPECT_DEATHS:
                self._place(request_id, live)
            else:
                self._suspects.append(request_id)
        self._try_next()

    def _try_next(self) -> None:
        """Lets the next of those run that may have killed replicas, if none of them does."""
        while self._on_trial is None and self._suspects:
            request_id = self._suspects.popleft()
            live = self._live.get(request_id)
            if live is not None:
                self._on_trial = request_id
                self._place(request_id, live)

    def _ask_all(self, question: Question) -> list[messages.Answer]:
        """What each replica that is ready answers, once all have; news meanwhile are kept.

        Raises: what a replica's method raised.
        """
        asked = [replica for replica in self.replicas if replica.ready is not None]
        for replica in asked:
            self._answers.pop((replica.index, question), None)
            replica.send(messages.Ask(question))
        while not all((replica.index, question) in self._answers for replica in asked):
            self._take_event(wait=True)
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
        for replica in self.replicas:
            self._router.forget(replica.index)
        counts = [answer.value for answer in answers if answer.value is not None]
        return sum(pages for pages, _ in counts), sum(pages for _, pages in counts)

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
        serving = [replica for replica in self.replicas if not replica.is_lost]
        reports = [replica.report for replica in serving or self.replicas]
        return merge_loads([each for each in reports if each], num_prompt_tokens, priority)


def own_cores() -> list[int]:
    """The cores that this process may run on; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def make_starts(config: EngineConfig, cores: Sequence[int]) -> list[messages.Start]:
    """What each replica is built from: its part of the host.

    Args:
        cores: that they share.
    """
    size = config.data_parallel_size
    available = available_memory_bytes()
    return [
        messages.Start(
            config=config,
            cores=tuple(part),
            host_memory_bytes=None if available is None else available // size,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        for part in split(cores, size)
    ]


def _make_replicas(config: EngineConfig, events: SimpleQueue[Event | None]) -> list[Replica]:
    """The replicas of an engine; none is started."""
    num_devices = config.tensor_parallel_size
    return [
        Replica(index, start, devices_of(index, num_devices, os.environ), events)
        for index, start in enumerate(make_starts(config, own_cores()))
    ]


def split(cores: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cores in `size` parts, neighbours together, no part more than one larger than another; all
    parts are empty if there are fewer cores than that."""
    if len(cores) < size:
        return [()] * size
    edges = [len(cores) * index // size for index in range(size + 1)]
    return [cores[low:high] for low, high in itertools.pairwise(edges)]


def devices_of(index: int, num_devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What makes a replica see its own GPUs alone. It means nothing where there are none."""
    name = "CUDA_VISIBLE_DEVICES"
    wanted = range(index * num_devices, (index + 1) * num_devices)
    if environ.get(name) is None:
        return {name: ",".join(map(str, wanted))}
    visible = [each for each in environ[name].split(",") if each]
    return {name: ",".join(visible[wanted.start : wanted.stop])}


def _stop(replicas: Sequence[Replica]) -> None:
    for replica in replicas:
        replica.stop()
    for replica in replicas:
        replica.join()


def transcript_of(submission: Submission) -> Transcript:
    """Of a submission whose text is made elsewhere."""
    params = submission.params
    drafts = tuple(
        Draft(
            request=request,
            index=index,
            detokenizer=None,
            matcher=None,
            logprobs=[] if params.logprobs is not None else None,
            cumulative_logprob=0.0 if params.logprobs is not None else None,
        )
        for index, request in enumerate(submission.sequences)
    )
    return Transcript(submission, drafts)
