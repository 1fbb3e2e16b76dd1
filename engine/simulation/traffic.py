"""Requests as a simulation knows them: when each arrives, how long it is, what it was promised."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from octavo.engine.request import Priority, Request
from octavo.engine.sampling_params import SamplingParams

END_TOKEN = 0
"""The token that ends every simulated output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """What the requests of one kind were promised.

    Attributes:
        name: of the class; also the key its output lengths are learned under.
        ttft_target_s, tpot_target_s: goals of an interactive request, both or neither.
        e2e_target_s: goal of a request that only has to be done in time.
        priority, tenant: as in `Request`.
    """

    name: str
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    e2e_target_s: float | None = None
    priority: Priority = Priority.NORMAL
    tenant: str = ""


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
        block_ids: names of the blocks its prompt consists of; requests whose lists begin alike
            share that much prefix. Empty: the prompt is its own.
        block_tokens: tokens a block stands for.
        cancel_s: when its client leaves, in seconds from the workload's start; None: never.
    """

    request_id: str
    arrival_s: float
    num_input: int
    num_output: int
    traffic_class: TrafficClass = PLAIN
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 512
    cancel_s: float | None = None


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
    """A prompt of the right length that begins like those it shares blocks with, and no others.

    A block is one token id repeated: a page's hash covers all before it, so equal pages still mean
    equal prefixes. Ids are outside any vocabulary; nothing reads them but the hash.
    """
    own = (1 << 40) + number
    if not arrival.block_ids:
        return [own] * arrival.num_input
    tokens: list[int] = []
    for block in arrival.block_ids:
        tokens += [(1 << 50) + block] * arrival.block_tokens
        if len(tokens) >= arrival.num_input:
            break
    tokens = tokens[: arrival.num_input]
    return tokens + [own] * (arrival.num_input - len(tokens))


def in_class(
    arrivals: Sequence[Arrival], classes: Mapping[str, TrafficClass] | TrafficClass
) -> list[Arrival]:
    """The arrivals with other promises: one class for all, or by the name of their class now."""
    if isinstance(classes, TrafficClass):
        return [replace(arrival, traffic_class=classes) for arrival in arrivals]
    return [
        replace(arrival, traffic_class=classes.get(arrival.traffic_class.name, PLAIN))
        for arrival in arrivals
    ]
