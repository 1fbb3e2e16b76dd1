"""Which request makes steps fail: those of a failed step are tried again in ever smaller groups.

A step that raises does not say whose fault it was. So nobody is failed at first: the step's
requests are tried again together, apart from all others, as most faults do not come twice. If a
step fails again, the group is halved, and halved again, until a request fails alone. A group of n
costs at most 2 + log2(n) more failures for each guilty request, and nobody else is failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.engine.request import Request

TOKENS_TO_PASS = 2
"""New tokens that clear a suspect: one that its prompt's last chunk samples, one decoded."""


@dataclass(slots=True, eq=False)
class _Suspect:
    """A request that was in a failed step; cleared when it has come to `num_output_to_pass`."""

    request: Request
    num_output_to_pass: int

    @property
    def is_cleared(self) -> bool:
        request = self.request
        has_passed = len(request.output_token_ids) >= self.num_output_to_pass
        return request.status.is_finished or has_passed


class Suspects:
    """The groups that are to be tried, the one on trial first."""

    def __init__(self) -> None:
        self._groups: deque[list[_Suspect]] = deque()
        self._cleared: list[Request] = []

    @property
    def is_trying(self) -> bool:
        """Whether a group is on trial."""
        return bool(self._groups)

    @property
    def may_run(self) -> list[str] | None:
        """Ids of those on trial and of those who have passed; None if everybody may run."""
        if not self._groups:
            return None
        on_trial = [suspect.request for suspect in self._groups[0]]
        return [request.request_id for request in (*self._cleared, *on_trial)]

    def blame(self, requests: Sequence[Request]) -> Request | None:
        """Takes in that a step failed.

        Args:
            requests: the live ones of its rows.

        Returns:
            The one that is guilty: it failed before, and now was the only suspect in the step.
        """
        here = {id(request) for request in requests}
        self._cleared = [request for request in self._cleared if id(request) not in here]
        group = self._groups[0] if self._groups else []
        again = [suspect for suspect in group if id(suspect.request) in here]
        if not again:
            self._begin(requests, here)
            return None
        self._groups.popleft()
        elsewhere = [suspect for suspect in group if id(suspect.request) not in here]
        if elsewhere:
            self._groups.appendleft(elsewhere)
        if len(again) == 1:
            return again[0].request
        middle = len(again) // 2
        for half in (again[middle:], again[:middle]):
            self._groups.appendleft([_suspect(suspect.request) for suspect in half])
        return None

    def settle(self) -> bool:
        """Clears those who have passed; whether the trial of a group has ended by that."""
        has_ended = False
        while self._groups:
            self._cleared += [s.request for s in self._groups[0] if s.is_cleared]
            group = [suspect for suspect in self._groups[0] if not suspect.is_cleared]
            self._groups[0] = group
            if group:
                break
            self._groups.popleft()
            has_ended = True
        if not self._groups:
            self._cleared.clear()
        return has_ended

    def _begin(self, requests: Sequence[Request], here: Collection[int]) -> None:
        for index, group in enumerate(self._groups):
            self._groups[index] = [s for s in group if id(s.request) not in here]
        self._groups = deque(group for group in self._groups if group)
        if requests:
            self._groups.appendleft([_suspect(request) for request in requests])


def _suspect(request: Request) -> _Suspect:
    return _Suspect(request, len(request.output_token_ids) + TOKENS_TO_PASS)
