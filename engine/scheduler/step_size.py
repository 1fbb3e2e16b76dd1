"""How much of one row, and how many decode iterations, go into a step."""

from __future__ import annotations

MAX_STEPS_WHILE_WAITING = 2
"""Decode iterations in one dispatch while somebody waits for a row or for pages to come free."""

MOST_DISPATCH_S = 0.05
"""Longest that a dispatch of several decode iterations may take. Its tokens reach their readers
together, and a request that arrives meanwhile waits for all of it; what it saves, the host's time
for a dispatch, is little of so long a step."""


def most_steps(iteration_s: float) -> int:
    """Most decode iterations of `iteration_s` seconds each in one dispatch, at least 1."""
    return max(1, int(MOST_DISPATCH_S / iteration_s))


def prefill_chunk(start: int, end: int, budget: int, page_size: int) -> int:
    """Tokens to compute of a row whose known tokens from `start` to `end` - 1 are missing.

    A chunk that does not reach the end stops at a page boundary if it can: the page is then
    findable by others at once. It is never empty.

    Args:
        start, end: positions, `start` < `end`.
        budget: tokens left in the step, ≥ 1.
    """
    if end - start <= budget:
        return end - start
    boundary = (start + budget) // page_size * page_size
    return boundary - start if boundary > start else budget


def decode_steps(*, limit: int, longest: int, shortest: int, someone_waits: bool) -> int:
    """Decode iterations for a step without prefill: a power of two, ≥ 1.

    No iteration is spent in which every row is past its length limit. While somebody waits, no row
    is kept past its limit, and few iterations run, as a row that stops early is missed by the one
    who waits.

    Args:
        limit: most iterations that the engine was set up for.
        longest, shortest: most and fewest tokens that a row of the step may still emit, ≥ 1.
        someone_waits: whether a request waits that could not be admitted.
    """
    most = min(limit, longest)
    if someone_waits:
        most = min(most, shortest, MAX_STEPS_WHILE_WAITING)
    return 1 << (most.bit_length() - 1)
