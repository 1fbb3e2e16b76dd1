"""The door that every protocol shares: readiness, draining, the limit of requests, what is counted.

A protocol's own module reads its messages and writes its answers; between the two it calls
`Front.generate`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    StartingError,
)
from octavo.engine.input.input_processor import Prompt
from octavo.engine.input.targets import NO_TARGETS, Targets
from octavo.engine.input.tokenization import AS_THE_MODEL_WANTS, Tokenization
from octavo.engine.output.outputs import Generated, RequestOutput
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.text.tokenizer import NO_TEMPLATE
from octavo.server.caller import CALLER
from octavo.server.chat_renderer import ChatRenderer
from octavo.server.request_stats import RequestStats, RequestWatch
from octavo.server.tracing import TRACE_PARENT

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.cache_feed import CacheFeed

LOW_PRIORITY_SHARE = 0.875
"""Of the requests that a server holds, those of low priority may be: a batch that fills the server
leaves places to what somebody waits for."""
STARTING = "the server is starting: the model is still loading"
RETRY_AFTER_S = 1.0
"""When the server holds all the requests it takes: some will have ended by then."""

request_log = logging.getLogger("octavo.request")
"""One line a request, when it has ended; never its text unless the server was told to."""


class Front:
    """One engine's door. Lives in the event loop.

    Args:
        max_concurrent_requests: more are refused at once; of low priority, more than
            `LOW_PRIORITY_SHARE` of them.
        request_timeout_s: most seconds a request may take; None sets no limit.
        log_prompts: whether the log of requests may hold their prompts.

    Attributes:
        engine: None until the model is loaded: calls are then refused.
        draining: set to refuse new generations while those in flight finish.
        stuck: set while the engine's thread has been in one step for too long.
        deaf: set when a port has stopped listening though nobody told it to.
        num_inflight: generations being answered.
        cache_feed: what the prefix cache holds, if routers may follow it.
        renderer: renders chats; made for the first one if it was not before.
        stats: what became of requests.
        started_s: monotonic clock at the start.
        last_request_unix_s: when the newest request came; 0 if none did.
    """

    def __init__(
        self,
        *,
        max_concurrent_requests: int = 2048,
        request_timeout_s: float | None = None,
        log_prompts: bool = False,
    ) -> None:
        self.engine: AsyncEngine | None = None
        self.draining = False
        self.stuck = False
        self.deaf = False
        self.num_inflight = 0
        self.cache_feed: CacheFeed | None = None
        self.renderer: ChatRenderer | None = None
        self.stats = RequestStats()
        self.started_s = time.monotonic()
        self.last_request_unix_s = 0.0
        self._max_concurrent_requests = max_concurrent_requests
        self._request_timeout_s = request_timeout_s
        self._log_prompts = log_prompts

    @property
    def is_alive(self) -> bool:
        """Whether the process does what it should."""
        return self.failing is None

    @property
    def failing(self) -> str | None:
        """What is wrong with the process so that it should be started again; None if nothing."""
        if self.stuck:
            return "the engine is stuck in a step"
        if self.engine is not None and not self.engine.is_healthy:
            return "the engine is broken"
        return "a port of the server listens no more" if self.deaf else None

    @property
    def is_ready(self) -> bool:
        """Whether new requests are served."""
        engine = self.engine
        return engine is not None and engine.is_ready and self.is_alive and not self.draining

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        names: Mapping[str, Any],
        template: str | None = None,
    ) -> str:
        """The prompt for a conversation, rendered in another process; see `ChatRenderer.render`.

        Raises: as `ChatRenderer.render`; also
            InvalidRequestError: the model has no chat template.
        """
        tokenizer = self.ready_engine().tokenizer
        if template is None and tokenizer.chat_template is None:
            raise InvalidRequestError("messages", messages, NO_TEMPLATE)
        if self.renderer is None:
            self.renderer = ChatRenderer(tokenizer.chat_template or "", tokenizer.named_tokens)
        return await self.renderer.render(messages, names, template)

    def ready_engine(self) -> AsyncEngine:
        """The engine.

        Raises:
            StartingError: the model is still loading.
        """
        if self.engine is None:
            raise StartingError(STARTING)
        return self.engine

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
        targets: Targets = NO_TARGETS,
        tenant: str = "",
        cache_salt: str = "",
        tokenization: Tokenization = AS_THE_MODEL_WANTS,
        pooling: PoolingParams | None = None,
        generated: Sequence[Generated] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """`AsyncEngine.generate` behind the door. Leaving the iteration early cancels the request.

        The request belongs to the current `Caller`, which may settle its tenant.

        Raises: as `AsyncEngine.generate`; also
            EngineDeadError: loading or draining.
            OverloadedError: the server holds all the requests it takes.
        """
        is_delta = params.output_kind is RequestOutputKind.DELTA
        watch = RequestWatch(self.stats, priority, targets, is_delta=is_delta)
        self.last_request_unix_s = time.time()
        try:
            engine = self.ready_engine()
            self._check_open(priority)
            caller = CALLER.get()
            tenant = caller.tenant_of(tenant)
            if self._request_timeout_s is not None:
                bounds = (self._request_timeout_s, timeout_s)
                timeout_s = min(bound for bound in bounds if bound is not None)
            stream: Any = engine.generate(
                prompt,
                params,
                request_id,
                priority=priority,
                timeout_s=timeout_s,
                targets=targets,
                tenant=tenant,
                cache_salt=cache_salt,
                owner=caller.owner,
                trace_parent=TRACE_PARENT.get() or "",
                tokenization=tokenization,
                pooling=pooling,
                generated=generated,
            )
            self.num_inflight += 1
            try:
                async with contextlib.aclosing(stream) as outputs:
                    async for output in outputs:
                        watch.saw(output)
                        yield output
            finally:
                self.num_inflight -= 1
        except OctavoError as error:
            watch.failed(error)
            self._log(request_id, watch, prompt, error)
            raise
        except BaseException:
            watch.cancelled()
            self._log(request_id, watch, prompt)
            raise
        self._log(request_id, watch, prompt)

    async def abort(self, request_id: str) -> bool:
        """Cancels the current `Caller`'s requests in flight that go by this id; whether there was
        any. What others submitted is not found.

        Raises:
            StartingError: the model is still loading.
        """
        return await self.ready_engine().abort(request_id, CALLER.get().owner)

    def _check_open(self, priority: Priority) -> None:
        if self.draining:
            raise EngineDeadError("the server is draining: ask another one")
        most, of_these = self._max_concurrent_requests, "its most"
        if priority is Priority.LOW:
            most, of_these = math.ceil(most * LOW_PRIORITY_SHARE), "its most for low priority"
        if self.num_inflight >= most:
            raise OverloadedError(f"the server holds {most} requests, {of_these}", RETRY_AFTER_S)

    def _log(
        self,
        request_id: str | None,
        watch: RequestWatch,
        prompt: Prompt,
        error: OctavoError | None = None,
    ) -> None:
        if not request_log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "request_id": request_id or "",
            "engine_id": "",
            "finish_reason": watch.finish_reason,
            "generation_tokens": watch.num_tokens,
        }
        if watch.newest is not None:
            moments = watch.newest.metrics
            fields["request_id"] = watch.newest.request_id
            fields["engine_id"] = watch.newest.engine_id
            fields["prompt_tokens"] = len(watch.newest.prompt_token_ids)
            fields["cached_tokens"] = watch.newest.num_cached_tokens
            fields["num_preemptions"] = moments.num_preemptions
            if moments.ttft_s is not None:
                fields["ttft_s"] = round(moments.ttft_s, 6)
            if moments.last_token_s is not None:
                fields["e2e_s"] = round(moments.last_token_s - moments.arrival_s, 6)
        if error is not None:
            # Its message may quote what the client sent.
            fields["error"] = str(error) if self._log_prompts else type(error).__name__
        if self._log_prompts:
            fields["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        request_log.info("request ended", extra={"fields": fields})
