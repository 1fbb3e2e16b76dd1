"""What other routers do, and what Octavo's replicas on one host do."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from octavo.engine.routing.request import Route, RouteRequest
from octavo.engine.routing.view import FleetView

_Choose = Callable[[FleetView, RouteRequest, float], Route]


def _route(view: FleetView, replica: int) -> Route:
    return Route(replica, int(view.cached_tokens[replica]))


def _draw(*names: object) -> int:
    """A number from 0 to 2**64 - 1 that looks random and depends on the names alone."""
    data = "\x1f".join(map(str, names)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def round_robin() -> _Choose:
    """Each in turn.

    Source: what every proxy does by default; vLLM's and SGLang's routers have it by this name.
    """

    def choose(view: FleetView, request: RouteRequest, now_s: float) -> Route:
        return _route(view, int(view.candidates[view.num_routed % len(view.candidates)]))

    return choose


OUTPUT_WEIGHT = 3.0
"""Prompt tokens that take as long as one generated token, about, in a full batch of decode rows."""


def least_work() -> _Choose:
    """The one with the least to do, what it has cached counted: of what this router sent there.

    Work is counted in tokens: those of a prompt that are to be computed, and those that are
    expected to be generated, which take a share of a step each and so count for more. A replica
    that holds the beginning of a prompt has that much less to do for it: requests that begin alike
    meet where their prefix is, unless there is more to wait for there than it spares.

    Source of the idea: longest-prefix matching against load in SGLang's router and in llm-d.
    """

    def choose(view: FleetView, request: RouteRequest, now_s: float) -> Route:
        among = view.candidates
        missing = request.num_prompt_tokens - view.cached_tokens[among]
        work = view.own_work[among] + missing + OUTPUT_WEIGHT * view.output_len
        return _route(view, int(among[np.argmin(work)]))

    return choose


def power_of_two() -> _Choose:
    """Of two drawn at random, the one with fewer requests.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10),
    2001; the policy of this name in SGLang's router.
    """

    def choose(view: FleetView, request: RouteRequest, now_s: float) -> Route:
        among = view.candidates
        first = _draw("first", view.num_routed) % len(among)
        second = (first + 1 + _draw("second", view.num_routed) % max(1, len(among) - 1)) % len(
            among
        )
        one, other = int(among[first]), int(among[second])
        num_live = view.num_live
        return _route(view, other if num_live[other] < num_live[one] else one)

    return choose


def prefix_affinity(
    *, least_match: float = 0.3, most_gap: float = 64.0, most_ratio: float = 1.5
) -> _Choose:
    """Where the longest beginning of the prompt went before, while requests are spread evenly.

    If the replica with the most requests has `most_gap` more than the one with the fewest, and
    `most_ratio` times as many, the request goes to the one with the fewest. Else it goes to the
    best match if that is at least `least_match` of the prompt, and else to the one with the
    fewest requests: this router remembers what caches have room for, and needs no tree's size.

    Args:
        least_match: share of a prompt, 0 to 1.
        most_gap, most_ratio: see above.

    Source: the cache-aware policy of SGLang's router (sgl-router, policies/cache_aware.rs), its
    defaults.
    """

    def choose(view: FleetView, request: RouteRequest, now_s: float) -> Route:
        among = view.candidates
        loads = view.own_requests[among]
        most, least = float(loads.max(axis=0)), float(loads.min(axis=0))
        is_uneven = most - least > most_gap and most > most_ratio * least
        cached = view.cached_tokens[among]
        best = int(cached.max(axis=0))
        if is_uneven or best < least_match * request.num_prompt_tokens or not best:
            return _route(view, int(among[np.argmin(loads)]))
        # Of equal matches the one with the fewest requests.
        return _route(view, int(among[np.argmin(np.where(cached == best, loads, np.inf))]))

    return choose


def session_affinity() -> _Choose:
    """All requests of a session to one replica, by rendezvous hashing; others by least requests.

    A replica that comes or goes moves its own sessions alone.

    Source: Thaler, Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM ToN
    6(1), 1998; session affinity as vLLM's production stack and llm-d have it.
    """

    def choose(view: FleetView, request: RouteRequest, now_s: float) -> Route:
        among = view.candidates
        if not request.session:
            return _route(view, int(among[np.argmin(view.num_live[among])]))
        # A spread of 64 bits for each replica: splitmix64 of (session, replica).
        x = np.uint64(_draw(request.session)) + among.astype(np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return _route(view, int(among[np.argmax(x ^ (x >> np.uint64(31)))]))

    return choose
