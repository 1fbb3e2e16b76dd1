"""Says which servers an application has, every second: a process of a front's own.

A process that is connected to a Ray cluster ends when the cluster's head is gone for a minute. A
front must not, so it has this one look (`MembersWatcher`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from octavo.engine.errors import InvalidConfigError
from octavo.server.ray.members import NAMESPACE, TELL_S, Member, actor_name

ANSWER_S = 10.0
"""For an answer of the actor."""
ADDRESSES, ERROR = "octavo-addresses", "octavo-error"
"""Keys of the lines that a front reads; other lines are Ray's own."""


def addresses_on(node: str, members: Iterable[Member]) -> list[str]:
    """Those of the members that a process on a Ray node can speak to."""
    return [member.address for member in members if member.node in ("", node)]


def main(words: Sequence[str]) -> int:
    """Prints a line of JSON for each look, for ever; 1 where there is no cluster.

    Args:
        words: the application's name.
    """
    [app] = words
    import ray

    from octavo.server.ray.cluster import connect

    try:
        connect()
    except InvalidConfigError as error:
        _say(ERROR, str(error))
        return 1
    node = ray.get_runtime_context().get_node_id()
    actor = None
    while True:
        try:
            actor = actor or ray.get_actor(actor_name(app), namespace=NAMESPACE)
            _say(ADDRESSES, addresses_on(node, ray.get(actor.all.remote(), timeout=ANSWER_S)))
        except (ValueError, ray.exceptions.RayError) as error:
            actor = None
            _say(ERROR, f"no application {app!r} says where its servers are ({error})")
        time.sleep(TELL_S)


def _say(key: str, value: object) -> None:
    print(json.dumps({key: value}), flush=True)
