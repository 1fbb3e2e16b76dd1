"""Arrival processes, and how a trace's load is changed without touching its bursts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.traffic import PLAIN, Arrival, TrafficClass

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


def spread_classes(
    arrivals: Sequence[Arrival], share: float, traffic_class: TrafficClass, seed: int
) -> list[Arrival]:
    """Moves a share of the arrivals, drawn by seed, to another class."""
    rng = random.Random(f"classes {seed}")
    return [
        replace(arrival, traffic_class=traffic_class) if rng.random() < share else arrival
        for arrival in arrivals
    ]
