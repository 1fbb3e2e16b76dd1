"""The methods of `inference.GRPCInferenceService`, over the same door as all protocols."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

import octavo
from octavo.engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    UnknownModelError,
)
from octavo.engine.output.outputs import RequestOutput
from octavo.server.front import Front
from octavo.server.grpc_service import Context, guarded, method, parser, serialize
from octavo.server.kserve.ask import Ask, read_ask
from octavo.server.kserve.model_facts import (
    BACKEND,
    VERSION,
    inputs_of,
    model_config,
    model_statistics,
    outputs_of,
)
from octavo.server.kserve.pooled import is_pooled, read_pooled_ask, tensors_of
from octavo.server.kserve.tensors import Tensor, write_outputs
from octavo.server.pooled_requests import pool_all
from octavo.server.proto.kserve.v2 import inference_pb2 as pb

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
OPEN_METHODS = (f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
"""Health, which load balancers ask for without a token."""
FINAL = "triton_final_response"
MAX_PER_STREAM = 256
"""Requests of one stream that are answered at once; more wait to be read."""
MAX_PARTS = 8192
"""Fields of a message, those within it included: 256 inputs, outputs and parameters have fewer."""

Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class InferenceService:
    """The Open Inference Protocol.

    Args:
        front: the engine's door.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    def handlers(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        unary: dict[str, tuple[type[Message], Callable[[Any, Any], Awaitable[Any]]]] = {
            "ServerLive": (pb.ServerLiveRequest, self.server_live),
            "ServerReady": (pb.ServerReadyRequest, self.server_ready),
            "ModelReady": (pb.ModelReadyRequest, self.model_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, self.server_metadata),
            "ModelMetadata": (pb.ModelMetadataRequest, self.model_metadata),
            "ModelInfer": (pb.ModelInferRequest, self.model_infer),
            "ModelConfig": (pb.ModelConfigRequest, self.model_config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self.model_statistics),
        }
        methods = {
            name: method(
                grpc.unary_unary_rpc_method_handler, handler, kind, self._front.stats, MAX_PARTS
            )
            for name, (kind, handler) in unary.items()
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            guarded(self.model_stream_infer, self._front.stats),
            parser(pb.ModelInferRequest, MAX_PARTS),
            serialize,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def server_live(self, request: object, context: Context) -> pb.ServerLiveResponse:
        """Whether the process does what it should."""
        return pb.ServerLiveResponse(live=self._front.is_alive)

    async def server_ready(self, request: object, context: Context) -> pb.ServerReadyResponse:
        """Whether new requests are served."""
        return pb.ServerReadyResponse(ready=self._front.is_ready)

    async def model_ready(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        """Whether the model is served."""
        _check_model(request.name, request.version, self._front.ready_engine())
        return pb.ModelReadyResponse(ready=self._front.is_ready)

    async def server_metadata(self, request: object, context: Context) -> pb.ServerMetadataResponse:
        """Name and version."""
        return pb.ServerMetadataResponse(
            name=BACKEND,
            version=octavo.__version__,
            extensions=["model_configuration", "statistics"],
        )

    async def model_metadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        """The tensors that go in and come out."""
        engine = self._front.ready_engine()
        _check_model(request.name, request.version, engine)
        kind = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=engine.model_name,
            versions=[VERSION],
            platform=BACKEND,
            inputs=[
                kind(name=name, datatype=each.datatype, shape=each.shape)
                for name, each in inputs_of(engine).items()
            ],
            outputs=[
                kind(name=name, datatype=each.datatype, shape=each.shape)
                for name, each in outputs_of(engine).items()
            ],
        )

    async def model_config(
        self, request: pb.ModelConfigRequest, context: Context
    ) -> pb.ModelConfigResponse:
        """What the model takes, gives and was started with."""
        engine = self._front.ready_engine()
        _check_model(request.name, request.version, engine)
        return pb.ModelConfigResponse(config=model_config(engine))

    async def model_statistics(
        self, request: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        """What became of requests since the start."""
        engine = self._front.ready_engine()
        _check_model(request.name or engine.model_name, request.version, engine)
        return pb.ModelStatisticsResponse(model_stats=[model_statistics(engine, self._front)])

    async def model_infer(
        self, request: pb.ModelInferRequest, context: Context
    ) -> pb.ModelInferResponse:
        """One answer, when the request has ended."""
        engine = self._front.ready_engine()
        _check_model(request.model_name, request.model_version, engine)
        if is_pooled(request, engine):
            return await self._pool(request, engine, context)
        ask = read_ask(request, engine.sampling_defaults, may_stream=False)
        async with contextlib.aclosing(self._outputs(ask, context)) as outputs:
            async for output in outputs:
                if output.finished:
                    return _response(request, engine, ask, output, len(_tokens(output)))
        raise EngineDeadError("the engine ended the request without an answer")

    async def model_stream_infer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Answers requests as they come, side by side; a cancelled call ends them all."""
        slots = asyncio.Semaphore(MAX_PER_STREAM)
        lock = asyncio.Lock()

        async def write(message: pb.ModelStreamInferResponse) -> None:
            async with lock:  # one write at a time, as gRPC wants it
                await context.write(message)

        async def answer(request: Any) -> None:
            try:
                await self._answer(request, context, write)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            async for request in requests:
                await slots.acquire()
                group.create_task(answer(request))

    async def _answer(self, request: Any, context: Context, write: Write) -> None:
        request_id = ""
        try:
            if isinstance(request, InvalidRequestError):
                raise request
            request_id = request.id
            engine = self._front.ready_engine()
            _check_model(request.model_name, request.model_version, engine)
            if is_pooled(request, engine):
                response = await self._pool(request, engine, context)
                response.parameters[FINAL].bool_param = True
                await write(pb.ModelStreamInferResponse(infer_response=response))
                return
            ask = read_ask(request, engine.sampling_defaults, may_stream=True)
            num_tokens = 0
            async with contextlib.aclosing(self._outputs(ask, context)) as outputs:
                async for output in outputs:
                    num_tokens += len(_tokens(output))
                    response = _response(request, engine, ask, output, num_tokens)
                    response.parameters[FINAL].bool_param = output.finished
                    await write(pb.ModelStreamInferResponse(infer_response=response))
        except OctavoError as error:
            self._front.stats.refused(error)
            message = pb.ModelStreamInferResponse(error_message=f"{error.grpc_status}: {error}")
            message.infer_response.id = request_id
            message.infer_response.parameters[FINAL].bool_param = True
            await write(message)

    async def _pool(
        self, request: pb.ModelInferRequest, engine: AsyncEngine, context: Context
    ) -> pb.ModelInferResponse:
        """The answer to a request for rows."""
        ask = read_pooled_ask(request, engine.pooler_or_refuse())
        options = {
            "priority": ask.priority,
            "timeout_s": _shortest(ask.timeout_s, context),
            "tokenization": ask.tokenization,
        }
        outputs = await pool_all(
            self._front, ask.texts, ask.params, ask.request_id, options, ask.names
        )
        response = pb.ModelInferResponse(
            model_name=engine.model_name, model_version=VERSION, id=request.id
        )
        write_outputs(response, tensors_of(ask, outputs))
        return response

    def _outputs(self, ask: Ask, context: Context) -> AsyncGenerator[RequestOutput, None]:
        return self._front.generate(
            ask.prompt,
            ask.params,
            ask.request_id,
            priority=ask.priority,
            timeout_s=_shortest(ask.timeout_s, context),
        )


def _response(
    request: pb.ModelInferRequest,
    engine: AsyncEngine,
    ask: Ask,
    output: RequestOutput,
    num_tokens: int,
) -> pb.ModelInferResponse:
    """What is new, in tensors of one element a completion."""
    texts = [(ask.before + c.text).encode("utf-8", "replace") for c in output.outputs]
    tensors = {
        "text_output": Tensor("text_output", "BYTES", texts),
        "finish_reason": Tensor(
            "finish_reason", "BYTES", [(c.finish_reason or "").encode() for c in output.outputs]
        ),
        "cumulative_logprob": Tensor(
            "cumulative_logprob", "FP32", [c.cumulative_logprob or 0.0 for c in output.outputs]
        ),
        "num_input_tokens": Tensor("num_input_tokens", "UINT32", [len(output.prompt_token_ids)]),
        "num_output_tokens": Tensor("num_output_tokens", "UINT32", [num_tokens]),
    }
    response = pb.ModelInferResponse(
        model_name=engine.model_name, model_version=VERSION, id=request.id
    )
    write_outputs(response, [tensors[name] for name in ask.wanted])
    return response


def _shortest(timeout_s: float | None, context: Context) -> float | None:
    """Seconds until the earlier of the request's and the call's deadlines."""
    bounds = [s for s in (timeout_s, context.time_remaining()) if s is not None]
    return min(bounds, default=None)


def _tokens(output: RequestOutput) -> list[int]:
    return [token_id for completion in output.outputs for token_id in completion.token_ids]


def _check_model(name: str, version: str, engine: AsyncEngine) -> None:
    if name != engine.model_name:
        raise UnknownModelError("model_name", name, repr(engine.model_name))
    if version not in ("", VERSION):
        raise UnknownModelError("model_version", version, f"{VERSION!r}, or not given")
