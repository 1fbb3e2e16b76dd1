"""What generates traffic: sessions that begin by an arrival process, drawn by seed.

Generated traffic is open loop: when a request arrives depends on seed and rate, and on nothing
that the scheduler does. So policies that are compared at one seed serve the same requests.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.arrivals import ArrivalProcess, superpose
from octavo.engine.simulation.workloads.bench_requests import checked_range
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass, checked_target


class Turn(NamedTuple):
    """One request of a session.

    Attributes:
        after_s: when it arrives, in seconds from the session's start.
        num_input, num_output: tokens.
        segments: what its prompt begins with; the rest is its own.
        traffic_class: what it is promised.
    """

    after_s: float
    num_input: int
    num_output: int
    segments: tuple[Segment, ...]
    traffic_class: TrafficClass


_SHARES = ("batch_share",)
_MAY_BE_ZERO = ("think_s", "zipf", "sigma", *_SHARES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """What all kinds have.

    Attributes:
        cv: coefficient of variation of the waits between sessions; 1 is Poisson.
        ttft_s, tpot_s: targets of interactive requests, seconds.
        e2e_s: target of requests that only have to be done in time, seconds.
        tenant: of all requests.

    Raises:
        InvalidConfigError: a parameter that cannot be, by its name.
    """

    name: ClassVar[str] = ""
    rate: ClassVar[float] = 1.0
    """Requests a second where none is asked for."""

    cv: float = 1.0
    ttft_s: float | None = 1.0
    tpot_s: float | None = 0.05
    e2e_s: float | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))

    @property
    def max_input(self) -> int:
        """The most prompt tokens of a request."""
        raise NotImplementedError

    @property
    def max_output(self) -> int:
        """The most output tokens of a request."""
        raise NotImplementedError

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request."""
        return self.max_input + self.max_output

    @property
    def longest_session_s(self) -> float:
        """How long before a moment the sessions began that may still go on then."""
        return 0.0

    def turns_per_session(self) -> float:
        """Requests of a session, on average."""
        return 1.0

    def session(self, rng: random.Random, seed: int, index: int) -> list[Turn]:
        """The requests of one session, by arrival.

        Args:
            rng: the session's own.
            seed: of the workload: names what its sessions share.
            index: names what is the session's own.
        """
        raise NotImplementedError

    def traffic_class(self, name: str = "") -> TrafficClass:
        """The promises of its requests."""
        return TrafficClass(
            name=name or self.name, tenant=self.tenant, ttft_target_s=self.ttft_s,
            tpot_target_s=self.tpot_s, e2e_target_s=self.e2e_s,
        )  # fmt: skip

    def arrivals(
        self,
        rate: float,
        seed: int,
        *,
        num_requests: int | None = None,
        duration_s: float = math.inf,
        process: ArrivalProcess | None = None,
    ) -> list[Arrival]:
        """Its requests, by arrival. The same arguments give the same requests everywhere.

        Sessions were under way before second 0: their earlier turns are left out, and the rate
        is that of the steady state from the start.

        Args:
            rate: requests (not sessions) a second, on average.
            seed: other seeds give independent traffic.
            num_requests, duration_s: where it ends, whichever comes first; at least one is given.
            process: of sessions, in place of one with `cv`.

        Raises:
            InvalidConfigError: the rate is not a finite number above 0.
        """
        process = process or ArrivalProcess(self.cv)
        num_requests = 10**9 if num_requests is None else num_requests
        times = process.times(
            rate / self.turns_per_session(), random.Random(f"{self.name} times {seed}")
        )
        before_s = self.longest_session_s
        found: list[Arrival] = []
        horizon_s = 0.0
        for index in itertools.count():
            begin_s = next(times) - before_s
            if begin_s >= duration_s:
                break
            # Those that arrive before this session begins are all known by now.
            if len(found) >= num_requests and begin_s >= horizon_s:
                arrived = sorted(a.arrival_s for a in found)
                horizon_s = arrived[num_requests - 1]
                if begin_s >= horizon_s:
                    break
            found += self._session_arrivals(seed, index, begin_s, duration_s)
        found.sort(key=lambda arrival: (arrival.arrival_s, arrival.request_id))
        return found[:num_requests]

    def _session_arrivals(
        self, seed: int, index: int, begin_s: float, duration_s: float
    ) -> list[Arrival]:
        turns = self.session(random.Random(f"{self.name} {seed} {index}"), seed, index)
        return [
            Arrival(
                request_id=f"{self.name}-{index}" + (f".{number}" if len(turns) > 1 else ""),
                arrival_s=begin_s + turn.after_s,
                num_input=turn.num_input,
                num_output=turn.num_output,
                traffic_class=turn.traffic_class,
                segments=turn.segments,
            )
            for number, turn in enumerate(turns)
            if 0 <= begin_s + turn.after_s < duration_s
        ]


@dataclass(frozen=True, slots=True)
class Mix:
    """Several generators side by side.

    Attributes:
        parts: (share, generator) of each; shares count relative to each other.
    """

    parts: tuple[tuple[float, Generator], ...]

    @property
    def rate(self) -> float:
        """Requests a second where none is asked for."""
        return 1.0

    @property
    def max_input(self) -> int:
        """The most prompt tokens of a request."""
        return max(part.max_input for _, part in self.parts)

    @property
    def max_output(self) -> int:
        """The most output tokens of a request."""
        return max(part.max_output for _, part in self.parts)

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request."""
        return max(part.max_model_len for _, part in self.parts)

    def arrivals(
        self,
        rate: float,
        seed: int,
        *,
        num_requests: int | None = None,
        duration_s: float = math.inf,
        process: ArrivalProcess | None = None,
    ) -> list[Arrival]:
        """The requests of all parts, by arrival. Args and raises: as for `Generator.arrivals`."""
        total = sum(share for share, _ in self.parts)
        streams = [
            [
                replace(arrival, request_id=f"{number}-{arrival.request_id}")
                for arrival in part.arrivals(
                    rate * share / total,
                    seed * len(self.parts) + number,
                    num_requests=num_requests,
                    duration_s=duration_s,
                    process=process,
                )
            ]
            for number, (share, part) in enumerate(self.parts)
        ]
        return superpose(*streams)[:num_requests]


def _check(name: str, value: object) -> None:
    """Refuses what no parameter of this name and type can be."""
    if name in ("ttft_s", "tpot_s", "e2e_s"):
        checked_target(name, value)  # type: ignore[arg-type]
    elif isinstance(value, tuple):
        checked_range(name, value)
    elif isinstance(value, (int, float)):
        is_share, may_be_zero = name in _SHARES, name in _MAY_BE_ZERO
        in_range = math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))
        if not in_range or (is_share and value > 1):
            allowed = "a finite number above 0" + (", or 0" if may_be_zero else "")
            raise InvalidConfigError(name, value, "a share from 0 to 1" if is_share else allowed)
