"""`RoutedEngine`: servers elsewhere with the face of one engine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue

from octavo.engine.clock import MonotonicClock
from octavo.engine.config import DEFAULT_ROUTER, EngineConfig
from octavo.engine.errors import (
    EngineDeadError,
    InvalidConfigError,
    InvalidRequestError,
    OverloadedError,
)
from octavo.engine.input.input_processor import Submission
from octavo.engine.observability.schedule import Schedule
from octavo.engine.replicas import messages
from octavo.engine.replicas.replica import Event
from octavo.engine.replicas.replica_group import ReplicaGroup
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.text.chat_template_file import read_chat_template
from octavo.engine.text.tokenizer import Tokenizer
from octavo.models.config import ModelConfig
from octavo.models.loading.gguf import GGUFSource
from octavo.models.loading.locate import locate
from octavo.models.loading.safetensors import read_config
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.route.backend import Backend
from octavo.server.route.membership import Membership
from octavo.server.route.remote_replica import RemoteReplica
from octavo.server.sampling_message import sampling_defaults_from_message

LOOK_S = 10.0
"""Between two lines of the log while no server answers."""
MEMBERS_S = 2.0
"""Between two looks at which servers there are."""
RETRY_S = 1.0
"""After how long a client comes back that no server could take."""

logger = logging.getLogger(__name__)


class RoutedEngine(ReplicaGroup):
    """A front's engine: it reads prompts and keeps what readers have; servers generate.

    A request whose server dies, hangs or goes away goes on at another from the tokens that its
    reader has. Waits until a server answers.

    Args:
        model: folder with the model's `config.json` and tokenizer, a GGUF file, or the name of a
            packaged model; no weights are read.
        membership: which servers there are, of one model.
        backend: how they are spoken to; its target means nothing.
        loop: that speaks to them, the one that serves clients: of two loops in a process, gRPC
            wakes both for everything that comes. It runs in another thread than those that build
            and close this engine.
        timeout_s: seconds without a word after which a server is taken for lost.
        seed: seeds requests that bring none.
        router: which server takes a request: as for `get_route_policy`.
        **chat: those of `EngineConfig` that say how chats are written and read: `chat_template`,
            `tool_call_parser`, `reasoning_parser`.

    Raises:
        ModelLoadError: the model cannot be used.
        InvalidConfigError: the first server that answers serves another model.
    """

    def __init__(
        self,
        model: str,
        membership: Membership,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float,
        seed: int = 0,
        router: str = DEFAULT_ROUTER,
        **chat: str | None,
    ) -> None:
        clock = MonotonicClock()
        self._model, self._tokenizer = _read_model(model)
        given = {name: value for name, value in chat.items() if value is not None}
        if "chat_template" in given:
            template = read_chat_template(given["chat_template"])
            self._tokenizer = self._tokenizer.with_chat_template(template)
        self._common: pb.GetModelInfoResponse | None = None
        events: SimpleQueue[Event | None] = SimpleQueue()
        self._loop = loop
        self.servers: list[RemoteReplica] = []
        """Those that have left among them, until others take their places."""
        self._membership, self._backend = membership, backend
        self._make_server = partial(
            RemoteReplica, loop=self._loop, events=events, make_ready=self._make_ready,
            timeout_s=timeout_s, now_s=clock.now_s,
        )  # fmt: skip
        self._look = asyncio.run_coroutine_threadsafe(self._keep_members(), self._loop)
        try:
            ready = self._first_ready(events)
        except BaseException:
            self._end()
            raise
        config = EngineConfig(
            model=model,
            served_model_name=ready.model_name,
            seed=seed,
            **given,  # type: ignore[arg-type]
        )
        super().__init__(config, self.servers, events, ready, clock=clock, router=router)

    async def _keep_members(self) -> None:
        """Looks which servers there are, again and again."""
        while True:
            try:
                self._take_members(await self._membership.look())
            except Exception:
                logger.exception("looking for servers failed")
            if self._membership.is_fixed:
                return
            await asyncio.sleep(MEMBERS_S)

    def _take_members(self, targets: Sequence[str]) -> None:
        here = {server.target: server for server in self.servers if not server.has_left}
        for target, server in here.items():
            if target not in targets and not server.is_leaving:
                logger.info("%s is no server of this front any more", target)
                server.leave()
        for target in targets:
            known = here.get(target)
            if known is not None:
                if known.is_leaving:
                    known.stay()
                continue
            backend = dataclasses.replace(self._backend, target=target)
            free = next((each for each in self.servers if each.has_left), None)
            if free is not None:
                free.become(backend)
            else:
                server = self._make_server(len(self.servers), backend)
                self.servers.append(server)
                server.open()

    def _first_ready(self, events: SimpleQueue[Event | None]) -> messages.Ready:
        """Waits for the first server."""
        begun_s = time.monotonic()
        while True:
            try:
                event = events.get(timeout=LOOK_S)
            except Empty:
                waited_s = time.monotonic() - begun_s
                logger.warning("no server answers yet, after %.0f s", waited_s)
                continue
            finally:
                refused = [server.refused for server in self.servers]
                if self._membership.is_fixed and refused and all(refused):
                    raise refused[0] or EngineDeadError("no server can be used")
            if event is not None and isinstance(event.message, messages.Ready):
                return event.message

    def _make_ready(
        self, target: str, info: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse
    ) -> messages.Ready:
        """What a server serves, if that goes with this front's model and the other servers."""
        common = self._common or info
        for name in ("model", "vocab_size", "dtype"):
            own, others = getattr(info, name), getattr(common, name)
            if own != others:
                raise InvalidConfigError("backend", target, f"of {name} {others!r}, not {own!r}")
        if info.vocab_size != self._model.vocab_size:
            raise InvalidConfigError(
                "model", f"vocab_size {self._model.vocab_size}",
                f"the folder of what {target} serves, of vocab_size {info.vocab_size}",
            )  # fmt: skip
        if self._common is not None and info.max_model_len < self._common.max_model_len:
            allowed = f"of max_model_len {self._common.max_model_len} at least"
            raise InvalidConfigError("backend", f"{target}: {info.max_model_len}", allowed)
        self._common = common
        rows = server.engine_args.get("max_num_seqs", "")
        num_rows = int(rows) if rows.isdecimal() else 1
        return messages.Ready(
            platform=server.platform,
            num_devices=server.num_devices,
            model_config=self._model,
            model_name=info.model,
            dtype=info.dtype,
            limits=StepLimits(
                max_num_batched_tokens=common.max_model_len,
                max_num_seqs=num_rows,
                max_num_steps=1,
                max_prefill_rows=num_rows,
                max_pages_per_seq=common.max_model_len,
                page_size=1,
                num_pages=2,
                max_model_len=common.max_model_len,
                token_edges=(common.max_model_len,),
            ),
            tokenizer=self._tokenizer,
            eos_token_ids=tuple(
                dict.fromkeys((*self._tokenizer.eos_token_ids, *info.eos_token_ids))
            ),
            sampling_defaults=sampling_defaults_from_message(common.sampling_defaults),
            pooler=None,
            generates=True,
            compile_s={},
        )

    def submit(self, submission: Submission) -> None:
        """Takes a checked submission. A server that refuses it tells so as its error.

        Raises:
            OverloadedError: no server takes requests at the moment.
            QuarantinedError: servers died of its prompt a moment ago.
        """
        while self._take_event():  # whoever came or went while nothing was under way
            pass
        if all(server.ready is None for server in self.servers):
            raise OverloadedError("no server takes requests", RETRY_S)
        self._placement.submit(submission)

    def flush_prefix_cache(self) -> tuple[int, int]:
        """Refuses to: each server has an admin service of its own."""
        allowed = "asked of each server's own admin service"
        raise InvalidRequestError("flush_prefix_cache", "a front", allowed)

    def schedules(self) -> list[Schedule]:
        """Nothing: each server shows its own."""
        return [Schedule()]

    def check_integrity(self) -> None:
        """Nothing: each server sees to its own pages."""

    def wait_until_compiled(self) -> None:
        """Nothing: each server compiles its own programs."""

    def prepare_grammars(self) -> None:
        """Makes ready for structured outputs, whose grammars are checked here."""
        self.grammars.prepare()

    def close(self) -> None:
        """Ends every call and leaves the servers as they are."""
        super().close()
        self._end()

    def _end(self) -> None:
        self._look.cancel()
        for server in self.servers:
            server.close()


def _read_model(model: str) -> tuple[ModelConfig, Tokenizer]:
    """What a front needs of a model."""
    path, kind = locate(model)
    if kind == "gguf":
        source = GGUFSource(path)
        return source.config, Tokenizer.from_gguf_metadata(source.metadata)
    return read_config(path), Tokenizer.from_source(path)
