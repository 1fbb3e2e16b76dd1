"""When a client tries again: after as long as the server said, or else by doubling pauses."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from octavo.engine.errors import (
    EngineDeadError,
    InvalidConfigError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
)

MARGIN = 0.1
"""Share of a pause that is added at random, so that not all who were refused come back at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """What a client does about a server that is full or going away.

    Only what never began is tried again: a stream that has given an output is not. An overloaded
    server's own time (`RetryInfo`) is kept to; where none answers, pauses double.

    Attributes:
        max_attempts: calls in all, ≥ 1; 1 never tries again.
        first_pause_s, max_pause_s: the first of the doubling pauses, and the longest.

    Raises:
        InvalidConfigError: a value out of its range.
    """

    max_attempts: int = 4
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 100:
            raise InvalidConfigError("max_attempts", self.max_attempts, "1 to 100")
        if not 0 < self.first_pause_s <= self.max_pause_s:
            allowed = f"above 0, at most max_pause_s ({self.max_pause_s})"
            raise InvalidConfigError("first_pause_s", self.first_pause_s, allowed)

    def pause_s(self, error: OctavoError, num_attempts: int, chance: float) -> float | None:
        """Seconds to wait before the next attempt, or None to give up.

        Args:
            num_attempts: made so far.
            chance: a random number in [0, 1).
        """
        if num_attempts >= self.max_attempts:
            return None
        if isinstance(error, OverloadedError):
            return error.retry_after_s * (1 + MARGIN * chance)
        if isinstance(error, EngineDeadError):
            pause_s = min(self.first_pause_s * 2.0 ** (num_attempts - 1), self.max_pause_s)
            return pause_s * (0.5 + 0.5 * chance)
        return None


NO_RETRIES = RetryPolicy(max_attempts=1)


def check_timeout(timeout_s: float | None) -> None:
    """Refuses what is no deadline: gRPC would answer that it has passed.

    Raises:
        InvalidRequestError: neither None nor a number of seconds above 0.
    """
    given: Any = timeout_s  # whatever the types promise
    is_number = isinstance(given, Real) and not isinstance(given, bool)
    if given is not None and not (is_number and math.isfinite(given) and given > 0):
        allowed = "a number of seconds above 0, or None to wait as long as it takes"
        raise InvalidRequestError("timeout_s", timeout_s, allowed)


class Attempts:
    """The attempts of one call, all within its deadline.

    Args:
        policy: when to try again.
        timeout_s: for the call as a whole; None for no limit.
        clock, chance: give the time in seconds, and random numbers.

    Raises:
        InvalidRequestError: see `check_timeout`.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        check_timeout(timeout_s)
        self._policy = policy
        self._clock = clock
        self._chance = chance
        self._end_s = None if timeout_s is None else clock() + timeout_s
        self._num_made = 0

    @property
    def timeout_s(self) -> float | None:
        """Seconds left for the next attempt."""
        return None if self._end_s is None else max(0.0, self._end_s - self._clock())

    def pause_s(self, error: OctavoError) -> float | None:
        """After a failed attempt: seconds to wait before the next one, or None to give up, also
        where the deadline would have passed by then."""
        self._num_made += 1
        pause_s = self._policy.pause_s(error, self._num_made, self._chance())
        if pause_s is None or (self.timeout_s is not None and pause_s >= self.timeout_s):
            return None
        return pause_s
