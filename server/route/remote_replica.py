"""A server elsewhere as one of an engine's replicas.

All of them live in the event loop of their front. A request is a stream of the server's own
`GenerateStream`; one that breaks off is returned, so that another server goes on with it.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from octavo.engine.errors import EngineDeadError, OctavoError
from octavo.engine.input.input_processor import Submission
from octavo.engine.observability.load import EngineLoad
from octavo.engine.output.outputs import RequestMetrics, RequestOutput
from octavo.engine.replicas import messages
from octavo.engine.replicas.messages import PROBE_TOKENS
from octavo.engine.replicas.replica import Event, EventMessage
from octavo.engine.replicas.worker import ended
from octavo.engine.request import Priority, RequestStatus
from octavo.engine.scheduler.load import QueueLoad
from octavo.engine.scheduler.standing import UNKNOWN, Standing
from octavo.server.grpc_service import TAKEN
from octavo.server.output_message import OutputDecoder
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.route.backend import Backend
from octavo.server.route.requests import request_of
from octavo.server.status import DETAILS_KEY, error_of

POLL_S = 0.25
"""Between two looks at a server's load."""
CALL_S = 2.0
"""For an answer about load."""
AGAIN_S = 0.5
"""Between two attempts at a server that does not answer."""
LOOK_S = CALL_S + AGAIN_S
"""No failed look takes longer. What exceeds it, this process itself stood still for: a pause of a
front is no silence of its servers."""

logger = logging.getLogger(__name__)
_M = TypeVar("_M", bound=Message)
_METHOD = "/octavo.v1.OctavoService/"
MakeReady = Callable[[str, pb.GetModelInfoResponse, pb.GetServerInfoResponse], messages.Ready]


@dataclasses.dataclass(slots=True)
class _Call:
    """A request under way.

    Attributes:
        submission: what is asked for.
        life: that it was sent to.
        is_taken: whether the server has said that it has it: else it cannot have died of it.
        task: that reads its answer.
    """

    submission: Submission
    life: int
    is_taken: bool = False
    task: asyncio.Task[None] = dataclasses.field(init=False)


class RemoteReplica:
    """Keeps in touch with one server. `open`, `send` and `close` are for one thread.

    Args:
        index: its number, from 0 on.
        backend: where it is.
        loop: that runs in another thread than `open`, `send` and `close`.
        events: where news go.
        make_ready: from (address, what is served, what serves it); raises `OctavoError` where that
            does not go with the other servers.
        timeout_s: seconds without a word after which it is taken for lost.
        now_s: the clock of requests.

    Attributes: as those of `AnyReplica`.
    """

    def __init__(
        self,
        index: int,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        events: SimpleQueue[Event | None],
        make_ready: MakeReady,
        *,
        timeout_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self.index = index
        self.life = 0
        self.ready: messages.Ready | None = None
        self.report: messages.LoadReport | None = None
        self.is_lost = False
        self.is_quiet = False
        self.refused: OctavoError | None = None
        """Why the server takes no part, if it answers and does not."""
        self.is_leaving = False
        """Whether it takes no new requests, as it is no server of this front any more."""
        self._backend = backend
        self._loop = loop
        self._events = events
        self._make_ready = make_ready
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._channel: grpc.aio.Channel
        self._calls: dict[str, _Call] = {}
        self._watch: asyncio.Task[None] | None = None
        self._news: dict[int, list[RequestOutput]] = {}
        """What answers said in this turn of the loop, by life."""

    def open(self) -> None:
        """Begins to look for the server; `Event`s tell of it."""
        self._loop.call_soon_threadsafe(self._begin)

    def send(self, command: messages.Command) -> int:
        """See `AnyReplica.send`."""
        self._loop.call_soon_threadsafe(self._do, command, self.life)
        return self.life

    def close(self) -> None:
        """Ends every call."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()

    # Below runs in the loop.

    @property
    def target(self) -> str:
        """Where the server is."""
        return self._backend.target

    @property
    def has_left(self) -> bool:
        """Whether another server may take this one's place."""
        return self.is_leaving and self._watch is None

    def leave(self) -> None:
        """The server is to take no new requests; it is let go of once those it has are over."""
        self.is_leaving, self.ready = True, None

    def stay(self) -> None:
        """The server is one of this front's again."""
        self.is_leaving = False
        if self._watch is None:
            self._begin()

    def become(self, backend: Backend) -> None:
        """Is another server from now on, after this one has left."""
        assert self.has_left
        self._backend, self.is_leaving = backend, False
        self._begin()

    def _begin(self) -> None:
        self._channel = self._backend.channel()
        self._watch = self._loop.create_task(self._keep_watch())

    async def _end(self) -> None:
        tasks = [call.task for call in self._calls.values()]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    def _tell(self, message: EventMessage, life: int) -> None:
        self._tell_news()
        self._events.put(Event(self.index, life, message))

    def _say(self, output: RequestOutput, life: int) -> None:
        """Tells an output together with what else comes in this turn: a step's tokens come for all
        its rows at once, and whoever is told is woken once."""
        if not self._news:
            self._loop.call_soon(self._tell_news)
        self._news.setdefault(life, []).append(output)

    def _tell_news(self) -> None:
        news, self._news = self._news, {}
        for life, outputs in news.items():
            self._events.put(Event(self.index, life, messages.News(outputs)))

    def _do(self, command: messages.Command, life: int) -> None:
        match command:
            case messages.Submit(submission):
                call = _Call(submission, life)
                call.task = self._loop.create_task(self._run(call))
                self._calls[submission.request_id] = call
            case messages.Release(request_id=request_id):
                if (live := self._calls.pop(request_id, None)) is not None:
                    live.task.cancel()
                    moved = messages.Returned(request_id, "it was moved", has_died=False)
                    self._tell(moved, live.life)
            case messages.GivePages(request_id):
                self._tell(messages.PagesGiven(request_id, None), life)
            case messages.Abort(request_id, status, error):
                if (live := self._calls.pop(request_id, None)) is not None:
                    live.task.cancel()
                    self._tell(messages.News([ended(live.submission, status, error)]), live.life)

    async def _run(self, call: _Call) -> None:
        """One request, until its stream ends."""
        try:
            message = await self._stream(call)
        except Exception as error:
            message = messages.News([ended(call.submission, RequestStatus.FAILED, _typed(error))])
        self._calls.pop(call.submission.request_id, None)
        if message is not None:
            self._tell(message, call.life)

    async def _stream(self, call: _Call) -> messages.News | messages.Returned | None:
        """Tells what comes of a request; what is left to be said of its end, if anything."""
        submission = call.submission
        first, request_id = submission.sequences[0], submission.request_id
        metrics = dataclasses.replace(first.metrics)
        timeout_s = None if first.deadline_s is None else first.deadline_s - self._now_s()
        method = self._channel.unary_stream(
            _METHOD + "GenerateStream",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        decoder = OutputDecoder(None)
        answers = method(
            request_of(submission, self._now_s()),
            timeout=timeout_s,
            metadata=(*self._backend.metadata, (TAKEN, "1")),
        )
        try:
            call.is_taken = any(key == TAKEN for key, _ in await answers.initial_metadata())
            async for answer in answers:
                output = decoder.decode(answer)
                self._place(output, metrics, request_id)
                self._say(output, call.life)
                if output.finished:
                    return None
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                failed = ended(submission, RequestStatus.FAILED, error_of(error))
                return messages.News([failed])
            self.ready = None  # until the watch finds that it serves
            cause = f"the connection to {self._backend.target} broke: {error.details()}"
            has_died = call.is_taken and not _answered(error)
            return messages.Returned(request_id, cause, has_died=has_died)
        return messages.Returned(
            request_id, f"{self._backend.target} ended its stream", has_died=False
        )

    def _place(self, output: RequestOutput, metrics: RequestMetrics, request_id: str) -> None:
        """Makes an output one of this front: its ids and its clock."""
        now_s = self._now_s()
        if metrics.first_token_s is None and any(each.token_ids for each in output.outputs):
            metrics.first_token_s = now_s
        metrics.last_token_s = now_s
        if output.finished:
            metrics.finished_s = now_s
            metrics.num_preemptions += output.metrics.num_preemptions
        output.metrics = copy.copy(metrics)
        output.engine_id, output.prompt_token_ids = request_id, []

    async def _keep_watch(self) -> None:
        """Looks at the server as long as it is one of the front's, or has requests of it."""
        silent_s, counted_s = 0.0, time.monotonic()
        while self._calls or not self.is_leaving:
            is_heard = False
            try:
                await self._look()
                silent_s, counted_s, self.is_quiet = 0.0, time.monotonic(), False
                await asyncio.sleep(POLL_S)
                continue
            except grpc.aio.AioRpcError as error:
                cause = error_of(error)
                is_heard = _answered(error)
                if is_heard:  # it is loading, or going away: what it has goes on
                    self.ready = None
            except OctavoError as error:
                if self.refused is None:
                    logger.error("%s takes no part: %s", self._backend.target, error)
                self.refused, cause = error, error
            except Exception:
                logger.exception("a look at %s failed", self._backend.target)
                cause = EngineDeadError("a look at it failed")
            now_s = time.monotonic()
            silent_s = 0.0 if is_heard else silent_s + min(now_s - counted_s, LOOK_S)
            counted_s, self.is_quiet = now_s, True
            if self.ready is not None and silent_s > min(LOOK_S, self._timeout_s):
                logger.warning("%s does not answer: %s", self._backend.target, cause)
                self.ready = None
            if silent_s > self._timeout_s:
                self._give_up(cause)
            await asyncio.sleep(AGAIN_S)
        await self._channel.close()
        self.ready = self.report = self.refused = None
        self._watch = None

    async def _look(self) -> None:
        """Asks for the load; the first time, and after a silence, also what is served.

        Raises:
            AioRpcError, TimeoutError: it does not answer.
            OctavoError: it does not go with the others.
        """
        if self.is_leaving:
            await self._ask("GetLoad", pb.GetLoadRequest(), pb.GetLoadResponse)
            return
        is_new = self.ready is None
        if is_new:
            info = await self._ask(
                "GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse
            )
            server = await self._ask(
                "GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse
            )
            if server.draining:
                raise EngineDeadError("it is going away")
            ready = self._make_ready(self._backend.target, info, server)
        asked_s = self._now_s()
        one = await self._ask("GetLoad", pb.GetLoadRequest(), pb.GetLoadResponse)
        request = pb.GetLoadRequest(num_prompt_tokens=PROBE_TOKENS)
        probe = await self._ask("GetLoad", request, pb.GetLoadResponse)
        first_s = (one.predicted_ttft_s, probe.predicted_ttft_s)
        self.life += is_new
        self.report = messages.LoadReport(
            load_of(one), dict.fromkeys(Priority, first_s), asked_s - one.behind_s, self.life
        )
        if is_new:
            self.ready, self.refused = ready, None
            logger.info("%s serves", self._backend.target)
            self._tell(ready, self.life)

    async def _ask(self, name: str, message: Message, kind: type[_M]) -> _M:
        method = self._channel.unary_unary(
            _METHOD + name,
            request_serializer=type(message).SerializeToString,
            response_deserializer=kind.FromString,
        )
        answer: _M = await method(message, timeout=CALL_S, metadata=self._backend.metadata)
        return answer

    def _give_up(self, cause: Exception) -> None:
        """Returns all that the server has: nothing was heard of it for too long."""
        calls, self._calls = self._calls, {}
        for request_id, call in calls.items():
            call.task.cancel()
            silent = f"{self._backend.target} hangs: {cause}"
            returned = messages.Returned(request_id, silent, has_died=call.is_taken)
            self._tell(returned, call.life)


def _answered(error: grpc.aio.AioRpcError) -> bool:
    """Whether a server said so, and not the connection to it."""
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _typed(error: BaseException) -> Exception:
    if isinstance(error, OctavoError):
        return error
    return EngineDeadError(str(error) or type(error).__name__)


def load_of(message: pb.GetLoadResponse) -> EngineLoad:
    """A server's load as that of an engine; 0 for what it does not tell."""
    names = {field.name for field in message.DESCRIPTOR.fields}
    values = {
        field.name: getattr(message, field.name) if field.name in names else 0
        for field in dataclasses.fields(EngineLoad)
        if field.name not in ("queues", "steps_by_tokens", "standing")
    }
    queues = {
        Priority(queue.priority - 1): QueueLoad(
            num_waiting=queue.num_waiting,
            oldest_s=queue.oldest_s,
            num_prompt_tokens=queue.num_prompt_tokens,
        )
        for queue in message.queues
    }
    return EngineLoad(**values, queues=queues, steps_by_tokens=(0,), standing=_standing_of(message))


def _standing_of(message: pb.GetLoadResponse) -> Standing:
    """What a server tells routers; an older one tells nothing."""
    told = message.standing
    if not message.HasField("standing") or len(told.prompt_tokens) != len(Priority):
        return UNKNOWN
    values = {name: getattr(told, name) for name in Standing._fields}
    return Standing(**values | {"prompt_tokens": tuple(told.prompt_tokens)})
