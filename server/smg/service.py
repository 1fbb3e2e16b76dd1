"""The methods of `vllm.grpc.engine.VllmEngine`, over the same door as all protocols.

The router smg speaks it to its workers. smg renders chats, tokenizes, and makes text of the tokens
that come back. What a request wants and how it ends is translated in `request.py` and `answer.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import POOLED
from octavo.engine.pooling.outputs import vector_of
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority
from octavo.server.beside_loop import beside_loop
from octavo.server.front import STARTING, Front
from octavo.server.grpc_service import MAX_PARTS, Context, method
from octavo.server.proto.smg import common_pb2
from octavo.server.proto.smg import vllm_engine_pb2 as pb
from octavo.server.server_info import octavo_version
from octavo.server.slo_headers import read_targets
from octavo.server.smg.answer import AnswerEncoder
from octavo.server.smg.kv_events import batch_message
from octavo.server.smg.request import (
    check_served,
    prompt_of,
    request_id_of,
    sampling_params_of,
    tokenization_of,
)
from octavo.server.smg.tokenizer_archive import chunks_of, tokenizer_archive

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
OPEN_METHODS = (f"/{SERVICE}/HealthCheck",)
"""Health, which is asked for without a token."""
SERVER_TYPE = "octavo-grpc"
ASK_THE_SERVER = "/dev/null"
"""What smg is told that the tokenizer's path is. It looks there on its own disk, then on a hub, and
asks the server for its tokenizer only where it finds none. What lies at a server's path on another
host, or under that name on a hub, need not be what is served; here there is never a tokenizer."""
MAX_ABORTS = 1024
"""Requests that one call ends."""

Handler = Callable[[Any, Any], Awaitable[Any]]


class VllmEngineService:
    """vLLM's service, as smg knows it.

    Args:
        front: the engine's door.
    """

    def __init__(self, front: Front) -> None:
        self._front = front

    def handlers(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        unary: dict[str, tuple[type[Message], Handler]] = {
            "Embed": (pb.EmbedRequest, self.embed),
            "HealthCheck": (pb.HealthCheckRequest, self.health_check),
            "Abort": (pb.AbortRequest, self.abort),
            "GetModelInfo": (pb.GetModelInfoRequest, self.get_model_info),
            "GetServerInfo": (pb.GetServerInfoRequest, self.get_server_info),
            "GetLoads": (pb.GetLoadsRequest, self.get_loads),
        }
        streams: dict[str, tuple[type[Message], Handler]] = {
            "Generate": (pb.GenerateRequest, self.generate),
            "GetTokenizer": (common_pb2.GetTokenizerRequest, self.get_tokenizer),
            "SubscribeKvEvents": (
                common_pb2.SubscribeKvEventsRequest,
                self.subscribe_kv_events,
            ),
        }
        stats = self._front.stats
        methods = {
            name: method(make, handler, kind, stats, MAX_PARTS)
            for group, make in (
                (unary, grpc.unary_unary_rpc_method_handler),
                (streams, grpc.unary_stream_rpc_method_handler),
            )
            for name, (kind, handler) in group.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Tokens as they come, or all at the end. A dropped call ends its request; see
        `OctavoService.generate_stream`."""
        engine = self._front.ready_engine()
        check_served(request)
        message = request.sampling_params
        tokenization = tokenization_of(message)
        is_cut = tokenization.truncate_prompt_tokens is not None
        params = await beside_loop(partial(sampling_params_of, message, stream=request.stream))
        stream = self._front.generate(
            prompt_of(request, None if is_cut else engine.max_model_len - 1),
            params,
            request_id_of(request.request_id),
            timeout_s=context.time_remaining(),
            targets=read_targets(dict(context.invocation_metadata() or ()), {}),
            tokenization=tokenization,
        )
        encoder = AnswerEncoder(params, stream=request.stream)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                for answer in encoder.encode(output):
                    await context.write(answer)

    async def embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """The vector of one prompt's hidden states, pooled as the model wants it."""
        engine = self._front.ready_engine()
        engine.pooler_or_refuse()
        stream = self._front.generate(
            prompt_of(request, engine.max_model_len),
            POOLED,
            request_id_of(request.request_id),
            timeout_s=context.time_remaining(),
            pooling=PoolingParams(),
        )
        async with contextlib.aclosing(stream) as outputs:
            output = await anext(outputs)
        vector = vector_of(output)
        return pb.EmbedResponse(
            embedding=vector.tolist(),
            prompt_tokens=len(output.prompt_token_ids),
            embedding_dim=len(vector),
        )

    async def health_check(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Whether new requests are served."""
        front = self._front
        if front.is_ready:
            return pb.HealthCheckResponse(healthy=True, message="ready")
        why = front.failing or ("draining" if front.draining else STARTING)
        return pb.HealthCheckResponse(healthy=False, message=why)

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Cancels the caller's requests that go by these ids; unknown ones are no error."""
        if len(request.request_ids) > MAX_ABORTS:
            given = f"{len(request.request_ids)} ids"
            raise InvalidRequestError("request_ids", given, f"at most {MAX_ABORTS}")
        for request_id in request.request_ids:
            if name := request_id_of(request_id):
                await self._front.abort(name)
        return pb.AbortResponse()

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """What is served."""
        engine = self._front.ready_engine()
        tokenizer = engine.tokenizer
        return pb.GetModelInfoResponse(
            model_path=engine.config.model,
            is_generation=engine.engine.inputs.generates,
            max_context_length=engine.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            served_model_name=engine.model_name,
            tokenizer_path=ASK_THE_SERVER,
            model_type=tokenizer.model_type,
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id or 0,
            max_req_input_len=engine.max_model_len - 1,
        )

    async def get_server_info(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """What serves it. Its replicas are its own business: it looks like one engine."""
        front, engine = self._front, self._front.ready_engine()
        return pb.GetServerInfoResponse(
            active_requests=front.num_inflight,
            last_receive_timestamp=front.last_request_unix_s,
            uptime_seconds=time.monotonic() - front.started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            model_dtype=engine.dtype,
            max_num_seqs=engine.engine.num_rows,
            constrained_decoding_start="first_token",
        )

    async def get_loads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """How busy the engine is, all of its replicas together."""
        load = self._front.ready_engine().load()
        standing = load.standing
        hit_rate = load.prefix_cache_hits / max(load.prefix_cache_queries, 1)
        each = pb.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=standing.kv_tokens - standing.free_tokens,
            max_total_num_tokens=standing.kv_tokens,
            token_usage=load.kv_cache_usage,
            cache_hit_rate=hit_rate,
            max_running_requests=standing.num_rows,
            num_waiting_uncached_tokens=standing.prompt_tokens[Priority.LOW],
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=octavo_version(),
            dp_rank_count=1,
            loads=[each],
        )

    async def get_tokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> None:
        """The tokenizer that is served, its chat template included."""
        tokenizer = self._front.ready_engine().tokenizer
        for chunk in chunks_of(await asyncio.to_thread(tokenizer_archive, tokenizer)):
            await context.write(chunk)

    async def subscribe_kv_events(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        """What the prefix cache holds, and what comes and goes; see `CacheFeed.batches`."""
        feed = self._front.cache_feed
        if feed is None:
            text = "the server was not started with kv_events"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
            return
        await context.send_initial_metadata(())  # smg waits for it, however idle the server is
        async with contextlib.aclosing(feed.batches(request.start_sequence_number)) as batches:
            async for batch in batches:
                await context.write(batch_message(batch, feed.page_size))
