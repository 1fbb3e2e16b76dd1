"""A request as a router sees it, and what a router answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """A request to be placed.

    Attributes:
        request_id: of its own among those under way.
        num_prompt_tokens: tokens to be computed if nothing is cached, ≥ 1.
        chunks: hashes of its whole chunks, each over all before it (`prompt_chunks`).
        max_tokens: most tokens of each answer.
        num_sequences: answers to it.
        arrival_s: when it came, on the front's clock.
        priority, ttft_target_s, tpot_target_s, e2e_target_s: as in `Request`.
        length_class: requests of one class are expected to answer at similar length.
        session: requests of one session carry the same; empty for none.
        tried: replicas that refused it, or were lost with it.
        is_begun: whether a replica had taken it and was lost: it goes on, and is not refused.
    """

    request_id: str
    num_prompt_tokens: int
    chunks: Sequence[int] = ()
    max_tokens: int
    num_sequences: int = 1
    arrival_s: float = 0.0
    priority: Priority = Priority.NORMAL
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    e2e_target_s: float | None = None
    length_class: str = ""
    session: str = ""
    tried: frozenset[int] = frozenset()
    is_begun: bool = False


class Route(NamedTuple):
    """A request's place.

    Attributes:
        replica: its index.
        num_cached_tokens: of its prompt, that the replica is thought to hold.
        first_token_s: seconds until its first token, as forecast; None if the policy makes none.
        is_in_time: whether its targets are forecast to be met; None if the policy does not say.
    """

    replica: int
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    is_in_time: bool | None = None


class RouteRefusal(NamedTuple):
    """No replica takes the request.

    Attributes:
        reason: a phrase.
        retry_after_s: seconds after which its client should come back.
    """

    reason: str
    retry_after_s: float
