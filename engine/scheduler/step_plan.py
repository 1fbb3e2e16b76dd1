"""A step, decided: the one message from the scheduler to whatever computes it.

A plan is plain numbers and strings, so that it can be logged, replayed, or sent to the other hosts
of a pod, which must dispatch the same programs in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from octavo.engine.kv.page_needs import PageNeeds, page_needs
from octavo.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """A row that decodes: its input token is read on the device from the row's state.

    Attributes:
        request: the request (host state; read only).
        slot: its row on the device.
        start: position of its first input token, if no earlier dispatched step stopped it.
        max_new_tokens: tokens it may emit in this dispatch, 1 ≤ … ≤ the plan's `num_steps`.
    """

    request: Request
    slot: int
    start: int
    max_new_tokens: int


# Not frozen, nor is the plan: one of each is made a plan, and frozen ones take three times as long.
@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRows(Sequence[DecodeRow]):
    """Decode rows by column: what packing copies as it stands. Indexing gives one `DecodeRow`.

    A step may hold hundreds of rows, and an object for each would cost more than planning them.

    Attributes:
        requests: the rows' requests.
        slots: intp[len(requests)], as in `DecodeRow`; of the type that NumPy indexes with.
        starts, max_new_tokens: int32[len(requests)], as in `DecodeRow`. All are read only.
    """

    requests: tuple[Request, ...]
    slots: NDArray[np.intp]
    starts: NDArray[np.int32]
    max_new_tokens: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Iterable[DecodeRow]) -> DecodeRows:
        """The columns of `rows`."""
        rows = tuple(rows)
        return cls(
            requests=tuple(row.request for row in rows),
            slots=np.array([row.slot for row in rows], np.intp),
            starts=np.array([row.start for row in rows], np.int32),
            max_new_tokens=np.array([row.max_new_tokens for row in rows], np.int32),
        )

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> DecodeRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[DecodeRow, ...]: ...
    def __getitem__(self, index: int | slice) -> DecodeRow | tuple[DecodeRow, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return DecodeRow(
            request=self.requests[index],
            slot=int(self.slots[index]),
            start=int(self.starts[index]),
            max_new_tokens=int(self.max_new_tokens[index]),
        )

    def __iter__(self) -> Iterator[DecodeRow]:
        columns = (self.slots.tolist(), self.starts.tolist(), self.max_new_tokens.tolist())
        for request, slot, start, max_new in zip(self.requests, *columns, strict=True):
            yield DecodeRow(request=request, slot=slot, start=start, max_new_tokens=max_new)


MAX_SAVES = 2
"""Snapshots of recurrent states that a row leaves in a step, at the most."""


class PrefillRow(NamedTuple):
    """A row whose known tokens advance by one chunk.

    Attributes:
        request: the request (host state; read only).
        slot: its row on the device.
        start: position of the chunk's first token.
        num_tokens: tokens in the chunk, ≥ 1.
        samples: whether the chunk ends at the last known token, so that a new one is sampled; of a
            pooled request, that its vector is whole.
        is_new: whether the slot is taken with this step: its whole row state is set first.
        page_ids: with `is_new`, every page that the row has, one cache group after the other and
            as many entries of each, in order: 0 where it has none. Else empty.
        restores: the snapshot that its recurrent state begins with; None for its own state.
        saves: snapshots of that state to be written, each with the position that is computed next
            after it.
    """

    request: Request
    slot: int
    start: int
    num_tokens: int
    samples: bool
    is_new: bool
    page_ids: tuple[int, ...] = ()
    restores: int | None = None
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def pooled_tokens(self) -> slice:
        """Which tokens of the chunk a pooled request pools; of others, none."""
        if self.request.pooling is None:
            return slice(0, 0)
        match self.request.pooling.pooling:
            case "mean":
                return slice(None)
            case "cls":
                return slice(0, int(self.start == 0))
            case _:
                return slice(self.num_tokens - int(self.samples), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Pages of one sequence on their way between device and host memory.

    Attributes:
        transfer_id: unique over the scheduler's life; `Scheduler.complete_transfer` is told of its
            end by this number.
        request_id: whose KV it is; empty for pages of the prefix cache.
        device_pages, host_pages: page ids, pairwise, in the order of the sequence, one cache group
            after the other.
    """

    transfer_id: int
    request_id: str
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]


class Decision(enum.Enum):
    """What was decided about a request."""

    ADMITTED = "admitted"
    RESUMED = "resumed"
    CHUNKED = "chunked"
    WAITED = "waited"
    PREEMPTED = "preempted"
    REJECTED = "rejected"
    NUM_STEPS = "num_steps"


class Reason(NamedTuple):
    """Why a plan is as it is, in so far as it concerns one request.

    Attributes:
        request_id: whom it concerns; empty for the step as a whole.
        decision: what was decided.
        text: why, as a phrase.
        beneficiary: for whom it gave way, if it did.
        num_tokens: tokens or iterations that the decision is about.
        cost_s: what it is expected to cost, in seconds.
    """

    request_id: str
    decision: Decision
    text: str
    beneficiary: str = ""
    num_tokens: int = 0
    cost_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one dispatch computes and copies. Decode rows come first.

    For reading only. A plan may consist of copies alone. Its `copy_outs` read the device pages
    before its rows run, so that a page copied out may be written by the same plan; its `copy_ins`
    begin then, and no row reads their pages before the transfer was reported complete.

    Attributes:
        step_id: 0, 1, 2, … in dispatch order.
        decode_rows, prefill_rows: who computes what. `decode_rows` may be given as a tuple of
            `DecodeRow`; it is always held as `DecodeRows`.
        num_steps: decode iterations on the device; 1 whenever there are prefill rows.
        page_updates: (slot, index in the row, page id of each cache group) of pages that running
            rows gained.
        preempted: ids of requests that lost their slot and pages in this plan.
        copy_outs, copy_ins: pages to copy to the host, and back to the device.
        reasons: why, for those who asked the scheduler to explain itself; else empty.
        priced_s: seconds that the step-time model expects the dispatch to take, as believed when
            it was planned. Set by `Scheduler.apply_plan`; 0 before.
    """

    step_id: int
    decode_rows: DecodeRows
    prefill_rows: tuple[PrefillRow, ...]
    num_steps: int
    page_updates: tuple[tuple[int, ...], ...]
    preempted: tuple[str, ...] = ()
    copy_outs: tuple[PageCopy, ...] = ()
    copy_ins: tuple[PageCopy, ...] = ()
    reasons: tuple[Reason, ...] = ()
    priced_s: float = 0.0

    def __post_init__(self) -> None:
        rows: Iterable[DecodeRow] = self.decode_rows
        if not isinstance(rows, DecodeRows):
            self.decode_rows = DecodeRows.of(rows)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the first iteration."""
        return len(self.decode_rows) + sum(row.num_tokens for row in self.prefill_rows)

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.prefill_rows)

    def emitting(self) -> Iterator[tuple[Request, int]]:
        """Requests of the rows that may emit tokens, each with the prompt and output tokens that
        it has before. A chunk that does not end at the last known token emits none."""
        rows = self.decode_rows
        for request, start in zip(rows.requests, rows.starts.tolist(), strict=True):
            yield request, start + 1
        for row in self.prefill_rows:
            if row.samples:
                yield row.request, row.start + row.num_tokens


class RowTokens(NamedTuple):
    """What one row of a step emitted.

    Attributes:
        token_ids: new tokens in order; empty for a chunk that did not sample, or for a row that
            an earlier step had already stopped. A row that is not stopped emits exactly
            `max_new_tokens`; a stop token is its last.
        logprobs: for each new token (chosen token's logprob, its rank, top ids, top logprobs), or
            None when the row asked for none.
        prompt_logprobs: for each position of a prefill chunk, the same of the *next* prompt token
            (entries at and past the last prompt token mean nothing and may be left off).
        pooled: float32[hidden size], the sum of the hidden states that a pooled request takes of
            this chunk; None where it takes none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] | None = None
    prompt_logprobs: tuple[TokenScore, ...] | None = None
    pooled: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows(Sequence[RowTokens]):
    """What the rows of a step of one iteration emitted, decode rows by column.

    Attributes:
        token_ids: for each decode row its token, without log-probabilities; `NO_TOKEN` for one
            that an earlier step had already stopped.
        others: the prefill rows.
    """

    token_ids: list[int]
    others: Sequence[RowTokens] = ()

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.others)

    @overload
    def __getitem__(self, index: int) -> RowTokens: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RowTokens, ...]: ...
    def __getitem__(self, index: int | slice) -> RowTokens | tuple[RowTokens, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        num_decode = len(self.token_ids)
        return (
            _one(self.token_ids[index]) if index < num_decode else self.others[index - num_decode]
        )

    def __iter__(self) -> Iterator[RowTokens]:
        yield from map(_one, self.token_ids)
        yield from self.others


NO_TOKEN = -1
NOT_FINITE = -2
"""In a program's tokens: the row's numbers are not finite."""
NOTHING_ALLOWED = -3
"""In a program's tokens: what the request asks for forbids every token at this place."""


def _one(token_id: int) -> RowTokens:
    return RowTokens(() if token_id == NO_TOKEN else (token_id,))


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probability of a token and of the most likely ones at its position."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of a plan, row by row: decode rows first, then prefill rows.

    Attributes:
        rows: one entry a row of the plan, in its order; `TokenRows` where that is enough.
        broken: rows, by index, whose numbers on the device are not finite: what they emitted means
            nothing, and neither does the KV that they wrote.
        barred: rows, by index, that came to a place at which their request allows no token: what
            they emitted before it stands, and they stopped there.
        duration_s: device time of the step as seen by the executor, in seconds.
    """

    rows: Sequence[RowTokens]
    duration_s: float = 0.0
    broken: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What the compiled steps can take: the planner never asks for more.

    Attributes:
        max_num_batched_tokens: tokens in a step with prefill.
        max_num_seqs: rows in a step, and slots on the device.
        max_num_steps: decode iterations in one dispatch.
        max_prefill_rows: prefill rows in a step.
        max_pages_per_seq: length of a row of a block table.
        page_size: tokens in a page.
        num_pages: pages in the pool, page 0 (trash) included.
        max_model_len: tokens in a sequence.
        token_edges: edges of the compiled token buckets, ascending.
        num_host_pages: pages of the host tier; 0 for none.
        run_pages: pages in a row that a growing sequence is kept: see `KVManager`.
        windows: by cache group, tokens that a query sees; None for all: see `PageNeeds`.
        has_dear_rows: whether a decode row may take about as long as all that a step takes without
            rows, as on a CPU, which computes while other devices wait for weights.
        has_states: rows keep recurrent states, which pages do not hold: a sequence goes on from
            pages only where there is a snapshot of its state, too.
        num_snapshots: places for such snapshots.
        snapshot_tokens: they are taken at multiples of so many tokens, which are whole pages.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_steps: int
    max_prefill_rows: int
    max_pages_per_seq: int
    page_size: int
    num_pages: int
    max_model_len: int
    token_edges: tuple[int, ...]
    num_host_pages: int = 0
    run_pages: int = 1
    has_dear_rows: bool = False
    windows: tuple[int | None, ...] = (None,)
    has_states: bool = False
    num_snapshots: int = 0
    snapshot_tokens: int = 1

    @property
    def needs(self) -> PageNeeds:
        """How many pages a sequence holds."""
        return page_needs(self.page_size, self.windows, self.max_num_batched_tokens)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepLimits:
        """The limits that a file has, in which there are no tuples."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})
