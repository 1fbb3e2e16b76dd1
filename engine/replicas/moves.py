"""Requests that go from one replica to another while they run, pages first.

A replica gives the full pages of a request while it goes on decoding; what came to be meanwhile
follows in a second round. It lets go of the request as a page is full, and gives that page. The
other one goes on from the tokens that readers have: it finds their pages, and computes the few
tokens that are in none.

Source: pre-copied migration as of Llumnix (Sun et al. 2024); prefill apart from decode as of
DistServe (Zhong et al. 2024) and Splitwise (Patel et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.engine.kv.page_hash import PageHash
from octavo.engine.replicas.messages import LoadReport

FEW_PAGES = 4
"""Pages of a round after which no further one is worth it."""
MAX_ROUNDS = 3
GUESS_S = 1e-3
"""Seconds to move a page, until one was moved."""
FIXED_S = 0.03
"""Seconds that a move takes beside its pages: messages, admission, the rest of a page."""
SHARE = 0.2
"""Of the newest move in what moving a page is expected to take."""


@dataclass(slots=True)
class Move:
    """A request on its way to another replica.

    Attributes:
        target: replica and life.
        begun_s: when its pages were asked for.
        known: names of pages that the target was given.
        num_new: of them, those of this round.
        num_rounds: rounds that have ended.
    """

    target: tuple[int, int]
    begun_s: float
    known: set[PageHash] = field(default_factory=set)
    num_new: int = 0
    num_rounds: int = 0

    def take(self, names: Sequence[PageHash]) -> None:
        """Pages went to the target."""
        self.known.update(names)
        self.num_new += len(names)

    def is_over(self) -> bool:
        """Ends a round; whether no other is worth it."""
        self.num_rounds += 1
        few, self.num_new = self.num_new <= FEW_PAGES, 0
        return few or self.num_rounds >= MAX_ROUNDS


class MovePrices:
    """What moves take, and whether a prompt is better computed apart from where it is decoded.

    Attributes:
        page_s: seconds to move a page, as last seen.
        num_moves, num_pages: moves that ended, and their pages.
    """

    def __init__(self) -> None:
        self.page_s = GUESS_S
        self.num_moves = 0
        self.num_pages = 0

    def observe(self, move: Move, now_s: float) -> None:
        """A move's pages are there."""
        num_pages = len(move.known)
        self.num_moves += 1
        self.num_pages += num_pages
        if num_pages:
            seconds = max(0.0, now_s - move.begun_s - FIXED_S) / num_pages
            self.page_s += (1.0 if self.num_moves == 1 else SHARE) * (seconds - self.page_s)

    def move_s(self, num_tokens: int, page_size: int) -> float:
        """Seconds to move a request of so many tokens."""
        return FIXED_S + num_tokens // page_size * self.page_s

    def is_better_apart(self, num_tokens: int, page_size: int, decoder: LoadReport) -> bool:
        """Whether rows that decode would wait for a prompt longer, all together, than moving it
        takes.

        Args:
            num_tokens: of the prompt.
            decoder: of the replica that decodes it in the end.
        """
        standing = decoder.load.standing
        num_rows = standing.num_running + standing.num_waiting
        wait_s = num_rows * standing.prompt_token_s * num_tokens
        return wait_s > self.move_s(num_tokens, page_size)
