"""Arrival processes, and how a trace's load is changed without touching its bursts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.prompts import salted
from octavo.engine.simulation.workloads.traffic import PLAIN, Arrival, TrafficClass

Traffic = Callable[[float, int], list[Arrival]]
"""Arrivals at a rate (requests a second), drawn by seed."""

Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws (input tokens, output tokens)."""


def uniform_lengths(input_len: tuple[int, int], output_len: tuple[int, int]) -> Lengths:
    """Both lengths uniformly from inclusive ranges."""
    return lambda rng: (rng.randint(*input_len), rng.randint(*output_len))


def lengths_like(arrivals: Sequence[Arrival]) -> Lengths:
    """The lengths of a request drawn from others, with replacement."""

    def draw(rng: random.Random) -> tuple[int, int]:
        chosen = arrivals[rng.randrange(len(arrivals))]
        return chosen.num_input, chosen.num_output

    return draw


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Independent gamma-distributed waits.

    Attributes:
        cv: the waits' coefficient of variation; 1 is a Poisson process, above it bursts.

    Raises:
        InvalidConfigError: it is not a finite number above 0.
    """

    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cv < math.inf:
            raise InvalidConfigError("cv", self.cv, "a finite number above 0")

    @property
    def burstiness(self) -> float:
        """The gamma distribution's shape."""
        return self.cv**-2

    def times(self, rate: float, rng: random.Random) -> Iterator[float]:
        """Seconds at which requests arrive, without end.

        Raises:
            InvalidConfigError: the rate is not a finite number above 0.
        """
        checked_rate(rate)
        shape, now_s = self.burstiness, 0.0
        while True:
            now_s += rng.gammavariate(shape, 1 / (rate * shape))
            yield now_s


POISSON = ArrivalProcess()


def parse_process(text: str) -> ArrivalProcess | None:
    """Reads `poisson`, `gamma:cv=4` or `recorded`; None for the last: times as a trace has them.

    Raises:
        InvalidConfigError: it is none of them.
    """
    name, _, rest = text.partition(":")
    key, _, value = rest.partition("=")
    if name in ("poisson", "recorded") and not rest:
        return POISSON if name == "poisson" else None
    if name == "gamma" and key == "cv":
        try:
            return ArrivalProcess(float(value))
        except ValueError:  # of float(); what the process refuses is one, too
            pass
    raise InvalidConfigError("arrivals", text, "poisson, gamma:cv=NUMBER above 0, or recorded")


def checked_rate(rate: float) -> float:
    """A rate in requests a second.

    Raises:
        InvalidConfigError: it is not a finite number above 0.
    """
    if not 0 < rate < math.inf:
        raise InvalidConfigError("rate", rate, "a number above 0, and finite")
    return rate


def gamma_arrivals(
    rate: float,
    duration_s: float,
    lengths: Lengths,
    *,
    seed: int,
    burstiness: float = 1.0,
    traffic_class: TrafficClass = PLAIN,
    prefix: str = "",
) -> list[Arrival]:
    """Arrivals with independent gamma-distributed waits.

    Args:
        rate: requests a second on average, > 0.
        duration_s: how long they keep arriving.
        lengths: draws a request's lengths.
        seed: same seed, same arrivals.
        burstiness: the distribution's shape, > 0: 1 is Poisson, below it bursts, above it evens
            out. The waits' coefficient of variation is 1 / √burstiness.
        traffic_class: of all requests.
        prefix: begins every request id.

    Raises:
        InvalidConfigError: rate, duration or burstiness not above 0.
    """
    for name, value in (("rate", rate), ("duration_s", duration_s), ("burstiness", burstiness)):
        if not value > 0:
            raise InvalidConfigError(name, value, "a number above 0")
    rng = random.Random(f"arrivals {seed} {prefix}")
    arrivals: list[Arrival] = []
    now_s = 0.0
    while True:
        now_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        if now_s >= duration_s:
            return arrivals
        num_input, num_output = lengths(rng)
        arrivals.append(
            Arrival(
                request_id=f"{prefix}{len(arrivals)}",
                arrival_s=now_s,
                num_input=num_input,
                num_output=num_output,
                traffic_class=traffic_class,
            )
        )


class ClosedUsers:
    """Users who each send a request, wait for its end, think, and send the next.

    Args:
        num_users: at once.
        num_requests: in all, after which everybody leaves.
        lengths: draws a request's lengths.
        think_s: seconds between an answer and the next question, on average (exponential).
        seed: same seed and same answers, same requests.
        traffic_class: of all requests.
    """

    def __init__(
        self,
        num_users: int,
        num_requests: int,
        lengths: Lengths,
        *,
        think_s: float = 0.0,
        seed: int = 0,
        traffic_class: TrafficClass = PLAIN,
    ) -> None:
        if num_users < 1:
            raise InvalidConfigError("num_users", num_users, "at least 1")
        self._num_users = num_users
        self._num_left = num_requests
        self._lengths = lengths
        self._think_s = think_s
        self._rng = random.Random(f"users {seed}")
        self._class = traffic_class
        self._num_sent = 0

    def start(self) -> list[Arrival]:
        """Every user's first request."""
        first = (self._send(0.0) for _ in range(self._num_users))
        return [arrival for arrival in first if arrival is not None]

    def following(self, ended: Arrival, now_s: float) -> Arrival | None:
        """The next request of the user whose request ended."""
        return self._send(now_s)

    def _send(self, now_s: float) -> Arrival | None:
        if self._num_left == 0:
            return None
        self._num_left -= 1
        think_s = self._rng.expovariate(1 / self._think_s) if self._think_s else 0.0
        num_input, num_output = self._lengths(self._rng)
        self._num_sent += 1
        return Arrival(
            request_id=str(self._num_sent - 1),
            arrival_s=now_s + think_s,
            num_input=num_input,
            num_output=num_output,
            traffic_class=self._class,
        )


def window(arrivals: Iterable[Arrival], begin_s: float, end_s: float) -> list[Arrival]:
    """The arrivals from `begin_s` to before `end_s`, on a clock that starts there."""
    return [
        replace(arrival, arrival_s=arrival.arrival_s - begin_s)
        for arrival in arrivals
        if begin_s <= arrival.arrival_s < end_s
    ]


def thin(arrivals: Sequence[Arrival], share: float, seed: int) -> list[Arrival]:
    """Keeps each arrival with probability `share`.

    Whoever is kept at one share is kept at every larger one with the same seed, so that loads of
    one seed differ only in what was added.

    Raises:
        InvalidConfigError: the share is not in [0, 1].
    """
    if not 0 <= share <= 1:
        raise InvalidConfigError("share", share, "a number from 0 to 1")
    rng = random.Random(f"thin {seed}")
    return [arrival for arrival in arrivals if rng.random() < share]


def superpose(*streams: Iterable[Arrival]) -> list[Arrival]:
    """All arrivals of several streams on one clock; ids must differ between streams."""
    return sorted(
        (arrival for stream in streams for arrival in stream),
        key=lambda arrival: (arrival.arrival_s, arrival.request_id),
    )


def trace_traffic(arrivals: Sequence[Arrival]) -> Traffic:
    """A trace at any rate: thinned, or superposed with itself shifted by a half and so on.

    Its clock is never stretched, which would destroy its bursts. Prompts of a copy share prefixes
    among themselves as the trace's do, and none with those of other copies: a copy stands for
    further users, and requests that are each other's whole repetition would find everything cached.
    """
    end_s = max((arrival.arrival_s for arrival in arrivals), default=0.0) or 1.0
    base_rate = len(arrivals) / end_s

    def traffic(rate: float, seed: int) -> list[Arrival]:
        checked_rate(rate)
        copies = max(1, math.ceil(rate / base_rate - 1e-9))
        streams = [_rotated(arrivals, end_s * k / copies, end_s, k) for k in range(copies)]
        return thin(superpose(*streams), min(1.0, rate / (base_rate * copies)), seed)

    return traffic


def _rotated(arrivals: Sequence[Arrival], by_s: float, end_s: float, k: int) -> list[Arrival]:
    if k == 0:
        return list(arrivals)
    return [
        replace(
            arrival,
            request_id=f"{arrival.request_id}+{k}",
            arrival_s=(arrival.arrival_s + by_s) % end_s,
            segments=salted(arrival.segments, "copy", k),
        )
        for arrival in arrivals
    ]


def with_process(
    arrivals: Sequence[Arrival],
    process: ArrivalProcess,
    *,
    rate: float,
    seed: int,
    num_requests: int | None = None,
    duration_s: float = math.inf,
    shuffled: bool = False,
) -> list[Arrival]:
    """Requests of a trace, arriving by a process instead of at the times that it has.

    Requests are taken in the trace's order from a place drawn by seed on, so that prompts which
    share beginnings stay near each other. After the last one the trace begins again, with prompts
    of its own.

    Args:
        arrivals: the trace, ≥ 1.
        process: when they arrive.
        rate: requests a second.
        seed: of times and places.
        num_requests, duration_s: where it ends, whichever comes first; at least one is given.
        shuffled: whether requests are taken in an order drawn by seed, each once in a round.

    Raises:
        InvalidConfigError: the rate is not a finite number above 0.
    """
    rng = random.Random(f"lengths {seed}")
    order = list(range(len(arrivals)))
    if shuffled:
        rng.shuffle(order)
    begin = rng.randrange(len(order))
    taken = []
    times = process.times(rate, random.Random(f"times {seed}"))
    for index, now_s in enumerate(itertools.islice(times, num_requests)):
        if now_s >= duration_s:
            break
        rounds, place = divmod(begin + index, len(order))
        arrival = arrivals[order[place]]
        if rounds:
            arrival = replace(
                arrival,
                request_id=f"{arrival.request_id}+{rounds}",
                segments=salted(arrival.segments, "copy", rounds),
            )
        taken.append(replace(arrival, arrival_s=now_s))
    return taken


def stretch(arrivals: Sequence[Arrival], num_requests: int, seed: int) -> list[Arrival]:
    """A contiguous part of so many arrivals at a place drawn by seed, on a clock that starts there.

    Raises:
        InvalidConfigError: there are fewer.
    """
    if not 1 <= num_requests <= len(arrivals):
        raise InvalidConfigError(
            "num_requests", num_requests, f"1 to the {len(arrivals)} that the trace has"
        )
    begin = random.Random(f"stretch {seed}").randint(0, len(arrivals) - num_requests)
    part = arrivals[begin : begin + num_requests]
    return [replace(a, arrival_s=a.arrival_s - part[0].arrival_s) for a in part]


def spread_classes(
    arrivals: Sequence[Arrival], share: float, traffic_class: TrafficClass, seed: int
) -> list[Arrival]:
    """Moves a share of the arrivals, drawn by seed, to another class."""
    rng = random.Random(f"classes {seed}")
    return [
        replace(arrival, traffic_class=traffic_class) if rng.random() < share else arrival
        for arrival in arrivals
    ]
