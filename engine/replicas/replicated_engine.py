"""`ReplicatedEngine`: several engines, each in a process of its own, with the face of one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

from tqdm import tqdm

from octavo.engine.clock import MonotonicClock
from octavo.engine.config import SERVING_BATCHED_TOKENS, EngineConfig
from octavo.engine.errors import (
    EngineDeadError,
    InvalidConfigError,
    ModelLoadError,
    OctavoError,
)
from octavo.engine.replicas import messages
from octavo.engine.replicas.hang_watch import HangWatch
from octavo.engine.replicas.replica import Died, Event, Replica
from octavo.engine.replicas.replica_group import ReplicaGroup
from octavo.engine.replicas.shares import devices_of, make_starts, own_cores


class ReplicatedEngine(ReplicaGroup):
    """Engines in processes of their own, to be used as one `Engine`. One thread drives it.

    Each request goes where `replica_router` says. One whose process dies,
    or hangs and is killed (`HangWatch`), is started again, and what it had under way goes on at the
    others: readers see a pause. A request fails only if replicas are found to die of it.

    Args:
        config: engine arguments; `data_parallel_size` is the number of replicas.
        progress: show a bar while programs compile.
        incarnation: begins the ids of requests, which all replicas share; see `RequestIds`.

    Attributes: as those of `Engine`; `limits` are those of one replica.

    Raises: as for `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: bool = False,
        incarnation: str | None = None,
    ) -> None:
        config = config.with_token_budget(SERVING_BATCHED_TOKENS)
        events: SimpleQueue[Event | None] = SimpleQueue()
        self.replicas = _make_replicas(config, events)
        self.hang_watch = HangWatch(self.replicas, config.replica_timeout_s)
        self._finalizer = weakref.finalize(self, _stop, self.replicas, self.hang_watch)
        self.hang_watch.start()
        try:
            ready = self._build(config, events, progress)
        except BaseException:
            self._finalizer()
            raise
        super().__init__(
            config,
            self.replicas,
            events,
            ready,
            clock=MonotonicClock(),
            incarnation=incarnation,
            roles=config.roles,
            router=config.replica_router,
        )

    def _build(
        self, config: EngineConfig, events: SimpleQueue[Event | None], progress: bool
    ) -> messages.Ready:
        """Starts all replicas and waits for them."""
        for replica in self.replicas:
            replica.open()
        ready: dict[int, messages.Ready] = {}
        num_done: dict[int, int] = {}
        with tqdm(desc="Compiling steps", disable=not progress) as bar:
            while len(ready) < len(self.replicas):
                event = events.get()
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
                config.data_parallel_size,
                f"as many as there are GPUs for: each takes {config.tensor_parallel_size}",
            )
        if set(config.roles) != {"both"} and not ready[0].limits.needs.is_plain:
            raise InvalidConfigError(
                "replica_roles", config.replica_roles,
                "not given for a model with sliding windows, whose pages do not move",
            )  # fmt: skip
        return ready[0]

    def close(self) -> None:
        """Ends the replicas. The engine must not be used after it."""
        self._finalizer()
        super().close()


def _make_replicas(config: EngineConfig, events: SimpleQueue[Event | None]) -> list[Replica]:
    """The replicas of an engine; none is started."""
    num_devices = config.tensor_parallel_size
    return [
        Replica(index, start, devices_of(index, num_devices, os.environ), events)
        for index, start in enumerate(make_starts(config, own_cores()))
    ]


def _stop(replicas: Sequence[Replica], watch: HangWatch) -> None:
    for replica in replicas:
        replica.stop()
    for replica in replicas:
        replica.join()
    watch.close()
