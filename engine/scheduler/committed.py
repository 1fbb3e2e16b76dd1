"""What one commit changed for one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request
from octavo.engine.scheduler.step_plan import TokenScore


class Committed(NamedTuple):
    """News of a request, to be told to whoever waits for it.

    Attributes:
        request: the request, already brought up to date.
        new_token_ids: tokens appended, in order; a stop token is its last one.
        logprobs: one entry a new token, if asked for.
        prompt_logprobs: the next prompt tokens' entries (never for the first token, and none
            twice), if asked for.
        finished: whether this is its terminal event.
    """

    request: Request
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] | None
    prompt_logprobs: tuple[TokenScore, ...] | None
    finished: bool


class CommittedRows(NamedTuple):
    """News of rows that gained one token each and go on, by column: nearly all rows of all steps.

    Attributes:
        requests: theirs.
        token_ids: a token for each.
        numbers: int64[rows], the requests' numbers in order of acceptance, from 0.
        now_s: when.
    """

    requests: Sequence[Request]
    token_ids: Sequence[int]
    numbers: NDArray[np.int64]
    now_s: float


class News:
    """News of several requests. Iterating gives a `Committed` for each; no request comes twice in
    the news of one commit.

    Attributes:
        rows: those that merely go on, by column.
        items: all others.
    """

    __slots__ = ("items", "rows")

    def __init__(self, items: Iterable[Committed] = ()) -> None:
        self.rows: list[CommittedRows] = []
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items) + sum([len(rows.requests) for rows in self.rows])

    def __iter__(self) -> Iterator[Committed]:
        for rows in self.rows:
            for request, token_id in zip(rows.requests, rows.token_ids, strict=True):
                yield Committed(request, (token_id,), None, None, False)
        yield from self.items

    def extend(self, news: News) -> None:
        """Adds later news."""
        self.rows += news.rows
        self.items += news.items
