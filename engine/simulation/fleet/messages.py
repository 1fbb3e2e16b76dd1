"""What fronts and replicas of a simulated fleet tell each other, small enough for pipes."""

from __future__ import annotations

from typing import Any, NamedTuple

# To a replica.


class Submit(NamedTuple):
    """A front sends a request.

    Attributes:
        time_s: when.
        number: of the arrival.
        front: who sends it.
        num_told: of its tokens, those that its client has; the replica goes on behind them.
        first_token_s: when the first of them came.
    """

    time_s: float
    number: int
    front: int
    num_told: int
    first_token_s: float | None


class Cancel(NamedTuple):
    """A client left."""

    time_s: float
    number: int


class Order(NamedTuple):
    """What befalls a replica, or is done to it: a disaster's kind, `kill`, `start` or `drain`."""

    time_s: float
    kind: str
    for_s: float = 0.0
    front: int = 0
    factor: float = 1.0


# From a replica.


class Ended(NamedTuple):
    """A request is over at a replica.

    Attributes:
        time_s: when.
        replica, number, front: where, which and whose.
        status: a terminal status; "refused" or "rejected" for lack of capacity, "lost" if the
            replica has it no more and it can go on elsewhere.
        num_told: tokens that its client has.
        first_token_s, last_token_s: when they came; None without any.
        max_stall_s: longest wait between two of them, at this replica.
        num_preemptions, num_cached: as in `RequestRecord`.
        retry_after_s: of a refusal.
    """

    time_s: float
    replica: int
    number: int
    front: int
    status: str
    num_told: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    max_stall_s: float = 0.0
    num_preemptions: int = 0
    num_cached: int = 0
    retry_after_s: float = 0.0


class Counts(NamedTuple):
    """What a replica did in all its lives.

    Attributes:
        num_steps, num_prefill_tokens, num_tokens: dispatched; tokens that clients were told.
        busy_s: seconds that its device computed.
        num_turns: turns of its loop.
        final: figures of its scheduler at the end.
    """

    num_steps: int
    num_prefill_tokens: int
    num_tokens: int
    busy_s: float
    num_turns: int
    final: tuple[Any, ...]
