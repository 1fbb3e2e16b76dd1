"""How many calls a protocol answers at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from octavo.engine.errors import OverloadedError
from octavo.server.front import RETRY_AFTER_S


class CallLimit:
    """Counts calls in progress and refuses those above a limit. Lives in the event loop.

    Args:
        most: calls at once.
        what: they are, in the plural, for the refusal.

    Attributes:
        num_open: calls in progress.
    """

    def __init__(self, most: int, what: str = "calls") -> None:
        self._most = most
        self._what = what
        self.num_open = 0

    def enter(self) -> None:
        """Counts a call in; `leave` must follow.

        Raises:
            OverloadedError: there are as many as there may be; nothing was counted.
        """
        if self.num_open >= self._most:
            raise OverloadedError(
                f"the server answers {self._most} {self._what}, its most", RETRY_AFTER_S
            )
        self.num_open += 1

    def leave(self) -> None:
        """Counts a call out."""
        self.num_open -= 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A call in progress, for a block.

        Raises:
            OverloadedError: as `enter`.
        """
        self.enter()
        try:
            yield
        finally:
            self.leave()
