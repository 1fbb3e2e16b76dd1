"""The gRPC service: requests in, typed errors out, and a dropped call gives its pages back.

A handler never leaks a traceback: a typed error becomes its own status (see `status.py`), anything
else is logged under an incident number and answered INTERNAL with that number alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from octavo.engine.errors import (
    NOT_FAILURES,
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    UnknownModelError,
)
from octavo.engine.input.input_processor import POOLED
from octavo.engine.input.targets import Targets
from octavo.engine.output.outputs import Generated
from octavo.engine.request import Priority
from octavo.engine.sampling_params import MAX_N, RequestOutputKind, SamplingParams
from octavo.server.beside_loop import MESSAGE_BYTES, beside_loop
from octavo.server.chat_message import ChatEncoder, prepare_chat
from octavo.server.embedding_message import embed_response, pooling_params_from_message
from octavo.server.front import Front
from octavo.server.grpc_refusal import has_left, refuse
from octavo.server.message_parts import num_parts
from octavo.server.output_message import OutputEncoder, read_generated
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.request_stats import RequestStats
from octavo.server.sampling_message import sampling_params_from_message
from octavo.server.server_info import model_info, server_info
from octavo.server.slo_headers import KINDS, read_targets
from octavo.server.texts import detokenize_ids, tokenize_text

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

SERVICE = pb.DESCRIPTOR.services_by_name["OctavoService"].full_name
MAX_NAME_CHARS = 256
"""Of request ids, tenants and cache salts."""
TAKEN = "octavo-taken"
"""Metadata of a stream whose client wants to know when the server has the request, and of the
answer to that. A front blames no request for the death of a server that did not say so."""

MAX_PARTS = 65_536
"""Fields of a message of a kind that may hold many messages, those within them included."""
_TARGET_FIELDS = tuple(f"{kind}_target_ms" for kind in KINDS)
_log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Asked: TypeAlias = pb.GenerateRequest | pb.EmbedRequest | pb.ChatRequest
Prompted: TypeAlias = pb.GenerateRequest | pb.EmbedRequest
Handler = Callable[[Any, Any], Awaitable[Any]]


class OctavoService:
    """The methods of octavo.v1.OctavoService.

    Args:
        front: the engine's door.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    def handlers(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        unary: dict[str, tuple[type[Message], Handler]] = {
            "Generate": (pb.GenerateRequest, self.generate),
            "Chat": (pb.ChatRequest, self.chat),
            "Embed": (pb.EmbedRequest, self.embed),
            "Abort": (pb.AbortRequest, self.abort),
            "Tokenize": (pb.TokenizeRequest, self.tokenize),
            "Detokenize": (pb.DetokenizeRequest, self.detokenize),
            "GetModelInfo": (pb.GetModelInfoRequest, self.get_model_info),
            "GetServerInfo": (pb.GetServerInfoRequest, self.get_server_info),
            "GetLoad": (pb.GetLoadRequest, self.get_load),
        }
        streams: dict[str, tuple[type[Message], Handler]] = {
            "ChatStream": (pb.ChatRequest, self.chat_stream),
            "GenerateStream": (pb.GenerateRequest, self.generate_stream),
        }
        methods = {
            name: method(
                make, handler, kind, self._front.stats,
                MAX_PARTS if kind is pb.ChatRequest else None,
            )
            for make, group in (
                (grpc.unary_unary_rpc_method_handler, unary),
                (grpc.unary_stream_rpc_method_handler, streams),
            )
            for name, (kind, handler) in group.items()
        }  # fmt: skip
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """One answer, when the request has ended."""
        answer: pb.GenerateResponse | None = None

        async def keep(message: pb.GenerateResponse) -> None:
            nonlocal answer
            answer = message

        await self._generate(request, context, RequestOutputKind.FINAL_ONLY, keep)
        if answer is None:
            raise EngineDeadError("the engine ended the request without an answer")
        return answer

    async def generate_stream(self, request: pb.GenerateRequest, context: Context) -> None:
        """What is new, as it is generated.

        Writes to the context instead of yielding: a cancelled call is then cancelled inside this
        coroutine, also while it waits for a slow client, and ends its request at once.
        """
        if any(key == TAKEN for key, _ in context.invocation_metadata() or ()):
            await context.send_initial_metadata(((TAKEN, "1"),))
        await self._generate(request, context, None, context.write)

    async def chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        """The answer to a conversation, whole."""
        answer: pb.ChatResponse | None = None

        async def keep(message: pb.ChatResponse) -> None:
            nonlocal answer
            answer = message

        await self._chat(request, context, RequestOutputKind.FINAL_ONLY, keep)
        if answer is None:
            raise EngineDeadError("the engine ended the request without an answer")
        return answer

    async def chat_stream(self, request: pb.ChatRequest, context: Context) -> None:
        """What is new of the answer, as it is generated; see `generate_stream`."""
        await self._chat(request, context, RequestOutputKind.DELTA, context.write)

    async def _chat(
        self,
        request: pb.ChatRequest,
        context: Context,
        kind: RequestOutputKind,
        write: Callable[[pb.ChatResponse], Awaitable[None]],
    ) -> None:
        engine = self._front.ready_engine()
        _check_model(request, engine)
        chat = await prepare_chat(self._front, request, kind)
        stream = self._front.generate(
            chat.prompt, chat.params, _request_id(request), **_options(request, context)
        )
        encoder = ChatEncoder(engine, chat)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                if (message := encoder.encode(output)) is not None:
                    await write(message)

    async def embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """The vector of one prompt's hidden states."""
        engine = self._front.ready_engine()
        _check_model(request, engine)
        pooler = engine.pooler_or_refuse()
        prompt = _prompt(request, engine.max_model_len)
        name = request.prompt_name if request.HasField("prompt_name") else None
        stream = self._front.generate(
            pooler.prompted(prompt, name),
            POOLED,
            _request_id(request),
            pooling=pooling_params_from_message(request),
            **_options(request, context),
        )
        async with contextlib.aclosing(stream) as outputs:
            return embed_response(await anext(outputs), engine.model_name)

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Cancels the caller's requests that go by this id."""
        _check_name("request_id", request.request_id, low=1)
        return pb.AbortResponse(aborted=await self._front.abort(request.request_id))

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a text."""
        engine = self._front.ready_engine()
        _check_model(request, engine)
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        token_ids = await tokenize_text(engine, "text", request.text, add_special_tokens=special)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """Text of token ids."""
        engine = self._front.ready_engine()
        _check_model(request, engine)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        text = await detokenize_ids(
            engine, "token_ids", request.token_ids, skip_special_tokens=skip
        )
        return pb.DetokenizeResponse(text=text)

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """What is served."""
        return model_info(self._front.ready_engine())

    async def get_server_info(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """What serves it."""
        return server_info(
            self._front.ready_engine(),
            uptime_s=time.monotonic() - self._front.started_s,
            draining=self._front.draining,
        )

    async def get_load(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """A snapshot of queues and pages."""
        size = request.num_prompt_tokens if request.HasField("num_prompt_tokens") else 1
        if size < 1:
            raise InvalidRequestError("num_prompt_tokens", size, "at least 1")
        load = self._front.ready_engine().load(size, _priority(request))
        return pb.GetLoadResponse(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_pages=load.num_free_pages,
            num_total_pages=load.num_total_pages,
            kv_cache_usage=load.kv_cache_usage,
            num_preemptions=load.num_preemptions,
            prompt_tokens=load.prompt_tokens,
            generation_tokens=load.generation_tokens,
            prefix_cache_queries=load.prefix_cache_queries,
            prefix_cache_hits=load.prefix_cache_hits,
            queues=[
                pb.QueueLoad(
                    priority=pb.Priority.Name(priority + 1),
                    num_waiting=queue.num_waiting,
                    oldest_s=queue.oldest_s,
                    num_prompt_tokens=queue.num_prompt_tokens,
                )
                for priority, queue in sorted(load.queues.items())
            ],
            num_cached_pages=load.num_cached_pages,
            num_projected_pages=load.num_projected_pages,
            predicted_ttft_s=load.predicted_ttft_s,
            num_rejected=load.num_rejected,
            num_swaps=load.num_swaps,
            num_unattainable=load.num_unattainable,
            num_probes=load.num_probes,
            wrong_refusals_ratio=load.wrong_refusals_ratio,
            wrong_refusals_low=load.wrong_refusals_interval[0],
            wrong_refusals_high=load.wrong_refusals_interval[1],
            standing=pb.Standing(**load.standing._asdict()),
            behind_s=load.behind_s,
        )

    async def _generate(
        self,
        request: pb.GenerateRequest,
        context: Context,
        kind: RequestOutputKind | None,
        write: Callable[[pb.GenerateResponse], Awaitable[None]],
    ) -> None:
        engine = self._front.ready_engine()
        _check_model(request, engine)
        params = await beside_loop(
            sampling_params_from_message, request.sampling_params, engine.sampling_defaults
        )
        if kind is not None:
            params = params.replace(output_kind=kind)
        stream = self._front.generate(
            _prompt(request, engine.max_model_len - 1),
            params,
            _request_id(request),
            generated=_generated(request, engine.max_model_len),
            **_options(request, context),
        )
        encoder = _encoder(engine, params)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                await write(encoder.encode(output))


def _encoder(engine: AsyncEngine, params: SamplingParams) -> OutputEncoder:
    return OutputEncoder(engine.model_name, is_delta=params.output_kind is RequestOutputKind.DELTA)


def _options(request: Asked, context: Context) -> dict[str, Any]:
    """Keyword arguments of `Front.generate` that a request of either kind may bring."""
    return {
        "priority": _priority(request),
        "timeout_s": _timeout_s(request, context.time_remaining()),
        "targets": _targets(request, context.invocation_metadata() or ()),
        "tenant": _check_name("tenant", request.tenant),
        "cache_salt": _check_name("cache_salt", request.cache_salt),
    }


def _prompt(request: Prompted, most: int) -> str | list[int]:
    has_text, has_tokens = request.HasField("prompt"), request.HasField("prompt_token_ids")
    if has_text == has_tokens:
        given = "both" if has_text else "neither"
        raise InvalidRequestError(
            "prompt", given, "exactly one of prompt (text) and prompt_token_ids"
        )
    if has_text:
        return request.prompt
    ids = request.prompt_token_ids.ids
    if len(ids) > most:
        allowed = f"at most {most}, as max_model_len says"
        raise InvalidRequestError("prompt_token_ids", f"{len(ids)} tokens", allowed)
    return list(ids)


def _generated(request: pb.GenerateRequest, most: int) -> list[Generated]:
    """What another server generated; long lists are refused before they are read."""
    if len(request.generated) > MAX_N:
        given = f"{len(request.generated)} completions"
        raise InvalidRequestError("generated", given, f"at most {MAX_N}")
    for index, each in enumerate(request.generated):
        if len(each.token_ids) > most:
            given, allowed = (
                f"{len(each.token_ids)} tokens",
                f"at most {most}, as max_model_len says",
            )
            raise InvalidRequestError(f"generated[{index}].token_ids", given, allowed)
    return [read_generated(each) for each in request.generated]


def _request_id(request: Asked) -> str | None:
    if not request.HasField("request_id"):
        return None
    return _check_name("request_id", request.request_id, low=1)


def _priority(request: Asked | pb.GetLoadRequest) -> Priority:
    if request.priority == pb.PRIORITY_UNSPECIFIED:
        return Priority.NORMAL
    if request.priority not in pb.Priority.values():
        raise InvalidRequestError(
            "priority", int(request.priority), "realtime, high, normal or low (1 to 4)"
        )
    return Priority(request.priority - 1)


def _timeout_s(request: Asked, remaining_s: float | None) -> float | None:
    """Seconds until the earlier of the request's and the call's deadlines."""
    bounds = [] if remaining_s is None else [remaining_s]
    if request.HasField("timeout_s"):
        if not math.isfinite(request.timeout_s):
            raise InvalidRequestError("timeout_s", request.timeout_s, "a finite number of seconds")
        bounds.append(request.timeout_s)
    return min(bounds, default=None)


def _targets(request: Asked, metadata: Iterable[tuple[str, str | bytes]]) -> Targets:
    """From the request's fields, and from metadata where a field is not given."""
    known = request.DESCRIPTOR.fields_by_name
    names = [name for name in _TARGET_FIELDS if name in known and request.HasField(name)]
    return read_targets(dict(metadata), {name: getattr(request, name) for name in names})


def _check_model(request: Any, engine: AsyncEngine) -> None:
    if request.HasField("model") and request.model != engine.model_name:
        raise UnknownModelError("model", request.model, f"{engine.model_name!r}, or not given")


def _check_name(name: str, value: str, low: int = 0) -> str:
    if not low <= len(value) <= MAX_NAME_CHARS:
        raise InvalidRequestError(name, value, f"{low} to {MAX_NAME_CHARS} characters")
    return value


def parser(
    kind: type[Message], max_parts: int | None = None
) -> Callable[[bytes], Message | InvalidRequestError]:
    """A deserializer that hands a malformed message on as the error it is.

    Args:
        max_parts: fields that it may have, those of messages within it included; for kinds that
            may hold so many messages that parsing them, which keeps the interpreter, would delay
            others' tokens.
    """

    def parse(raw: bytes) -> Message | InvalidRequestError:
        # A field takes two bytes at least: counting takes longer than parsing what is short.
        most = max_parts or len(raw)
        if len(raw) > 2 * most and num_parts(raw, kind, most) > most:
            return InvalidRequestError("message", "more fields", f"at most {most} fields")
        try:
            return kind.FromString(raw)
        except DecodeError:
            return InvalidRequestError(
                "message", raw, f"a well-formed {kind.DESCRIPTOR.full_name}, strings in UTF-8"
            )

    return parse


def serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def method(
    make: Callable[..., Any],
    handler: Handler,
    kind: type[Message],
    stats: RequestStats,
    max_parts: int | None = None,
) -> Any:
    """gRPC's own handler of a method that takes one message.

    Args:
        make: of gRPC, by what answers.
        handler: of a call.
        kind: of its message.
        stats: counts refusals.
        max_parts: see `parser`.
    """
    return make(guarded(handler, stats, parser(kind, max_parts)), None, serialize)


def guarded(
    handler: Handler, stats: RequestStats, parse: Callable[[bytes], Any] | None = None
) -> Handler:
    """The handler with its errors turned into statuses.

    Args:
        handler: of a call.
        stats: counts refusals.
        parse: makes the message of its bytes; None if gRPC has done so.
    """

    async def run(request: Any, context: Any) -> Any:
        try:
            if parse is not None:
                MESSAGE_BYTES.set(len(request))
                request = await beside_loop(parse, request)
            if isinstance(request, InvalidRequestError):
                raise request
            return await handler(request, context)
        except OctavoError as typed:
            error = typed
        except (grpc.aio.AbortError, *NOT_FAILURES):
            raise
        except BaseException as raised:  # gRPC would leave a call open for ever otherwise
            if await has_left(context, raised):
                raise asyncio.CancelledError from None  # there is no one to answer
            incident = uuid.uuid4().hex[:12]
            _log.error("incident %s", incident, exc_info=raised)
            error = OctavoError(f"internal error, incident {incident} in the log")
        return await refuse(context, error, stats)

    return run
