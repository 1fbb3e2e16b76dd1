"""Typed clients: the engine's own types in and out, its own errors raised.

Public as `octavo.client`. The blocking client and the asyncio one stand side by side in this one
module, method for method, so that neither gets what the other lacks.

>>> with OctavoClient("127.0.0.1:50051") as client:
...     for output in client.stream("The capital of France is", SamplingParams(max_tokens=8)):
...         print(output.outputs[0].text, end="")
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import EmbeddingRequestOutput
from octavo.engine.request import Priority
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.server.client_requests import (
    chat_request,
    embed_request,
    generate_request,
    read_chat_response,
)
from octavo.server.embedding_message import read_embed_response
from octavo.server.output_message import OutputDecoder
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.retries import NO_RETRIES, Attempts, RetryPolicy, check_timeout
from octavo.server.sampling_message import OUTPUT_KINDS
from octavo.server.status import error_of

DEFAULT_TARGET = "127.0.0.1:50051"
_METHOD = "/octavo.v1.OctavoService/"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A connection whose other end is gone is noticed while a call waits for its next token.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Pauses between attempts are ours, with what the server said.
    ("grpc.enable_retries", 0),
)

_M = TypeVar("_M", bound=Message)


class OctavoClient:
    """A blocking client; usable from many threads.

    Args:
        target: address of a server.
        timeout_s: deadline of every call that gives none, attempts and pauses included; None waits
            as long as it takes.
        token: shown with every call, for a server that asks for one.
        credentials: for TLS (`grpc.ssl_channel_credentials`); None is plain text.
        retry: what to do about a server that is full or going away; None never tries again.
        channel: a channel of one's own (interceptors, other options); `target` and `credentials`
            are then unused.

    Every method raises the engine's typed errors (`octavo.engine.errors`), and so does this for a
    `timeout_s` that is no number of seconds above 0.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008
        channel: grpc.Channel | None = None,
    ) -> None:
        check_timeout(timeout_s)
        if channel is None and credentials is None:
            channel = grpc.insecure_channel(target, options=_OPTIONS)
        elif channel is None:
            channel = grpc.secure_channel(target, credentials, options=_OPTIONS)
        self._calls = _Calls(channel, timeout_s, token, retry)

    def __enter__(self) -> OctavoClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        self._calls.channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **request: Any,
    ) -> RequestOutput:
        """The finished output of one prompt; `request` as for `generate_request`."""
        message = generate_request(prompt, sampling_params, **request)
        answer = self._call("Generate", message, pb.GenerateResponse, timeout_s)
        return OutputDecoder(_text(prompt)).decode(answer)

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
        timeout_s: float | None = None,
        **request: Any,
    ) -> Iterator[RequestOutput]:
        """Outputs as they are generated; closing the iterator cancels the request.

        Args:
            output_kind: what each output holds, whatever `sampling_params` says.
        """
        message = generate_request(prompt, sampling_params, **request)
        message.sampling_params.output_kind = OUTPUT_KINDS[output_kind]
        begin = self._calls.stream("GenerateStream", message, pb.GenerateResponse)
        attempts, has_begun = self._calls.attempts(timeout_s), False
        while True:
            call = begin(timeout=attempts.timeout_s)
            decoder = OutputDecoder(_text(prompt))
            try:
                for answer in call:
                    has_begun = True
                    yield decoder.decode(answer)
                return
            except grpc.RpcError as error:
                typed = error_of(error)
            finally:
                call.cancel()
            pause_s = None if has_begun else attempts.pause_s(typed)
            if pause_s is None:
                raise typed
            time.sleep(pause_s)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **request: Any,
    ) -> RequestOutput:
        """The answer to a conversation; `request` as for `chat_request`.

        Returns:
            One output; `output.outputs[0].message` is the turn: content, calls of tools, thoughts.
        """
        message = chat_request(messages, sampling_params, **request)
        return read_chat_response(self._call("Chat", message, pb.ChatResponse, timeout_s))

    def embed(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **request: Any
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt; `request` as for `embed_request`."""
        message = embed_request(prompt, **request)
        answer = self._call("Embed", message, pb.EmbedResponse, timeout_s)
        return read_embed_response(answer, _text(prompt))

    def abort(self, request_id: str) -> bool:
        """Cancels your requests that go by this id; whether any was in flight."""
        message = pb.AbortRequest(request_id=request_id)
        return self._call("Abort", message, pb.AbortResponse).aborted

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        message = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call("Tokenize", message, pb.TokenizeResponse).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        message = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call("Detokenize", message, pb.DetokenizeResponse).text

    def model_info(self) -> pb.GetModelInfoResponse:
        """What is served."""
        return self._call("GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse)

    def server_info(self) -> pb.GetServerInfoResponse:
        """What serves it."""
        return self._call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)

    def load(
        self, num_prompt_tokens: int = 1, priority: Priority | str | int | None = None
    ) -> pb.GetLoadResponse:
        """A snapshot of queues and pages, and when a request of this size and class would speak."""
        message = _load_request(num_prompt_tokens, priority)
        return self._call("GetLoad", message, pb.GetLoadResponse)

    def _call(
        self, name: str, message: Message, kind: type[_M], timeout_s: float | None = None
    ) -> _M:
        ask, attempts = self._calls.unary(name, message, kind), self._calls.attempts(timeout_s)
        while True:
            try:
                answer: _M = ask(timeout=attempts.timeout_s)
                return answer
            except grpc.RpcError as error:
                typed = error_of(error)
            pause_s = attempts.pause_s(typed)
            if pause_s is None:
                raise typed
            time.sleep(pause_s)


class AsyncOctavoClient:
    """The same for asyncio; arguments, results and errors are those of `OctavoClient`."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float | None = None,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        check_timeout(timeout_s)
        if channel is None and credentials is None:
            channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        elif channel is None:
            channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self._calls = _Calls(channel, timeout_s, token, retry)

    async def __aenter__(self) -> AsyncOctavoClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        await self._calls.channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **request: Any,
    ) -> RequestOutput:
        """The finished output of one prompt."""
        message = generate_request(prompt, sampling_params, **request)
        answer = await self._call("Generate", message, pb.GenerateResponse, timeout_s)
        return OutputDecoder(_text(prompt)).decode(answer)

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
        timeout_s: float | None = None,
        **request: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they are generated; closing the iterator cancels the request."""
        message = generate_request(prompt, sampling_params, **request)
        message.sampling_params.output_kind = OUTPUT_KINDS[output_kind]
        begin = self._calls.stream("GenerateStream", message, pb.GenerateResponse)
        attempts, has_begun = self._calls.attempts(timeout_s), False
        while True:
            call = begin(timeout=attempts.timeout_s)
            decoder = OutputDecoder(_text(prompt))
            try:
                async for answer in call:
                    has_begun = True
                    yield decoder.decode(answer)
                return
            except grpc.aio.AioRpcError as error:
                typed = error_of(error)
            finally:
                call.cancel()
            pause_s = None if has_begun else attempts.pause_s(typed)
            if pause_s is None:
                raise typed
            await asyncio.sleep(pause_s)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **request: Any,
    ) -> RequestOutput:
        """The answer to a conversation."""
        message = chat_request(messages, sampling_params, **request)
        return read_chat_response(await self._call("Chat", message, pb.ChatResponse, timeout_s))

    async def embed(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **request: Any
    ) -> EmbeddingRequestOutput:
        """The embedding of one prompt."""
        message = embed_request(prompt, **request)
        answer = await self._call("Embed", message, pb.EmbedResponse, timeout_s)
        return read_embed_response(answer, _text(prompt))

    async def abort(self, request_id: str) -> bool:
        """Cancels your requests that go by this id; whether any was in flight."""
        message = pb.AbortRequest(request_id=request_id)
        return (await self._call("Abort", message, pb.AbortResponse)).aborted

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        message = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call("Tokenize", message, pb.TokenizeResponse)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Text of token ids."""
        message = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call("Detokenize", message, pb.DetokenizeResponse)).text

    async def model_info(self) -> pb.GetModelInfoResponse:
        """What is served."""
        return await self._call("GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse)

    async def server_info(self) -> pb.GetServerInfoResponse:
        """What serves it."""
        return await self._call(
            "GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse
        )

    async def load(
        self, num_prompt_tokens: int = 1, priority: Priority | str | int | None = None
    ) -> pb.GetLoadResponse:
        """A snapshot of queues and pages, and when a request of this size and class would speak."""
        message = _load_request(num_prompt_tokens, priority)
        return await self._call("GetLoad", message, pb.GetLoadResponse)

    async def _call(
        self, name: str, message: Message, kind: type[_M], timeout_s: float | None = None
    ) -> _M:
        ask, attempts = self._calls.unary(name, message, kind), self._calls.attempts(timeout_s)
        while True:
            try:
                answer: _M = await ask(timeout=attempts.timeout_s)
                return answer
            except grpc.aio.AioRpcError as error:
                typed = error_of(error)
            pause_s = attempts.pause_s(typed)
            if pause_s is None:
                raise typed
            await asyncio.sleep(pause_s)


class _Calls:
    """How calls are made over a channel of either kind: what the blocking and the asyncio client
    have in common."""

    def __init__(
        self, channel: Any, timeout_s: float | None, token: str | None, retry: RetryPolicy | None
    ) -> None:
        self.channel = channel
        self._timeout_s = timeout_s
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        self._retry = retry or NO_RETRIES

    def attempts(self, timeout_s: float | None) -> Attempts:
        """The attempts at one call, begun now."""
        return Attempts(self._retry, self._timeout_s if timeout_s is None else timeout_s)

    def unary(self, name: str, message: Message, kind: type[Message]) -> Callable[..., Any]:
        """A method that is answered once; to be called with a `timeout`."""
        return self._bound(self.channel.unary_unary, name, message, kind)

    def stream(self, name: str, message: Message, kind: type[Message]) -> Callable[..., Any]:
        """A method that is answered by a stream; to be called with a `timeout`."""
        return self._bound(self.channel.unary_stream, name, message, kind)

    def _bound(
        self, make: Callable[..., Any], name: str, message: Message, kind: type[Message]
    ) -> Callable[..., Any]:
        method = make(
            _METHOD + name,
            request_serializer=type(message).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return partial(method, message, metadata=self._metadata)


def _load_request(
    num_prompt_tokens: int, priority: Priority | str | int | None
) -> pb.GetLoadRequest:
    return pb.GetLoadRequest(
        num_prompt_tokens=num_prompt_tokens,
        priority=pb.Priority.Name(Priority.parse(priority) + 1),
    )


def _text(prompt: str | Sequence[int]) -> str | None:
    return prompt if isinstance(prompt, str) else None
