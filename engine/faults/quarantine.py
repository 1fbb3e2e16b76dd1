"""Prompts that made steps fail, refused for a while."""

from __future__ import annotations

from collections import OrderedDict

from octavo.engine.errors import QuarantinedError
from octavo.engine.request import Request

QUARANTINE_S = 300.0
"""How long a prompt stays quarantined: a client that tries again at once must not win."""
MAX_PROMPTS = 1024
"""Prompts remembered; the oldest goes first."""


class Quarantine:
    """Remembers prompts by a hash of their tokens."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def put(self, request: Request, now_s: float) -> None:
        """Refuses this request's prompt from now on."""
        key = _key(request)
        self._until_s.pop(key, None)
        self._until_s[key] = now_s + QUARANTINE_S
        if len(self._until_s) > MAX_PROMPTS:
            self._until_s.popitem(last=False)

    def check(self, request: Request, now_s: float) -> None:
        """Lets a request pass whose prompt is not quarantined.

        Raises:
            QuarantinedError: it is.
        """
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        if self._until_s and (until_s := self._until_s.get(_key(request))) is not None:
            raise QuarantinedError(
                f"request {request.request_id}: its prompt made steps fail before and is refused "
                f"for another {until_s - now_s:.0f} s"
            )


def _key(request: Request) -> int:
    return hash((*request.prompt_token_ids,))
