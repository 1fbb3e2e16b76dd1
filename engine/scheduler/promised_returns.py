"""Clients that were sent away: when each was asked to come back, and the work it brings then."""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from octavo.engine.request import Request

MOST_PROMISES = 1024
"""Promises that are kept at the most; beyond them a client is sent away without one."""
_GRACE_S = 2.0
_GRACE_SHARE = 0.25
_EARLY_S = 0.1
_LEAST_WAIT_S = 0.1
_FADE = 0.97


class _Promise(NamedTuple):
    return_s: float
    number: int
    expires_s: float
    work_s: float
    key: tuple[object, ...]


class PromisedReturns:
    """A ledger of `retry_after` times, so that clients who come back find room.

    Each refusal reserves the request's work at its return time, behind the work that is there and
    behind the returns promised before: clients that are refused together come back one after the
    other. A promise ends when an equal request (tenant, prompt and targets) comes at its time or
    later, and expires 2 s, or a quarter of the wait, after it.

    Many clients never come back. Reserved work counts by the share of the promises that ended in
    a return, newer ones more. Until the first has ended, a return time counts all of the work, and
    the door none of it.
    """

    def __init__(self) -> None:
        self._promises: list[_Promise] = []
        self._num_made = 0
        self._num_kept = self._num_ended = 0.0
        self._work_s = 0.0

    def __len__(self) -> int:
        return len(self._promises)

    def promise(self, request: Request, now_s: float, free_s: float, work_s: float) -> float:
        """Sends a client away.

        Args:
            request: what was refused.
            now_s: engine clock.
            free_s: seconds until the request would be in time, by the work that is there now.
            work_s: seconds of the machine that it takes.

        Returns:
            Seconds after which it should come back.
        """
        self._expire(now_s)
        share = (self._num_kept + 1.0) / (self._num_ended + 1.0)
        wait_s = max(free_s + share * self._work_s, _LEAST_WAIT_S)
        if len(self._promises) < MOST_PROMISES:
            expires_s = now_s + wait_s + max(_GRACE_S, _GRACE_SHARE * wait_s)
            self._num_made += 1
            insort(
                self._promises,
                _Promise(now_s + wait_s, self._num_made, expires_s, work_s, _key(request)),
            )
            self._work_s += work_s
        return wait_s

    def claim(self, request: Request, now_s: float) -> bool:
        """Whether a request is one that was promised room now; ends that promise."""
        if not self._promises:
            return False
        self._expire(now_s)
        key = _key(request)
        for index, promise in enumerate(self._promises):
            if promise.return_s > now_s + _EARLY_S:
                break
            if promise.key == key:
                self._end(index, is_kept=True)
                return True
        return False

    def work_before_s(self, until_s: float, now_s: float) -> float:
        """Seconds of work that is expected to come back before `until_s`."""
        if not self._promises:
            return 0.0
        self._expire(now_s)
        work_s = 0.0
        for promise in self._promises:
            if promise.return_s > until_s:
                break
            work_s += promise.work_s
        return work_s * self._num_kept / (self._num_ended + 1.0)

    def _expire(self, now_s: float) -> None:
        index = 0
        while index < len(self._promises) and self._promises[index].return_s < now_s:
            if self._promises[index].expires_s < now_s:
                self._end(index, is_kept=False)
            else:
                index += 1

    def _end(self, index: int, *, is_kept: bool) -> None:
        promise = self._promises.pop(index)
        self._work_s = self._work_s - promise.work_s if self._promises else 0.0
        self._num_kept = self._num_kept * _FADE + is_kept
        self._num_ended = self._num_ended * _FADE + 1.0


def _key(request: Request) -> tuple[object, ...]:
    """What a request that comes back has in common with the one that was refused."""
    token_ids = request.prompt_token_ids
    return (
        request.tenant, request.priority, request.max_tokens, len(token_ids),
        tuple(token_ids[:16]), tuple(token_ids[-16:]),
        request.ttft_target_s, request.tpot_target_s, request.e2e_target_s,
    )  # fmt: skip
