"""The process of one replica: an engine that takes what its parent sends and tells what is new.

Its parent starts it with one end of a socket pair (`replica.py`). It ends when told to, or when the
other end is closed, whichever way the parent went. The module is long because it is all that runs
in that process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import logging.handlers
import os
import pickle
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.engine.errors import InvalidConfigError, InvalidRequestError, StepFailedError
from octavo.engine.input.input_processor import Submission
from octavo.engine.output.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.engine.process.collector import leave_out_what_is_loaded
from octavo.engine.process.own_process import prepare_to_compute
from octavo.engine.replicas import messages
from octavo.engine.replicas.hang_watch import beat_period_s
from octavo.engine.replicas.messages import Question
from octavo.engine.request import Priority, RequestStatus
from octavo.engine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from octavo.engine.engine import Engine, ProgramListener
    from octavo.engine.kv.page_hash import PageHash
    from octavo.engine.kv_transfer.page_batch import PageBatch
    from octavo.engine.output.transcript import Transcript
    from octavo.engine.structured.grammar import CompiledGrammar

LOAD_PERIOD_S = 0.1
"""Least time between two load reports while there is work."""
THREADS = 4
"""Of what may take long: grammars, and answers that wait."""
CLOSE_S = 5.0
"""For what runs behind to end; a program that is being compiled cannot be interrupted."""
APART = (Question.PREPARE_GRAMMARS, Question.WAIT_UNTIL_COMPILED)
"""Questions that are answered by a thread of their own, while requests are served."""

logger = logging.getLogger(__name__)
_Command = messages.Command | functools.partial[None]


class Voice:
    """The process's way to its parent; safe from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, message: messages.Message) -> None:
        """Sends a message; into the void if nobody listens any more."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)


class Inbox:
    """Commands in the order they came in; safe from any thread."""

    def __init__(self) -> None:
        self._commands: deque[_Command] = deque()
        self._news = threading.Condition()
        self.is_closed = False

    def put(self, command: _Command) -> None:
        """Adds a command."""
        with self._news:
            self._commands.append(command)
            self._news.notify()

    def close(self) -> None:
        """Says that no more will come, and that what is there need not be done."""
        with self._news:
            self.is_closed = True
            self._news.notify()

    def take(self, *, wait: bool) -> list[_Command]:
        """All that came; none, if it was closed, or if nothing did and it is not to wait."""
        with self._news:
            while wait and not (self._commands or self.is_closed):
                self._news.wait()
            taken = [] if self.is_closed else list(self._commands)
            self._commands.clear()
            return taken


@dataclass(slots=True)
class _Leaving:
    """A submission that is to leave.

    Attributes:
        known: names of its pages that are where it goes.
        num_turns: that it may wait for.
    """

    known: frozenset[PageHash]
    num_turns: int


class Worker:
    """Drives an engine by what comes from its parent.

    Args:
        engine: warmed up.
        inbox: what comes.
        voice: where news go.
    """

    def __init__(self, engine: Engine, inbox: Inbox, voice: Voice) -> None:
        self._engine = engine
        self._inbox = inbox
        self._voice = voice
        self._compiling: dict[str, Submission] = {}
        self._told_prompts: set[str] = set()
        self._leaving: dict[str, _Leaving] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="octavo-apart")
        self._reported_s = 0.0
        self._taken_in_s = 0.0
        self.num_turns = 0
        """Turns of the loop that have begun."""
        self.is_in_turn = False
        """Whether it is in one, and not waiting for work."""

    def run(self) -> None:
        """Serves until the inbox is closed."""
        engine, inbox = self._engine, self._inbox
        while True:
            self._taken_in_s = engine.clock.now_s()
            commands = inbox.take(wait=False)
            if not (commands or engine.has_unfinished):
                self.report_load()  # a last word before it waits
                self.is_in_turn = False
                commands = inbox.take(wait=True)
            if inbox.is_closed:
                return
            self.num_turns, self.is_in_turn = self.num_turns + 1, True
            for command in commands:
                self._do(command)
            self._tell(engine.advance())
            self._let_go()
            if time.monotonic() - self._reported_s >= LOAD_PERIOD_S:
                self.report_load()

    def _do(self, command: _Command) -> None:
        try:
            match command:
                case messages.Submit(submission):
                    self._take(submission)
                case messages.Abort(request_id, status, error):
                    self._abort(request_id, status, error)
                case messages.Release(request_id, known, waits):
                    self._release(request_id, known, self._engine.limits.page_size if waits else 1)
                case messages.GivePages(request_id, known):
                    self._give_pages(request_id, known)
                case messages.TakePages(batch):
                    self._take_pages(batch)
                case messages.Ask(question) if question in APART:
                    self._threads.submit(self._answer, question)
                case messages.Ask(question):
                    self._answer(question)
                case functools.partial():
                    command()
        except Exception as error:
            self._engine.recover(error)

    def _answer(self, question: Question) -> None:
        try:
            answer = messages.Answer(question, getattr(self._engine, question.value)())
        except Exception as error:
            answer = messages.Answer(question, None, sendable(error))
        self._voice.tell(answer)

    def _take(self, submission: Submission) -> None:
        if submission.params.structured_outputs is None:
            self._submit(submission)
            return
        self._compiling[submission.request_id] = submission
        future = self._threads.submit(self._engine.inputs.grammar_of, submission.params)
        future.add_done_callback(
            lambda future: self._inbox.put(functools.partial(self._compiled, submission, future))
        )

    def _compiled(self, submission: Submission, future: Future[CompiledGrammar | None]) -> None:
        if self._compiling.pop(submission.request_id, None) is None:
            return  # it was ended meanwhile
        try:
            grammar = future.result()
        except Exception as error:
            self._end(submission, RequestStatus.FAILED, error)
        else:
            self._submit(dataclasses.replace(submission, grammar=grammar))

    def _submit(self, submission: Submission) -> None:
        try:
            self._engine.submit(submission)
        except Exception as error:
            self._end(submission, RequestStatus.FAILED, error)

    def _abort(self, request_id: str, status: RequestStatus, error: Exception | None) -> None:
        submission = self._compiling.pop(request_id, None)
        if submission is None:
            self._engine.abort(request_id, status, error)
        else:
            self._end(submission, status, error)

    def _release(self, request_id: str, known: frozenset[PageHash], num_turns: int) -> None:
        if self._compiling.pop(request_id, None) is not None:
            self._return(request_id)
        else:
            self._leaving[request_id] = _Leaving(known, num_turns)
            self._let_go()

    def _let_go(self) -> None:
        """Lets go of submissions that are to leave and have hardly a token that is in no full page:
        those are computed again where they go."""
        for request_id, leaving in list(self._leaving.items()):
            leaving.num_turns -= 1
            num_over = self._engine.num_over_page(request_id) or 0
            if num_over >= self._engine.config.num_decode_steps and leaving.num_turns > 0:
                continue
            del self._leaving[request_id]
            names = self._engine.page_names(request_id)
            transcript = self._engine.release(request_id)
            if transcript is None:
                continue  # it has ended
            transcript.kind = RequestOutputKind.DELTA  # whoever goes on needs all there is
            self._tell([transcript])
            self._told_prompts.discard(request_id)
            new = [name for name in names if name not in leaving.known]
            if self._engine.transfer is not None and new:
                self._engine.transfer.give(new, functools.partial(self._give_last, request_id))
            else:
                self._return(request_id)

    def _give_last(self, request_id: str, batch: PageBatch | None) -> None:
        if batch is None:
            self._return(request_id)
        else:
            self._voice.tell(messages.PagesGiven(request_id, batch))

    def _return(self, request_id: str) -> None:
        self._voice.tell(messages.Returned(request_id, "it was moved", has_died=False))

    def _give_pages(self, request_id: str, known: frozenset[PageHash]) -> None:
        transfer = self._engine.transfer
        names = () if transfer is None else self._engine.page_names(request_id)

        def receive(batch: PageBatch | None) -> None:
            self._voice.tell(messages.PagesGiven(request_id, batch))

        if transfer is None:
            receive(None)
        else:
            transfer.give([name for name in names if name not in known], receive)

    def _take_pages(self, batch: PageBatch) -> None:
        if self._engine.transfer is None:
            return
        try:
            self._engine.transfer.take(batch)
        except InvalidRequestError as error:
            logger.warning("pages of another replica cannot be used: %s", error)

    def _end(self, submission: Submission, status: RequestStatus, error: Exception | None) -> None:
        """Tells the end of a submission that the engine never had."""
        self._voice.tell(messages.News([ended(submission, status, error)]))

    def _tell(self, transcripts: list[Transcript]) -> None:
        outputs = [output for transcript in transcripts for output in self._read(transcript)]
        if outputs:
            self._voice.tell(messages.News(outputs))

    def _read(self, transcript: Transcript) -> list[RequestOutput]:
        """What is new, if anything is."""
        outputs: list[RequestOutput] = []
        for output in transcript.readings() if transcript.has_news else ():
            output.prompt, output.prompt_token_ids = None, []  # the parent has them
            if output.prompt_logprobs is not None:
                if output.engine_id in self._told_prompts:
                    output.prompt_logprobs = None
                self._told_prompts.add(output.engine_id)
            if output.finished:
                self._told_prompts.discard(output.engine_id)
            if output.error is not None:
                output.error = sendable(output.error)
            outputs.append(output)
        return outputs

    def report_load(self) -> None:
        """Tells how busy the engine is."""
        engine, now_s = self._engine, self._engine.clock.now_s()
        predict = engine.scheduler.predict_ttft_s
        ttft_s = {
            priority: (
                predict(1, now_s, priority),
                predict(messages.PROBE_TOKENS, now_s, priority),
            )
            for priority in Priority
        }
        self._reported_s = time.monotonic()
        self._voice.tell(messages.LoadReport(engine.load(), ttft_s, self._taken_in_s))


def ended(submission: Submission, status: RequestStatus, error: Exception | None) -> RequestOutput:
    """The last word on a submission that generated nothing."""
    return RequestOutput(
        request_id=submission.shown_id,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(index=index, text="", token_ids=[], finish_reason=status.value)
            for index in range(len(submission.sequences))
        ],
        finished=True,
        metrics=RequestMetrics(arrival_s=submission.sequences[0].arrival_s),
        error=None if error is None else sendable(error),
        engine_id=submission.request_id,
    )


def sendable(error: Exception) -> Exception:
    """The error, or one with its words where it cannot leave the process."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        logger.debug("an error cannot be sent", exc_info=True)
    return StepFailedError(f"{type(error).__name__}: {error}")


class _LogSender(logging.handlers.QueueHandler):
    """Sends records to the parent, whose handlers they are for."""

    def __init__(self, voice: Voice) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._voice = voice

    def enqueue(self, record: logging.LogRecord) -> None:
        self._voice.tell(messages.Logged(record))


def build(start: messages.Start, on_program: ProgramListener | None = None) -> Engine:
    """Builds a replica's engine in this process, on what is that replica's own.

    Args:
        start: its arguments.
        on_program: as for `Engine`.

    Raises: as for `Engine`; also
        InvalidConfigError: its device cannot be shared by several processes.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    every_core = tuple(os.sched_getaffinity(0)) if has_affinity else ()
    # Before JAX looks: it makes as many threads as there are cores.
    _keep_to(start.cores)
    from octavo.engine.engine import Engine
    from octavo.sharding.mesh import platform

    size = start.config.data_parallel_size
    if platform() == "tpu":
        raise InvalidConfigError(
            "data_parallel_size", size, "1 on TPUs: run one engine a replica, with its chips"
        )
    if platform() != "cpu":
        _keep_to(every_core)
    elif every_core and not start.cores:
        raise InvalidConfigError(
            "data_parallel_size", size, f"1 to {len(every_core)}, the number of cores there are"
        )
    return Engine(
        start.config.replace(data_parallel_size=1, replica_roles=""),
        on_program=on_program,
        host_memory_bytes=start.host_memory_bytes,
    )


def _keep_to(cores: tuple[int, ...]) -> None:
    """Has all threads of the process, and those to come, run on these cores alone."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    os.sched_setaffinity(0, cores)
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it ended
            os.sched_setaffinity(int(thread.name), cores)


class Pulse:
    """Tells the parent that the process lives, and whether its engine gets on.

    Seconds are counted by its own looks: what the whole process was stopped for is not among them.

    Args:
        voice: where that goes.
        period_s: seconds between two looks.

    Attributes:
        worker: whose turns are looked at; None while the engine is being built.
    """

    def __init__(self, voice: Voice, period_s: float) -> None:
        self._voice = voice
        self._period_s = period_s
        self._num_turns = 0
        self._stuck_s = 0.0
        self.worker: Worker | None = None

    def start(self) -> None:
        """Tells from now on, from a thread that ends with the process."""
        threading.Thread(target=self._run, name="octavo-pulse", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._voice.tell(messages.Beat(self._look()))
            time.sleep(self._period_s)

    def _look(self) -> float:
        worker = self.worker
        if worker is None or not worker.is_in_turn or worker.num_turns != self._num_turns:
            self._num_turns, self._stuck_s = 0 if worker is None else worker.num_turns, 0.0
        else:
            self._stuck_s += self._period_s
        return self._stuck_s


def _ready(engine: Engine) -> messages.Ready:
    return messages.Ready(
        platform=engine.platform,
        num_devices=engine.num_devices,
        model_config=engine.model_config,
        model_name=engine.model_name,
        dtype=engine.dtype,
        limits=engine.limits,
        tokenizer=engine.tokenizer,
        eos_token_ids=engine.eos_token_ids,
        sampling_defaults=engine.sampling_defaults,
        pooler=engine.inputs.pooler,
        generates=engine.inputs.generates,
        compile_s=dict(engine.compile_s),
    )


def _listen(connection: Connection, inbox: Inbox) -> None:
    """Takes commands until the parent says stop or is gone, then sees to it that all ends."""
    with contextlib.suppress(EOFError, OSError):
        while not isinstance(command := connection.recv(), messages.Stop):
            inbox.put(command)
    inbox.close()
    time.sleep(CLOSE_S)  # a step that hangs, or a compiler
    os._exit(0)


def main(descriptor: int) -> None:
    """Builds what the first message says, and serves.

    Args:
        descriptor: of the process's end of the socket pair.
    """
    # A terminal's Ctrl-C and a service manager's SIGTERM reach every process; the parent drains.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    voice, inbox = Voice(connection), Inbox()
    try:
        start = connection.recv()
    except EOFError:  # the parent is gone already
        return
    if not isinstance(start, messages.Start):
        return  # told to stop before it began
    threading.Thread(
        target=_listen, args=(connection, inbox), name="octavo-listen", daemon=True
    ).start()
    pulse = Pulse(voice, beat_period_s(start.config.replica_timeout_s))
    pulse.start()
    root = logging.getLogger()
    root.setLevel(start.log_level)
    root.handlers[:] = [_LogSender(voice)]

    def on_program(program: str, seconds: float, cached: bool, done: int, total: int) -> None:
        voice.tell(messages.Building(program, seconds, cached, done, total))

    prepare_to_compute(os.environ)
    try:
        engine = build(start, on_program)
    except Exception as error:
        voice.tell(messages.NotBuilt(sendable(error)))
        return
    leave_out_what_is_loaded()
    worker = Worker(engine, inbox, voice)
    worker.report_load()
    voice.tell(_ready(engine))
    pulse.worker = worker
    try:
        worker.run()
    except Exception as error:
        logger.exception("the engine broke")
        voice.tell(messages.Broke(sendable(error)))
        os._exit(1)
    engine.close()
    os._exit(0)
