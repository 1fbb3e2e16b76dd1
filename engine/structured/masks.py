"""The masks of the sequences in flight, computed beside the engine's loop.

When a sequence's token is committed, its matcher takes it in and writes the mask of the next one in
a thread, while the device runs other rows; then the sequence may be planned again. Matchers whose
last mask took long have a thread to themselves, so that they hold up none but each other.

Where the grammar leaves one way on, several tokens long, the matcher runs ahead of its sequence: it
takes in these forced tokens at once and makes the mask of what follows them. They are offered to
the scheduler, which appends them together if that saves time. If it does not, each is the one
token that its place allows. So a text is the same either way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from octavo.engine.errors import InvalidRequestError
from octavo.engine.request import Request
from octavo.engine.structured.grammar import CompiledGrammar, Mask, fill_mask
from octavo.engine.structured.params import FIELD

SLOW_MASK_S = 2e-3
"""A matcher whose last mask took longer has its next one made apart from the others'."""
POLL_WAIT_S = 2e-3
"""Longest wait of a turn of the loop for the masks of sequences whose last ones were quick."""
IDLE_WAIT_S = 0.005
"""Longest wait of a turn that has nothing else to do."""
LEAST_FORCED = 2
"""Forced tokens that a matcher runs ahead by, at least. The mask of a place with one token says as
much by itself, and appending one token saves one step of its row and costs a step with a chunk."""


class MaskReady(NamedTuple):
    """A sequence may be planned again, or never.

    Attributes:
        request_id: whose.
        num_tokens: prompt and output tokens that its mask follows.
        error: why it has no mask, if it has none.
        forced: the tokens that must come next, which may be appended at once; empty if there are
            none, or each is to be computed by itself.
    """

    request_id: str
    num_tokens: int
    error: Exception | None = None
    forced: tuple[int, ...] = ()


class _Walk:
    """A sequence on its way through its grammar.

    Attributes:
        mask: what may come after the tokens that the matcher has taken in.
        ahead: of these, the ones that the sequence does not have yet, in order.
        num_taken: output tokens of the sequence that were looked at.
    """

    __slots__ = (
        *("ahead", "is_live", "is_slow", "looks_ahead", "mask", "matcher"),
        *("num_taken", "request"),
    )

    def __init__(self, request: Request, grammar: CompiledGrammar, *, looks_ahead: bool) -> None:
        self.request = request
        self.matcher = grammar.matcher.deep_copy()
        self.mask: Mask = grammar.first_mask.copy()
        self.looks_ahead = looks_ahead
        self.ahead: deque[int] = deque()
        self.num_taken = 0
        self.is_slow = False
        self.is_live = True

    @property
    def offered(self) -> tuple[int, ...]:
        """Forced tokens that may be appended at once. A request that wants log-probabilities gets
        each of its tokens from a step of its own, which computes them."""
        return () if self.request.sampling_params.logprobs is not None else tuple(self.ahead)

    @property
    def next_mask(self) -> Mask:
        """What may come next in the sequence."""
        if not self.ahead:
            return self.mask
        mask = np.zeros_like(self.mask)
        mask[self.ahead[0] // 32] = np.uint32(1 << (self.ahead[0] % 32))
        return mask

    def new_token_ids(self) -> list[int]:
        """Tokens that were committed since the last call."""
        new = self.request.output_token_ids[self.num_taken :]
        self.num_taken += len(new)
        return new

    def catch_up(self, token_ids: list[int]) -> list[int]:
        """Takes in new tokens of the sequence as far as the matcher has them; returns the rest."""
        num_known = 0
        while self.ahead and num_known < len(token_ids):
            forced = self.ahead.popleft()
            assert token_ids[num_known] == forced, (self.request.request_id, forced, token_ids)
            num_known += 1
        return token_ids[num_known:]

    def take(self, token_ids: Sequence[int]) -> Exception | None:
        """Moves on and writes the mask; what went wrong, if anything."""
        begun_s = time.perf_counter()
        if self.matcher.consume_tokens(list(token_ids)):
            if self.looks_ahead:
                forced = self.matcher.compute_ff_tokens()
                if len(forced) >= LEAST_FORCED and self.matcher.consume_tokens(forced):
                    self.ahead.extend(forced)
            fill_mask(self.matcher, self.mask)
        self.is_slow = time.perf_counter() - begun_s > SLOW_MASK_S
        if not self.matcher.is_error():
            return None
        why = " ".join(self.matcher.get_error().split())[:200]
        return InvalidRequestError(FIELD, "the grammar", f"one simple enough to follow ({why})")


class _Job(NamedTuple):
    """Tokens for a walk to take in, after which its sequence has so many."""

    walk: _Walk
    token_ids: list[int]
    num_tokens: int


class TokenMasks:
    """Driven by the engine's thread alone.

    Args:
        looks_ahead: whether matchers run ahead where tokens are forced. Tests turn it off.
    """

    def __init__(self, *, looks_ahead: bool = True) -> None:
        self.looks_ahead = looks_ahead
        self._walks: dict[str, _Walk] = {}
        self._done = threading.Condition()
        self._ready: deque[tuple[_Walk, MaskReady]] = deque()
        self._num_pending = [0, 0]
        self._queues: list[SimpleQueue[list[_Job] | None]] = []

    @property
    def num_live(self) -> int:
        """Sequences with a grammar."""
        return len(self._walks)

    def open(self, request: Request, grammar: CompiledGrammar) -> None:
        """Begins to follow a sequence. Tokens that it has already are taken in now.

        Raises:
            InvalidRequestError: its tokens do not follow the grammar.
        """
        walk = _Walk(request, grammar, looks_ahead=self.looks_ahead)
        if token_ids := walk.new_token_ids():
            error = walk.take(token_ids)
            if error is not None:
                raise error
        self._walks[request.request_id] = walk

    def drop(self, request_id: str) -> None:
        """Forgets a sequence, if it is known."""
        walk = self._walks.pop(request_id, None)
        if walk is not None:
            walk.is_live = False

    def mask(self, request_id: str) -> Mask | None:
        """What may come next in a sequence that may be planned; None for one without a grammar."""
        walk = self._walks.get(request_id)
        return None if walk is None else walk.next_mask

    def appended(self, request_id: str) -> None:
        """The tokens that were offered for a sequence were appended to it."""
        walk = self._walks[request_id]
        walk.num_taken += len(walk.ahead)
        walk.ahead.clear()

    def take(self) -> None:
        """Takes in the tokens committed since, and forgets sequences that ended. At once."""
        if not self._walks:
            return
        jobs: tuple[list[_Job], list[_Job]] = ([], [])
        for walk in list(self._walks.values()):
            request = walk.request
            if request.status.is_finished:
                self.drop(request.request_id)
            elif token_ids := walk.new_token_ids():
                if token_ids := walk.catch_up(token_ids):
                    jobs[walk.is_slow].append(_Job(walk, token_ids, request.num_tokens))
                else:
                    self._ready.append((walk, _ready(walk, request.num_tokens, None)))
        for lane, batch in enumerate(jobs):
            if batch:
                with self._done:
                    self._num_pending[lane] += 1
                self._queue(lane).put(batch)

    def poll(self) -> list[MaskReady]:
        """Masks that were finished since the last call, each told once.

        Waits a little for those that are sure to come soon, so that their rows go together.
        """
        if not (any(self._num_pending) or self._ready):
            return []
        with self._done:
            if self._num_pending[False]:
                self._done.wait_for(lambda: not self._num_pending[False], POLL_WAIT_S)
            ready = list(self._ready)
            self._ready.clear()
        # A sequence may have ended meanwhile.
        return [item for walk, item in ready if walk.is_live]

    def wait(self) -> None:
        """Waits for a mask, if any is being made, as there is nothing else to do."""
        if any(self._num_pending):
            with self._done:
                self._done.wait_for(lambda: self._ready or not any(self._num_pending), IDLE_WAIT_S)

    def close(self) -> None:
        """Ends the threads."""
        for queue in self._queues:
            queue.put(None)
        self._queues = []

    def _queue(self, lane: int) -> SimpleQueue[list[_Job] | None]:
        while len(self._queues) <= lane:
            queue: SimpleQueue[list[_Job] | None] = SimpleQueue()
            name = f"octavo-masks-{len(self._queues)}"
            args = (queue, len(self._queues))
            threading.Thread(target=self._run, args=args, name=name, daemon=True).start()
            self._queues.append(queue)
        return self._queues[lane]

    def _run(self, queue: SimpleQueue[list[_Job] | None], lane: int) -> None:
        while (jobs := queue.get()) is not None:
            for walk, token_ids, num_tokens in jobs:
                if not walk.is_live:
                    continue
                try:
                    error = walk.take(token_ids)
                except Exception as caught:  # a fault of the library ends this request alone
                    error = caught
                with self._done:
                    self._ready.append((walk, _ready(walk, num_tokens, error)))
                    if lane:
                        self._done.notify_all()
            with self._done:
                self._num_pending[lane] -= 1
                self._done.notify_all()


def _ready(walk: _Walk, num_tokens: int, error: Exception | None) -> MaskReady:
    return MaskReady(walk.request.request_id, num_tokens, error, walk.offered)
