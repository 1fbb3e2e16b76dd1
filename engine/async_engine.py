"""`AsyncEngine`: an engine in a thread of its own, for servers and notebooks.

The module is long because both sides of the thread stand in it: what the event loop calls, and what
the engine's thread runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, Unpack

from octavo.engine.any_engine import AnyEngine, open_engine
from octavo.engine.config import EngineConfig
from octavo.engine.engine_arguments import engine_config
from octavo.engine.errors import EngineDeadError, InvalidConfigError
from octavo.engine.input.input_processor import (
    POOLED,
    PromptLike,
    Submission,
    apart_from_salt,
    check_label,
)
from octavo.engine.input.resumption import check_generated, rest_of
from octavo.engine.input.targets import NO_TARGETS, Targets
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS, Tokenization
from octavo.engine.input.unserved import Unserved, refuse_unserved
from octavo.engine.observability.load import EngineLoad
from octavo.engine.observability.schedule import Schedule
from octavo.engine.output.output_streams import OutputStream, OutputStreams, Told
from octavo.engine.output.outputs import Generated, RequestOutput
from octavo.engine.output.transcript import Transcript
from octavo.engine.pooling.async_pooling import AsyncPooling
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority
from octavo.engine.sampling_params import (
    RequestOutputKind,
    SamplingParams,
)
from octavo.engine.text.tokenizer import SHORT_TEXT_CHARS

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

LOAD_ATTEMPTS = 100
"""Readings of a load that a busy engine may spoil."""
INTAKE_SHARE, LEAST_INTAKE_S = 0.5, 0.0003
"""A turn takes in what was asked for so many seconds, or for a share of those that the last turn
had to spare. Where hundreds of requests come at once, it would else find one more after each, and
the device would wait for the last of them."""
TEXT_THREADS, TEXT_NICENESS = 2, 10
"""Threads that tokenize what takes long, and how far they give way to those that compute tokens."""
ALIVE_PERIOD_S = 1.0
"""How often whoever waits for an answer of the engine's thread looks whether it lives."""


class AsyncEngine(AsyncPooling):
    """Serves many requests at once to coroutines of one event loop.

    Args:
        config: engine arguments; None takes the defaults and `engine_args`.
        progress: show a bar while programs compile.
        engine: one that is built already, and is this one's from now on; the others are not used.
        **engine_args: fields of `EngineConfig`, when no config is given.

    Raises: as for `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        progress: bool = False,
        engine: AnyEngine | None = None,
        **engine_args: Any,
    ) -> None:
        if not isinstance(config, EngineConfig | None):
            raise InvalidConfigError("config", config, "an EngineConfig; a model goes by model=")
        if config is not None and engine_args:
            name, value = next(iter(engine_args.items()))
            raise InvalidConfigError(name, value, "a field of config where one is given")
        if engine is None:
            engine = open_engine(config or engine_config(None, engine_args), progress=progress)
        self.engine = engine
        self.config = self.engine.config
        self.tokenizer = self.engine.tokenizer
        self.model_name = self.engine.model_name
        self.sampling_defaults = self.engine.sampling_defaults
        self.model_config = self.engine.model_config
        self.max_model_len = self.engine.max_model_len
        self.dtype = self.engine.dtype
        self.platform = self.engine.platform
        self.num_devices = self.engine.num_devices
        self._streams = OutputStreams()
        self._commands: deque[Callable[[], None]] = deque()
        self._taken_in_s = time.monotonic()
        self._news: deque[list[Told]] = deque()
        self._is_told = False
        self._wake = threading.Condition()
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, "octavo-text", _give_way)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self.num_turns = 0
        """Turns that its thread has begun: while it is in one, the number says whether it gets on.
        Replicas are no part of it: one that hangs is killed, see `HangWatch`."""
        self.is_in_turn = False
        """Whether it is in one, and not waiting for work."""

    @property
    def stream_interval_s(self) -> float:
        """Least seconds between two outputs of a stream of deltas, its first and last apart: what
        comes meanwhile comes as one. 0, unless it is set, gives each as it comes. The interval
        grows to a few times as much while the event loop is busy, see `OutputPace`."""
        return self._streams.pace.least_s

    @stream_interval_s.setter
    def stream_interval_s(self, seconds: float) -> None:
        self._streams.pace.least_s = seconds

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self._thread is not None and not self._stopping

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's thread lives and has not broken, nor what it drives."""
        lives = self._thread is None or self._thread.is_alive()
        return self._error is None and lives and self.engine.is_usable

    @property
    def is_stopped(self) -> bool:
        """Whether the engine's thread has ended."""
        return self._thread is not None and not self._thread.is_alive()

    async def start(self) -> None:
        """Starts the engine's thread; `generate` does so itself if need be."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
            self._thread.start()

    def give_up(self, error: EngineDeadError) -> None:
        """Ends every stream with an error and takes no more, as the engine's thread hangs: for
        good, even if the thread comes back. To be called from the event loop."""
        if self._error is None:
            self._error, self._stopping = error, True
            self._streams.put_all(error)

    def give_up_soon(self, error: EngineDeadError) -> None:
        """As `give_up`, from any thread."""
        if self._loop is not None:
            self._tell(partial(self.give_up, error))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, gives those in flight `drain_s` seconds, then stops."""
        self._stopping = True
        if self._thread is None:
            return
        assert self._loop is not None
        end_s = self._loop.time() + drain_s
        while self._streams and self._loop.time() < end_s and self.is_healthy:
            await asyncio.sleep(0.01)
        self._streams.put_all(EngineDeadError("the engine was shut down"))
        with self._wake:
            self._wake.notify()
        self.engine.wake()
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.engine.close)

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: Priority | str | int | None = None,
        timeout_s: float | None = None,
        targets: Targets = NO_TARGETS,
        output_len_class: str = "",
        tenant: str = "",
        cache_salt: str = "",
        owner: str = "",
        trace_parent: str = "",
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        pooling: PoolingParams | None = None,
        generated: Sequence[Generated] = (),
        **unserved: Unpack[Unserved],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams one request's outputs; leaving the iteration early cancels the request.

        Args:
            prompt: text or token ids, also as `{"prompt": text}` or `{"prompt_token_ids": ids}`,
                with a `cache_salt` beside it if it has its own.
            sampling_params: None takes the defaults; `output_kind` says what each output holds.
            request_id: the client's own name for it, echoed in outputs and need not be unique; None
                takes the engine's.
            priority: a class, its name or number.
            timeout_s: seconds after which the answer is worthless; the request then fails.
            targets: when tokens are wanted, for policies that schedule by it.
            output_len_class: requests of one class are expected to answer at similar length.
            tenant: identity for fairness.
            cache_salt: requests share cached prefixes with requests of the same salt only.
            owner: the credential that submits it: `abort` takes it from no other.
            trace_parent: the W3C trace context that the request came with; empty for none.
            tokenization: special tokens and truncation of the prompt.
            pooling: how hidden states are pooled, of a request that generates nothing: its one
                output has them, and `sampling_params` mean nothing. See `encode`.
            generated: of each completion, what another engine generated for the same prompt,
                parameters and seed: it goes on after that, and only what is new is told.
            **unserved: arguments of vLLM that are not served, such as `lora_request`: only None.

        Raises:
            InvalidRequestError: refused at the door.
            OverloadedError: refused for lack of capacity, then or while it waited.
            DeadlineExceededError: the timeout passed.
            StepFailedError, EngineDeadError: the engine failed.
        """
        refuse_unserved("generate", unserved)
        self._check_alive()
        await self.start()
        prompt, cache_salt = apart_from_salt(prompt, cache_salt)
        check_label(request_id)
        submitted = finished = False
        params = self.sampling_defaults.of(sampling_params) if pooling is None else POOLED
        is_delta = params.output_kind is RequestOutputKind.DELTA
        engine_id = self.engine.inputs.ids.next()
        stream = self._streams.open(engine_id, is_delta=is_delta, label=request_id, owner=owner)
        try:
            process = partial(
                self.engine.inputs.process,
                request_id,
                prompt,
                params,
                now_s=self.engine.clock.now_s(),
                priority=priority,
                timeout_s=timeout_s,
                targets=targets,
                output_len_class=output_len_class,
                tenant=tenant,
                cache_salt=cache_salt,
                request_id=engine_id,
                trace_parent=trace_parent,
                tokenization=tokenization,
                pooling=pooling,
            )
            # A long prompt takes a while to tokenize, and a grammar to compile: other streams must
            # not wait for it.
            if params.structured_outputs is not None:
                submission = await asyncio.to_thread(process)
            elif self.engine.inputs.takes_long(prompt, params):
                submission = await self._in_text_thread(process)
            else:
                submission = process()
            if generated:
                check_generated(submission, generated, self.model_config.vocab_size)
                submission = rest_of(submission, generated)
            self._check_alive()
            self._post(lambda: self._submit(submission, stream))
            submitted = True
            if stream.is_aborted:  # while its prompt was tokenized
                self._post(lambda: self._abort(engine_id))
            while not finished:
                item = await stream.take()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                if item.error is not None:
                    raise item.error
                yield item
        finally:
            self._streams.close(stream)
            if submitted and not finished:
                self._post(lambda: self._abort(engine_id))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, is_cut: bool = False
    ) -> list[int]:
        """The tokens of a text; a long one does not hold up the event loop.

        Args:
            add_special_tokens: put BOS and EOS where the model wants them.
            is_cut: whether it need not fit the context as it is.

        Raises:
            InvalidRequestError: it is too long for the context, or cannot be tokenized.
        """
        work = partial(
            self.engine.inputs.tokenize, text, add_special_tokens=add_special_tokens, is_cut=is_cut
        )
        return await self._in_text_thread(work) if len(text) > SHORT_TEXT_CHARS else work()

    async def _in_text_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)

    async def abort(self, request_id: str, owner: str = "") -> bool:
        """Cancels every request in flight that goes by this id; their streams end with finish
        reason "cancelled".

        Args:
            request_id: as outputs show it: the client's own, or else the engine's.
            owner: the credential that asks. What another submitted is not found.

        Returns:
            Whether there was any.
        """
        found = self._streams.labelled(request_id, owner)
        for stream in found:
            if not stream.is_aborted:
                stream.is_aborted = True
                self._post(partial(self._abort, stream.engine_id))
        return bool(found)

    async def flush_prefix_cache(self) -> tuple[int, int]:
        """Forgets every cached prefix; see `Engine.flush_prefix_cache`.

        Raises:
            EngineDeadError: the engine does not run.
        """
        return await self._in_engine_thread(self.engine.flush_prefix_cache)

    async def schedules(self) -> list[Schedule]:
        """What steps did for each row in the last seconds; see `Engine.schedules`.

        Returns:
            One for each replica.

        Raises:
            EngineDeadError: the engine does not run.
        """
        return await self._in_engine_thread(self.engine.schedules)

    async def _in_engine_thread(self, work: Callable[[], _T]) -> _T:
        """What the work returns, done between two steps."""
        self._check_alive()
        await self.start()
        assert self._loop is not None
        future: asyncio.Future[_T] = self._loop.create_future()

        def do() -> None:
            result = work()
            self._tell(lambda: None if future.done() else future.set_result(result))

        self._post(do)
        while not future.done():  # nobody answers for an engine that breaks or hangs
            await asyncio.wait({future}, timeout=ALIVE_PERIOD_S)
            self._check_alive()
        return future.result()

    def load(self, num_prompt_tokens: int = 1, priority: Priority = Priority.NORMAL) -> EngineLoad:
        """How busy the engine is, and how soon a request of this size and class would speak; safe
        from any thread."""
        taken_in_s = self._taken_in_s if self._commands else time.monotonic()
        for _ in range(LOAD_ATTEMPTS):
            # A table that changes its size while it is read is read again.
            with contextlib.suppress(RuntimeError):
                load = self.engine.load(num_prompt_tokens, priority)
                break
        else:
            load = self.engine.load(num_prompt_tokens, priority)
        behind_s = load.behind_s + time.monotonic() - taken_in_s
        return dataclasses.replace(load, behind_s=behind_s)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError("the engine broke; see its log") from self._error
        if self._stopping:
            raise EngineDeadError("the engine is shutting down")

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()
        self.engine.wake()

    # Below runs in the engine's thread.

    def _run(self) -> None:
        spare_s = 0.0
        try:
            while not self._stopping:
                self._wait_for_work()
                self.num_turns, self.is_in_turn = self.num_turns + 1, True
                self._take_in(max(LEAST_INTAKE_S, INTAKE_SHARE * spare_s))
                waited_s = self.engine.waited_s
                self._report(self.engine.advance())
                spare_s = self.engine.waited_s - waited_s
            self.engine.abort_all()
        except BaseException as error:  # a panic of a library is no Exception, and ends it as well
            logger.exception("the engine broke")
            self._error = error
            self._tell(self._deliver_death)

    def _take_in(self, seconds: float) -> None:
        """Does what was asked, one thing at least, for so long; what is left keeps its turn."""
        until_s = time.perf_counter() + seconds
        while True:
            begun_s = time.monotonic()
            if not self._commands:
                self._taken_in_s = begun_s
                break
            command = self._commands.popleft()
            try:
                command()
            except Exception as error:
                self.engine.recover(error)
            if time.perf_counter() >= until_s:
                break

    def _wait_for_work(self) -> None:
        if self.engine.has_unfinished:
            return
        self.is_in_turn = False
        with self._wake:
            while not (self._commands or self._stopping):
                self._wake.wait()

    def _report(self, transcripts: list[Transcript]) -> None:
        """Tells the event loop who has news, unless it has not come to those of the last time."""
        if not transcripts:
            return
        cumulative = RequestOutputKind.CUMULATIVE
        self._news.append([t.read() if t.kind is cumulative else t for t in transcripts])
        if not self._is_told:
            self._is_told = True
            self._tell(self._deliver)

    def _submit(self, submission: Submission, stream: OutputStream) -> None:
        try:
            self.engine.submit(submission)
        except Exception as error:
            self._tell(partial(stream.end, error))

    def _abort(self, engine_id: str) -> None:
        self.engine.abort(engine_id)

    def _tell(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback)

    # Below runs in the event loop.

    def _deliver(self) -> None:
        assert self._loop is not None
        self._is_told = False  # first: what comes from here on is told anew
        now_s = self._loop.time()
        while self._news:
            self._streams.deliver(self._news.popleft(), now_s)

    def _deliver_death(self) -> None:
        self._streams.put_all(EngineDeadError("the engine broke; see its log"))


def _give_way() -> None:
    """Lets other threads go first. Linux alone has a niceness for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), TEXT_NICENESS)
