"""Requests as a simulation knows them: when each arrives, how long it is, what it was promised."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from octavo.engine.errors import InvalidConfigError
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority, Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.simulation.workloads.prompts import (
    Segment,
    salted,
    stream_of,
    stream_tokens,
)

END_TOKEN = 0
"""The token that ends every simulated output."""

LONGEST_TARGET_S = 86_400.0
"""A target is at most a day."""


def checked_target(field: str, value: float | None) -> float | None:
    """A target in seconds, or None for none.

    Raises:
        InvalidConfigError: 0 or less, not a number, or more than a day.
    """
    if value is not None and not 0 < value <= LONGEST_TARGET_S:
        raise InvalidConfigError(
            field, value, f"seconds above 0, at most a day ({LONGEST_TARGET_S:g})"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """What the requests of one kind were promised.

    Attributes:
        name: of the class; also the key its output lengths are learned under.
        ttft_target_s, tpot_target_s: goals of an interactive request, both or neither.
        e2e_target_s: goal of a request that only has to be done in time.
        priority, tenant: as in `Request`.

    Raises:
        InvalidConfigError: a target of 0 or less, that is not a number, or beyond a day.
    """

    name: str
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    e2e_target_s: float | None = None
    priority: Priority = Priority.NORMAL
    tenant: str = ""

    def __post_init__(self) -> None:
        for field in ("ttft_target_s", "tpot_target_s", "e2e_target_s"):
            checked_target(field, getattr(self, field))


PLAIN = TrafficClass(name="")
"""The class of requests that were promised nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a simulated workload.

    Attributes:
        request_id: unique in the workload.
        arrival_s: when its client sends it, in seconds from the workload's start.
        num_input: prompt tokens.
        num_output: tokens after which it ends. Only the simulated device knows.
        traffic_class: what it was promised.
        segments: what its prompt begins with; requests whose segments begin alike share that much
            prefix. The rest of the prompt is its own, as all of it is without segments.
        cancel_s: when its client leaves, in seconds from the workload's start; None: never.
        pooling: how its hidden states are pooled, of an embedding, in simulations; None of a
            request that generates.
    """

    request_id: str
    arrival_s: float
    num_input: int
    num_output: int
    traffic_class: TrafficClass = PLAIN
    segments: tuple[Segment, ...] = ()
    cancel_s: float | None = None
    pooling: PoolingParams | None = None


class ClosedLoop(Protocol):
    """Arrivals that depend on ends: users who wait for an answer before they ask again."""

    def start(self) -> Sequence[Arrival]:
        """The first requests."""
        ...

    def following(self, ended: Arrival, now_s: float) -> Arrival | None:
        """The request that comes after one that ended at `now_s`, or None."""
        ...


def make_request(
    arrival: Arrival, *, max_tokens: int, number: int, known_output_len: int | None = None
) -> Request:
    """The request as the engine sees it: its true length is not in it.

    Args:
        arrival: who arrives.
        max_tokens: the client's limit, the same for everybody, so that it tells nothing.
        number: a number of its own, ≥ 0; gives prompts that share nothing.
        known_output_len: a length declared by the client, for policies that use one.
    """
    return Request(
        request_id=arrival.request_id,
        prompt_token_ids=prompt_tokens(arrival, number),
        sampling_params=_params(max_tokens),
        seed=number,
        eos_token_ids=(END_TOKEN,),
        max_tokens=max_tokens,
        pooling=arrival.pooling,
        arrival_s=arrival.arrival_s,
        priority=arrival.traffic_class.priority,
        tenant=arrival.traffic_class.tenant,
        ttft_target_s=arrival.traffic_class.ttft_target_s,
        tpot_target_s=arrival.traffic_class.tpot_target_s,
        e2e_target_s=arrival.traffic_class.e2e_target_s,
        output_len_class=arrival.traffic_class.name,
        known_output_len=known_output_len,
    )


@functools.lru_cache(maxsize=1024)
def _params(max_tokens: int) -> SamplingParams:
    """Checked once for all requests with this limit."""
    return SamplingParams(max_tokens=max_tokens)


def prompt_tokens(arrival: Arrival, number: int) -> list[int]:
    """A simulated prompt: it begins like those it shares segments with, and like no others.

    A segment is one token id repeated: a page's hash covers all before it, so equal pages still
    mean equal prefixes. Ids are outside any vocabulary; nothing reads them but the hash. One
    integer for a whole segment keeps thousands of long prompts small.
    """
    own = (1 << 40) + number
    if not arrival.segments:
        return [own] * arrival.num_input
    tokens: list[int] = []
    for stream, num_tokens in arrival.segments:
        tokens += [(1 << 50) + stream] * num_tokens
    del tokens[arrival.num_input :]
    return tokens + [own] * (arrival.num_input - len(tokens))


def live_prompt(arrival: Arrival, vocab_size: int, salt: object = 0) -> list[int]:
    """The prompt of a live request: tokens of the model's vocabulary.

    Prompts of one salt share what their segments share. Prompts of different salts share nothing,
    so that a run does not find what an earlier one left in the prefix cache.

    Args:
        arrival: who arrives.
        vocab_size: as for `stream_tokens`.
        salt: of the run, such as its seed and rate.

    Raises:
        InvalidConfigError: as for `stream_tokens`.
    """
    segments = salted(arrival.segments, salt)
    num_own = arrival.num_input - sum(num_tokens for _, num_tokens in segments)
    own = Segment(stream_of("own", arrival.request_id, salt), max(0, num_own))
    return stream_tokens((*segments, own), vocab_size)[: arrival.num_input]


def with_targets(
    arrivals: Iterable[Arrival], ttft_s: float | None = None, tpot_s: float | None = None
) -> list[Arrival]:
    """The arrivals with other targets; those that only have an end-to-end target keep it.

    Args:
        arrivals: any workload's.
        ttft_s, tpot_s: the new targets, seconds; None leaves them.

    Raises:
        InvalidConfigError: a target of 0 or less, that is not a number, or beyond a day.
    """
    changes: dict[str, Any] = {
        f"{name}_target_s": checked_target(name, value)
        for name, value in (("ttft", ttft_s), ("tpot", tpot_s))
        if value is not None
    }
    changed: dict[TrafficClass, TrafficClass] = {}
    for arrival in arrivals if changes else ():
        old = arrival.traffic_class
        is_interactive = old.ttft_target_s is not None or old.tpot_target_s is not None
        keeps = old.e2e_target_s is not None and not is_interactive
        if old not in changed:
            changed[old] = old if keeps else replace(old, **changes)
    return [replace(a, traffic_class=changed[a.traffic_class]) if changes else a for a in arrivals]
