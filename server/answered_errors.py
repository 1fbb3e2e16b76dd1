"""What is left of an error once it is answered: no reference cycle.

An error refers to the frames that it went through, and one of those often to the error. Such a
cycle is freed by Python's collector alone, and the collector holds every thread while it walks what
a thousand refused calls left: 20 to 100 ms at once, on the way of every stream.
"""

from __future__ import annotations


def forget_frames(error: BaseException) -> None:
    """Has an error, and those it came from, no longer refer to frames.

    For errors that are answered, not for those that are still to be logged.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        item = left.pop()
        if item is not None and id(item) not in seen:
            seen.add(id(item))
            item.__traceback__ = None
            left += (item.__cause__, item.__context__)
