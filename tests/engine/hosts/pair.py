"""A group of two hosts in one process: each has an executor of its own, on the same device.

What one computes, the other computes, too, as if its devices held the same shards. The log, the
digests and what ends a group are the real ones, over a pair of sockets.
"""

from __future__ import annotations

import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.hosts.follower import Follower
from octavo.engine.hosts.group import LeadingHosts, follow_log
from octavo.engine.hosts.host_executor import FollowingExecutor
from octavo.engine.hosts.leader import Leader
from octavo.engine.hosts.leading_executor import LeadingExecutor
from octavo.engine.hosts.messages import Kind, Link, Message
from octavo.engine.sampling_params import SamplingParams

KEYS = b"commands" * 4, b"reports." * 4
TIMEOUT_S = 60.0
"""Longer than a busy machine forgets a thread."""
SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "warm_up": "coarse",
    "num_kv_pages": 200,
    "fail_on_compile": True,
}


def connected() -> tuple[Link, Link]:
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return Link(one), Link(server.accept()[0])


class Pair:
    """An engine that leads, and its follower.

    Attributes:
        engine: the leader's.
        ended: how the processes would have ended: whose, and their exit status.
    """

    def __init__(self, model: Path, timeout_s: float = TIMEOUT_S, **changes: Any) -> None:
        config = EngineConfig(**{"model": str(model), **SMALL, **changes})
        self._timeout_s = timeout_s
        self._connect(partial(follow_log, config=config))
        self.engine = Engine(config, hosts=LeadingHosts(self.leader, 120.0))

    @property
    def follower(self) -> FollowingExecutor:
        """The other host's executor."""
        return self.loop._executor

    def _connect(self, follow: Any) -> None:
        self.ended: list[tuple[str, int]] = []
        ours, theirs = connected()
        ours.trust(*KEYS)
        theirs.trust(*reversed(KEYS))
        self.leader = Leader({1: ours}, KEYS[0], self._timeout_s, 60.0, self._ends("leader"))
        self.loop = Follower(theirs, self._timeout_s, self._ends("follower"))
        self.links = ours, theirs
        self._thread = threading.Thread(target=follow, args=(self.loop,), daemon=True)
        self._thread.start()

    def _ends(self, name: str) -> Any:
        ended = self.ended
        return lambda status: ended.append((name, status))

    def begin_anew(self) -> None:
        """Another group of the same executors, after one has ended; requests go on."""
        follower, leading = self.follower, self.engine.executor
        assert isinstance(leading, LeadingExecutor)
        self.loop._commands.put(Message(Kind.CLOSE))
        self._thread.join(30)
        assert not self._thread.is_alive()
        for link in self.links:
            link.close()
        self._connect(lambda loop: loop.run(follower, lambda: None))
        leading._leader = self.leader
        self.leader.answers(Kind.READY, 30)
        leading.go_live(leading.awaited("coarse")[0])
        self.engine.scheduler.recover(self.engine.clock.now_s(), ())
        self.engine.core._reset()

    def submit(self, name: str, prompt: list[int], **params: Any) -> None:
        params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **params}
        now_s = self.engine.clock.now_s()
        inputs = self.engine.inputs
        self.engine.submit(inputs.process(name, prompt, SamplingParams(**params), now_s=now_s))

    def close(self) -> None:
        self.engine.close()
        self._thread.join(30)
        assert not self._thread.is_alive()
