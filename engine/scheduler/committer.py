"""What became of a step: its tokens go to their requests, and some of those end by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import NothingAllowedError
from octavo.engine.output.outputs import RequestMetrics
from octavo.engine.pooling.pooled_sum import PooledSum
from octavo.engine.request import INFLIGHT_STEPS, INFLIGHT_TOKENS, Request, RequestStatus
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.plan_builder import Dispatched
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.rows import all_but, is_kept
from octavo.engine.scheduler.step_plan import (
    NO_TOKEN,
    RowTokens,
    StepPlan,
    StepResult,
    TokenRows,
    TokenScore,
)


class Committed(NamedTuple):
    """News of a request, to be told to whoever waits for it.

    Attributes:
        request: the request, already brought up to date.
        new_token_ids: tokens appended, in order; a stop token is its last one.
        logprobs: one entry a new token, if asked for.
        prompt_logprobs: the next prompt tokens' entries (never for the first token, and none
            twice), if asked for.
        finished: whether this is its terminal event.
        pooled: float64[hidden size], with the terminal event of a pooled request whose vector is
            whole: the sum of the hidden states that it pools.
    """

    request: Request
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] | None
    prompt_logprobs: tuple[TokenScore, ...] | None
    finished: bool
    pooled: NDArray[np.float64] | None = None


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


class Committer:
    """Takes the results of dispatched plans into the request table.

    Args:
        table: the state; changed by `take`.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._kv = table.kv
        self._lengths = table.forecast.lengths
        self._taken: StepPlan | None = None  # the newest, with what `take_back` must know of it:
        self._ended: list[Committed] = []  # the last news of requests that it ended
        self._scored: list[tuple[LiveRequest, int]] = []  # whom it scored, from which token on
        self._summed: list[tuple[LiveRequest, PooledSum]] = []  # whose sums it changed, from what

    def take(self, dispatched: Dispatched, result: StepResult, now_s: float) -> News:
        """Appends tokens, ends requests that stopped or reached their limit, and makes full pages
        findable. Rows of requests that ended meanwhile are dropped.

        Returns:
            News of each request that has any: of those that merely go on first, in the order of the
            plan's rows, then of the others in that order.
        """
        plan, rows, num_decode = dispatched.plan, result.rows, len(dispatched.decoding)
        news, broken, barred = News(), result.broken, result.barred
        self._taken, self._ended, self._scored, self._summed = plan, [], [], []
        if num_decode:
            self._take_decoded(dispatched, rows, broken, barred, news, now_s)
        prompts = rows.others if isinstance(rows, TokenRows) else rows[num_decode:]
        chunks = zip(dispatched.prefilling, plan.prefill_rows, prompts, strict=True)
        for index, (entry, chunk, row) in enumerate(chunks, num_decode):
            request = entry.request
            counts = request.counts
            counts[INFLIGHT_STEPS] -= 1
            counts[INFLIGHT_TOKENS] -= chunk.samples
            if not entry.is_live or index in broken:
                continue
            if request.slot is not None:
                entry.num_committed_tokens = chunk.start + chunk.num_tokens
                self._kv.register_full_pages(entry.pages, entry.num_committed_tokens)
                self._table.work.advance(entry)
            if request.pooling is not None:
                self._summed.append((entry, entry.pooled))
                end = chunk.start + chunk.num_tokens
                entry.pooled = entry.pooled.plus(request.pooling, chunk.start, end, row.pooled)
                if chunk.samples:
                    news.items.append(self._end_pooled(entry, now_s))
                continue
            scores = None
            if row.prompt_logprobs is not None:
                self._scored.append((entry, entry.num_scored_prompt_tokens))
                scores = _new_prompt_scores(entry, chunk.start, row.prompt_logprobs)
            if chunk.samples:
                count = None if index in barred else 1
                news.items.append(self._append(entry, row, count, scores, now_s))
            elif scores:
                news.items.append(Committed(request, (), None, scores, False))
        return news

    def take_back(self, plan: StepPlan) -> News:
        """After `take` of a plan failed, however far it came: requests that go on lose what it gave
        them, which is computed again.

        Returns:
            News of the requests that it ended.
        """
        if self._taken is not plan:
            return News()  # it had not begun
        for request, num_known in plan.emitting():
            if not request.status.is_finished:
                del request.output_token_ids[num_known - request.num_prompt_tokens :]
        for entry, num_scored in self._scored:
            entry.num_scored_prompt_tokens = num_scored
        for entry, pooled in self._summed:
            entry.pooled = pooled
        return News(self._ended)

    def _take_decoded(
        self,
        dispatched: Dispatched,
        rows: Sequence[RowTokens],
        broken: Collection[int],
        barred: Collection[int],
        news: News,
        now_s: float,
    ) -> None:
        """Takes in what decode rows emitted: rows that go on together, the others one by one."""
        decode_rows, columns = dispatched.plan.decode_rows, self._table.rows
        slots, counts = decode_rows.slots, decode_rows.max_new_tokens
        here, apart = dispatched.decoding.is_row, dispatched.ending
        # A row whose slot has another holder by now was preempted or has ended.
        gone = (columns.number[slots] != dispatched.decoding.numbers).nonzero()[0].tolist()
        if gone:
            apart = sorted({*apart, *gone})
            here = here.copy()
            here[slots[gone]] = 0
            for index in gone:
                request = decode_rows.requests[index]
                request.num_inflight_steps -= 1
                request.num_inflight_tokens -= int(counts[index])
        if dispatched.plan.num_steps == 1:
            inflight = columns.inflight
            inflight -= here
        else:
            columns.num_inflight_steps -= here
            num_tokens = here.copy()
            num_tokens[slots] *= counts
            columns.num_inflight_tokens -= num_tokens
        if isinstance(rows, TokenRows):
            self._append_one_each(dispatched, rows, apart, broken, barred, news, now_s)
            return
        ones_apart, stop_ids = set(apart), self._table.live.stop_ids.keys()
        going_on: list[int] = []
        for index, (request, row, count) in enumerate(
            zip(decode_rows.requests, rows, counts.tolist(), strict=False)
        ):
            token_ids = row.token_ids
            if index in broken:
                continue
            if (
                index not in ones_apart
                and len(token_ids) == count
                and stop_ids.isdisjoint(token_ids)
            ):
                # What `_append` would do for a row that goes on, without the call.
                request.output_token_ids.extend(token_ids)
                request.metrics.last_token_s = now_s
                news.items.append(Committed(request, token_ids, row.logprobs, None, False))
                going_on.append(index)
                continue
            entry = self._table.live.find(request)
            if entry is not None:
                planned = None if index in barred else count
                news.items.append(self._append(entry, row, planned, None, now_s))
        if going_on:
            self._table.tenants.serve_rows(columns.tenant[slots[going_on]], counts[going_on])

    def _append_one_each(
        self,
        dispatched: Dispatched,
        rows: TokenRows,
        apart: list[int],
        broken: Collection[int],
        barred: Collection[int],
        news: News,
        now_s: float,
    ) -> None:
        """Appends a token to each decode row of a step of one iteration.

        Args:
            apart: rows that are gone or at their limit.
            broken: rows that emitted nothing of meaning.
            barred: rows that were allowed no token.
        """
        if broken or barred:
            num_decode = len(rows.token_ids)
            marked = [index for index in (*broken, *barred) if index < num_decode]
            apart = sorted({*apart, *marked})
        stop_ids = self._table.live.stop_ids
        if not stop_ids.keys().isdisjoint(rows.token_ids):
            stops = [index for index, token in enumerate(rows.token_ids) if token in stop_ids]
            apart = sorted({*apart, *stops})
        decoding = dispatched.decoding
        token_ids: Sequence[int] = rows.token_ids
        assert len(token_ids) == len(decoding), (len(token_ids), len(decoding))
        requests: Sequence[Request] = decoding.requests
        outputs: Sequence[list[int]] = decoding.outputs
        all_metrics: Sequence[RequestMetrics] = decoding.metrics
        numbers, slots = decoding.numbers, decoding.slots
        if apart:
            token_ids, requests = all_but(token_ids, apart), all_but(requests, apart)
            outputs, all_metrics = all_but(outputs, apart), all_but(all_metrics, apart)
            kept = is_kept(len(numbers), apart)
            numbers, slots = numbers[kept], slots[kept]
        assert NO_TOKEN not in token_ids, "a row that goes on emitted nothing"
        deque(map(list.append, outputs, token_ids), maxlen=0)
        for metrics in all_metrics:
            metrics.last_token_s = now_s
        if token_ids:
            news.rows.append(CommittedRows(requests, token_ids, numbers, now_s))
            self._table.tenants.serve_rows(self._table.rows.tenant[slots])
        for index in apart:
            entry = self._table.live.find(decoding.requests[index])
            if entry is not None and index not in broken:
                count = None if index in barred else 1
                row = rows[index]
                news.items.append(self._append(entry, row, count, None, now_s))

    def _append(
        self,
        entry: LiveRequest,
        row: RowTokens,
        count: int | None,
        prompt_scores: tuple[TokenScore, ...] | None,
        now_s: float,
    ) -> Committed:
        """Appends what a sampling row of a live request emitted; ends the request if it is over.

        Args:
            count: tokens the row was planned to emit unless it stopped; None if it came to a place
                at which no token is allowed.
        """
        request = entry.request
        if request.slot is None:
            self._table.work.changed(entry)
        token_ids, logprobs = row.token_ids, row.logprobs
        output = request.output_token_ids
        stop = None
        if not entry.stop_ids.isdisjoint(token_ids):
            stop = find_stop(token_ids, request.num_tokens, entry.stop_ids, request.stop_from)
            if stop is not None:
                token_ids = token_ids[: stop + 1]
                logprobs = logprobs and logprobs[: stop + 1]
        assert stop is not None or count is None or len(token_ids) == count, (token_ids, count)
        output.extend(token_ids)
        self._table.tenants.serve(entry.tenant, 0, len(token_ids))
        metrics = request.metrics
        if token_ids:
            metrics.last_token_s = now_s
        if metrics.first_token_s is None and token_ids:
            metrics.first_token_s = now_s
            self._table.rows.begin_output(entry)
        if stop is not None:
            last = token_ids[-1]
            stop_reason = None if last in request.eos_token_ids else last
            self._lengths.observe(request)
            self._table.end(entry, RequestStatus.STOPPED, now_s, stop_reason=stop_reason)
        elif count is None:
            error = nothing_allowed(request)
            self._table.end(entry, RequestStatus.FAILED, now_s, error=error)
        elif len(output) >= request.max_tokens:
            self._lengths.observe(request)
            self._table.end(entry, RequestStatus.LENGTH, now_s)
        news = Committed(request, token_ids, logprobs, prompt_scores, not entry.is_live)
        if news.finished:
            self._ended.append(news)
        return news

    def append_forced(
        self, entry: LiveRequest, token_ids: tuple[int, ...], now_s: float
    ) -> Committed:
        """Appends tokens that nothing computed, as far as the request may still generate; ends it
        if it is over. If it runs and goes on, it computes them as a chunk.

        Args:
            entry: of a live request whose tokens are all committed.
        """
        request = entry.request
        token_ids = token_ids[: request.max_tokens - len(request.output_token_ids)]
        self._table.prefill_again(entry, len(token_ids))
        return self._append(entry, RowTokens(token_ids), len(token_ids), None, now_s)

    def _end_pooled(self, entry: LiveRequest, now_s: float) -> Committed:
        """Ends a pooled request: its prompt is computed, which is all that it asked for."""
        request, metrics = entry.request, entry.request.metrics
        if request.slot is None:
            self._table.work.changed(entry)
        metrics.first_token_s = metrics.last_token_s = now_s
        self._table.end(entry, RequestStatus.STOPPED, now_s)
        news = Committed(request, (), None, None, finished=True, pooled=entry.pooled.values)
        self._ended.append(news)
        return news


def nothing_allowed(request: Request) -> NothingAllowedError:
    """Why a request that came to a place at which it allows no token cannot go on."""
    params = request.sampling_params
    limits = ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
    fields = [name for name in limits if getattr(params, name)]
    return NothingAllowedError(
        " with ".join(fields) or "sampling_params",
        f"no token after {len(request.output_token_ids)} generated",
        "at least one token at each place",
    )


def _new_prompt_scores(
    entry: LiveRequest, start: int, scores: tuple[TokenScore, ...]
) -> tuple[TokenScore, ...] | None:
    """A chunk's prompt log-probabilities, less what was handed out before a preemption."""
    first = max(0, entry.num_scored_prompt_tokens - start)
    end = max(0, entry.num_prompt_tokens - 1 - start)
    scores = scores[first:end]
    entry.num_scored_prompt_tokens += len(scores)
    return scores or None


def find_stop(
    token_ids: Sequence[int], position: int, stop_ids: Collection[int], stop_from: int
) -> int | None:
    """Index in `token_ids` of the first token that ends the sequence, or None.

    The device stops a row by the same rule (`engine/execution/sampling/next_tokens.py`): at the
    first stop token at or after `stop_from`. No row emits one before that: it is forbidden there.

    Args:
        token_ids: new tokens in order.
        position: of the first of them in its sequence.
        stop_from: see `Request.stop_from`.
    """
    first = max(0, stop_from - position)
    for index in range(first, len(token_ids)):
        if token_ids[index] in stop_ids:
            return index
    return None
