"""A simulated request as a router sees it."""

from __future__ import annotations

import functools

from octavo.engine.routing.prefixes import CHUNK_TOKENS, prompt_chunks
from octavo.engine.routing.request import RouteRequest
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.traffic import Arrival


def arrival_chunks(arrival: Arrival) -> tuple[int, ...]:
    """What `prompt_chunks` is of the prompt, made of its segments: equal where it would be equal.

    What no other prompt shares, behind the segments, has none.
    """
    return _chunks(arrival.segments, arrival.num_input, arrival.traffic_class.tenant)


@functools.lru_cache(maxsize=4096)
def _chunks(segments: tuple[Segment, ...], num_input: int, tenant: str) -> tuple[int, ...]:
    if not segments:
        return ()
    num_shared = min(num_input - 1, sum(segment.num_tokens for segment in segments))
    chained, found = tenant_root(tenant), []
    pieces: list[int] = []
    room = CHUNK_TOKENS
    for stream, num_tokens in segments:
        left = num_tokens
        while left:
            taken = min(left, room)
            pieces += (stream, taken)
            left -= taken
            room -= taken
            if not room:
                chained = hash((chained, *pieces))
                found.append(chained)
                pieces, room = [], CHUNK_TOKENS
    return tuple(found[: num_shared // CHUNK_TOKENS])


@functools.lru_cache(maxsize=256)
def tenant_root(tenant: str) -> int:
    """A number of the tenant's: its prompts share nothing with others'."""
    return prompt_chunks([0] * (CHUNK_TOKENS + 1), tenant=tenant)[0]


def session_of(request_id: str) -> str:
    """The session of a generated request, whose id is `SESSION.TURN`; "" of any other."""
    session, _, turn = request_id.rpartition(".")
    return session if turn.isdecimal() else ""


def route_request(
    arrival: Arrival,
    max_tokens: int,
    num_told: int = 0,
    tried: frozenset[int] = frozenset(),
    *,
    is_begun: bool = False,
) -> RouteRequest:
    """The request for a router.

    Args:
        arrival: who arrives.
        max_tokens: every client's limit.
        num_told: tokens that its client has: they are computed again where it goes on.
        tried: replicas that it was at.
        is_begun: as in `RouteRequest`.
    """
    goals = arrival.traffic_class
    return RouteRequest(
        request_id=arrival.request_id,
        num_prompt_tokens=arrival.num_input + num_told,
        chunks=arrival_chunks(arrival),
        max_tokens=max_tokens,
        arrival_s=arrival.arrival_s,
        priority=goals.priority,
        ttft_target_s=None if num_told else goals.ttft_target_s,
        tpot_target_s=goals.tpot_target_s,
        e2e_target_s=goals.e2e_target_s,
        length_class=goals.name,
        session=session_of(arrival.request_id),
        tried=tried,
        is_begun=is_begun,
    )
