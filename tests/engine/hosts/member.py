"""One host of a group, as a process of its own: `python -m tests.engine.hosts.member SETTINGS`.

SETTINGS is JSON: `place` of the host, `engine` settings, for the leader `work` of `serve_all`, and
for a follower the step that it computes twice (`skew_at`), if any.
The leader prints the tokens as JSON. Then it goes on serving until it is told to end, by a line on
its standard input, or the group ends.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.hosts.hosts_config import HostsConfig


def main(settings: dict[str, Any]) -> None:
    place, config = HostsConfig(**settings["place"]), EngineConfig(**settings["engine"])
    if not place.is_leader:
        from octavo.engine.hosts.group import follow

        skew(settings.get("skew_at"))
        follow(place, config)
        return
    from octavo.engine.engine import Engine
    from octavo.engine.hosts.group import lead
    from tests.engine.hosts.work import serve_all, swap_always

    swap_always()
    engine = Engine(config, hosts=lead(place, config))
    tokens = serve_all(engine, **settings["work"])
    load = engine.scheduler.load()
    counts = {
        "swaps": load.num_swaps,
        "recomputes": load.num_recomputes,
        "prefix hits": load.prefix_hit_tokens,
        "recoveries": engine.core.recovery.num_recoveries,
    }
    print(json.dumps({"tokens": tokens, **counts}), flush=True)
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    while not told.is_set():
        serve_all(engine)
    engine.close()


def skew(at: int | None) -> None:
    """Has this host be a turn ahead from a step on."""
    from octavo.engine.hosts.host_executor import FollowingExecutor

    whole, calls = FollowingExecutor.run_step, []

    def run_step(executor: FollowingExecutor, shape: Any, vector: Any) -> Any:
        calls.append(shape)
        if len(calls) == at:
            whole(executor, shape, vector)
        return whole(executor, shape, vector)

    FollowingExecutor.run_step = run_step  # type: ignore[method-assign]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
