"""A device that a person can work out by hand, strict about everything a real one would not tell.

It keeps a KV pool in which every place holds a digest of all tokens up to it, so that a page that
was shared, evicted or handed on wrongly is found by the first row that reads it. Its next token
depends on the digest it reads, so that a wrong read also shows in the tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.committer import Committed
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import (
    DecodeRow,
    PageCopy,
    PrefillRow,
    RowTokens,
    StepLimits,
    StepPlan,
    StepResult,
    TokenScore,
)
from tests.engine.made_requests import make_request

VOCAB = 23


def digest(before: int, token_id: int) -> int:
    """The digest of a prefix, from that of the prefix one shorter."""
    return hash((before, token_id))


def next_token(request: Request, prefix: int) -> int:
    """The token that follows a prefix in this request."""
    return hash((request.seed, prefix)) % VOCAB


def oracle(request: Request) -> list[int]:
    """The output that a request must end with if nothing cuts it short."""
    prefix = 0
    for token_id in request.prompt_token_ids:
        prefix = digest(prefix, token_id)
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(next_token(request, prefix))
        prefix = digest(prefix, output[-1])
        if is_stop(request, output[-1], len(output) - 1):
            break
    return output


def hidden(prefix: int) -> NDArray[np.float32]:
    """The hidden state behind a prefix: small integers, whose sums are exact."""
    return np.array([1, prefix % 1009], np.float32)


def whole_sum(request: Request) -> NDArray[np.float32]:
    """What a pooled request must end with: the sum over the whole text at once."""
    prefix, states = 0, []
    for token_id in request.prompt_token_ids:
        prefix = digest(prefix, token_id)
        states.append(hidden(prefix))
    parts = {"last": states[-1:], "cls": states[:1], "mean": states}
    total: NDArray[np.float32] = np.sum(parts[request.pooling.pooling], axis=0)
    return total


def is_stop(request: Request, token_id: int, index: int) -> bool:
    """Whether output token `index` ends the request."""
    return token_id in request.stop_token_ids and index >= request.sampling_params.min_tokens


class Row:
    """State of one device row."""

    def __init__(self, request: Request, pages: Iterable[int]) -> None:
        self.request = request
        self.pages = list(pages)
        self.length = 0
        self.last_token: int | None = None
        self.stopped = False


class FakeDevice:
    """Runs plans in dispatch order; asserts that each is within the limits."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.kv: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.transfers: dict[int, tuple[str, PageCopy, list[int | None]]] = {}
        self.rows: dict[int, Row] = {}

    def lose_everything(self) -> None:
        """As after a failed step that had taken the state."""
        self.kv.clear()
        self.rows.clear()
        self.transfers.clear()

    def run(self, plan: StepPlan) -> StepResult:
        """The plan's result."""
        check_budgets(plan, self.limits)
        for copy in plan.copy_outs:
            self._begin("out", copy, self.kv, copy.device_pages)
        for copy in plan.copy_ins:
            self._begin("in", copy, self.host, copy.host_pages)
            for page in copy.device_pages:  # nobody may read it before it has arrived
                for offset in range(self.limits.page_size):
                    self.kv.pop((page, offset), None)
        for slot, index, page in plan.page_updates:
            assert index == len(self.rows[slot].pages)
            assert 0 < page < self.limits.num_pages
            self.rows[slot].pages.append(page)
        return StepResult(
            rows=(
                *(self._decode(row) for row in plan.decode_rows),
                *(self._prefill(row) for row in plan.prefill_rows),
            )
        )

    def _begin(
        self, kind: str, copy: PageCopy, memory: dict[tuple[int, int], int], pages: tuple[int, ...]
    ) -> None:
        assert len(copy.device_pages) == len(copy.host_pages) > 0
        assert all(0 <= page < self.limits.num_host_pages for page in copy.host_pages)
        size = self.limits.page_size
        data = [memory.get((page, offset)) for page in pages for offset in range(size)]
        self.transfers[copy.transfer_id] = (kind, copy, data)

    def end_transfer(self, transfer_id: int, ok: bool) -> None:
        """Lets a copy's data arrive, or get lost."""
        kind, copy, data = self.transfers.pop(transfer_id)
        memory, pages = (
            (self.host, copy.host_pages) if kind == "out" else (self.kv, copy.device_pages)
        )
        size = self.limits.page_size
        for index, value in enumerate(data):
            place = (pages[index // size], index % size)
            memory.pop(place, None)
            if ok and value is not None:
                memory[place] = value

    def _decode(self, plan_row: DecodeRow) -> RowTokens:
        row = self.rows[plan_row.slot]
        assert row.request is plan_row.request
        if row.stopped:
            return RowTokens(())
        assert plan_row.start == row.length
        first = row.length
        emitted: list[int] = []
        while len(emitted) < plan_row.max_new_tokens and not row.stopped:
            assert row.last_token is not None
            self._write(row, [row.last_token])
            emitted.append(self._sample(row))
        return RowTokens(tuple(emitted), self._scores(row.request, first + 1, len(emitted)))

    def _prefill(self, chunk: PrefillRow) -> RowTokens:
        request = chunk.request
        if chunk.is_new:
            row = self.rows[chunk.slot] = Row(request, chunk.page_ids)
            row.length = chunk.start
        row = self.rows[chunk.slot]
        assert row.request is request
        assert row.length == chunk.start
        known = request.all_token_ids
        assert chunk.samples == (chunk.start + chunk.num_tokens == len(known))
        prefix = 0
        for position, token_id in enumerate(known[: chunk.start]):
            prefix = digest(prefix, token_id)
            assert self.kv.get(self._place(row, position)) == prefix, "not this prefix's KV"
        self._write(row, known[chunk.start : chunk.start + chunk.num_tokens])
        if request.pooling is not None:
            places = range(chunk.start, chunk.start + chunk.num_tokens)[chunk.pooled_tokens]
            states = [hidden(self.kv[self._place(row, position)]) for position in places]
            return RowTokens((), pooled=np.sum(states, axis=0) if states else None)
        token_ids = (self._sample(row),) if chunk.samples else ()
        prompt = None
        if request.sampling_params.prompt_logprobs is not None:
            span = range(chunk.start + 1, chunk.start + chunk.num_tokens + 1)
            prompt = tuple(TokenScore(float(position), 1) for position in span)
        return RowTokens(token_ids, self._scores(request, row.length, len(token_ids)), prompt)

    def _write(self, row: Row, token_ids: list[int]) -> None:
        prefix = self.kv[self._place(row, row.length - 1)] if row.length else 0
        for token_id in token_ids:
            prefix = digest(prefix, token_id)
            self.kv[self._place(row, row.length)] = prefix
            row.length += 1

    def _sample(self, row: Row) -> int:
        request = row.request
        token_id = next_token(request, self.kv[self._place(row, row.length - 1)])
        index = row.length - request.num_prompt_tokens
        row.last_token = token_id
        row.stopped = is_stop(request, token_id, index) or index + 1 >= request.max_tokens
        return token_id

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.limits.page_size)
        return row.pages[index], offset

    @staticmethod
    def _scores(request: Request, first: int, count: int) -> tuple[TokenScore, ...] | None:
        if request.sampling_params.logprobs is None or not count:
            return None
        return tuple(TokenScore(float(first + i), 1) for i in range(count))


def check_budgets(plan: StepPlan, limits: StepLimits) -> None:
    """Asserts that a plan is well formed and asks for no more than the limits allow."""
    rows = [*plan.decode_rows, *plan.prefill_rows]
    assert rows or plan.copy_outs or plan.copy_ins, "an empty plan"
    assert plan.num_tokens <= limits.max_num_batched_tokens
    assert len(rows) <= limits.max_num_seqs
    assert len(plan.prefill_rows) <= limits.max_prefill_rows
    assert len({row.slot for row in rows}) == len(rows)
    assert len({row.request.request_id for row in rows}) == len(rows)
    assert all(0 <= row.slot < limits.max_num_seqs for row in rows)
    assert 1 <= plan.num_steps <= limits.max_num_steps
    assert plan.num_steps & (plan.num_steps - 1) == 0
    assert plan.num_steps == 1 or not plan.prefill_rows
    for row in plan.decode_rows:
        assert 1 <= row.max_new_tokens <= plan.num_steps
        assert row.start + row.max_new_tokens < limits.max_model_len
    for row in plan.prefill_rows:
        assert row.num_tokens >= 1
        assert bool(row.page_ids) == row.is_new
    assert {slot for slot, _, _ in plan.page_updates} <= {row.slot for row in plan.decode_rows}


class Driver:
    """The engine's loop around a scheduler and a fake device.

    Args:
        depth: steps that stay in flight while the next is planned.
    """

    def __init__(self, limits: StepLimits, *, depth: int = 0, **scheduler_args: Any) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, **scheduler_args)
        self.device = FakeDevice(limits)
        self.depth = depth
        self.now_s = 0.0
        self.tick_s = 0.0
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []
        self.news: list[Committed] = []
        self.num_ends: Counter[str] = Counter()
        self.streams: dict[str, list[int]] = {}
        self.prompt_scores: dict[str, list[TokenScore]] = {}
        self.pooled: dict[str, NDArray[np.float64]] = {}

    def add(self, request: Request) -> Request:
        self.scheduler.add(request, self.now_s)
        self.requests.append(request)
        self.streams[request.request_id] = []
        self.prompt_scores[request.request_id] = []
        return request

    def plan(self) -> StepPlan | None:
        """Plans and dispatches a step, if there is anything to compute."""
        plan = self.scheduler.plan(self.now_s)
        for request in self.scheduler.take_ended():
            self.ended(request)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def commit(self) -> list[Committed]:
        """Commits the oldest step."""
        plan, result = self.in_flight.popleft()
        return self._take(self.scheduler.commit(plan, result, self.now_s))

    def unblock(self, request: Request, num_forced: int = 0) -> int:
        """Lets a request with a grammar go on, and forces its next tokens: those that the device
        would choose.

        Returns:
            How many were appended.
        """
        num_output = len(request.output_token_ids)
        forced = tuple(oracle(request)[num_output : num_output + num_forced])
        offer = Unblocked(request.request_id, request.num_tokens, forced)
        self.scheduler.unblock(offer.request_id, offer.num_tokens)
        news = self._take(self.scheduler.append_forced([offer] if forced else [], self.now_s))
        return sum(len(item.new_token_ids) for item in news)

    def give_pages(self, request: Request) -> int:
        """Begins to copy a request's pages to the host, for another engine; how many are there.

        Asserts that they hold what the request's tokens come to.
        """
        names = self.scheduler.page_names(request.request_id)
        self.scheduler.transfers.bring_to_host(names, self.now_s)
        found = 0
        for name, digests in zip(names, self._page_digests(request), strict=False):
            page = self.scheduler.transfers.host_page(name)
            if page is not None:
                held = [self.device.host.get((page, n)) for n in range(self.limits.page_size)]
                assert held == digests, "not this prefix's KV"
                found += 1
        return found

    def take_pages(self, request: Request, first: int) -> int:
        """Takes a request's pages, from one of them on, as if another engine had computed them; how
        many were taken."""
        names = self.scheduler.page_names(request.request_id)
        digests = dict(zip(names, self._page_digests(request), strict=False))
        taken = self.scheduler.transfers.take_in(names[first:])
        for name, page in taken.items():
            for offset, value in enumerate(digests[name]):
                self.device.host[page, offset] = value
        return len(taken)

    def _page_digests(self, request: Request) -> list[list[int]]:
        """What the full pages of a request's known tokens hold."""
        size, values, prefix = self.limits.page_size, list[int](), 0
        for token_id in request.all_token_ids:
            values.append(prefix := digest(prefix, token_id))
        return [values[start : start + size] for start in range(0, len(values), size)]

    def _take(self, committed: Iterable[Committed]) -> list[Committed]:
        committed = list(committed)
        for news in committed:
            request_id = news.request.request_id
            assert not self.num_ends[request_id], "news after the end"
            self.streams[request_id] += news.new_token_ids
            self.prompt_scores[request_id] += news.prompt_logprobs or ()
            if news.request.sampling_params.logprobs is not None:
                assert len(news.logprobs or ()) == len(news.new_token_ids)
            if news.pooled is not None:
                assert news.finished
                self.pooled[request_id] = news.pooled
            if news.finished:
                self.ended(news.request)
        self.news += committed
        return committed

    def end_transfer(self, transfer_id: int, ok: bool = True) -> None:
        """Reports that a copy has ended."""
        self.device.end_transfer(transfer_id, ok)
        self.scheduler.complete_transfer(transfer_id, ok, self.now_s)

    def turn(self) -> StepPlan | None:
        """One turn of the engine's loop; copies end when nothing else is left to do."""
        plan = self.plan()
        if plan is None and not self.in_flight and self.device.transfers:
            self.end_transfer(next(iter(self.device.transfers)))
        if len(self.in_flight) > self.depth or (plan is None and self.in_flight):
            self.commit()
        return plan

    def ended(self, request: Request) -> None:
        """Notes a terminal event, which must be the request's first."""
        assert request.status.is_finished
        assert request.metrics.finished_s is not None
        self.num_ends[request.request_id] += 1
        assert self.num_ends[request.request_id] == 1, request.request_id

    def cancel(self, request_id: str) -> Request | None:
        request = self.scheduler.cancel(request_id, self.now_s)
        if request is not None:
            self.ended(request)
        return request

    def drain(self) -> None:
        """Turns until no work is left; then everything must be in order."""
        most = 200 + 50 * sum(r.max_total_tokens for r in self.requests if not r.status.is_finished)
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            had_steps = len(self.in_flight) + len(self.device.transfers) > 0
            if self.turn() is None:
                assert had_steps or not self.scheduler.has_unfinished, "stuck"
            self.now_s += self.tick_s
            self.scheduler.check_integrity()
        for transfer_id in list(self.device.transfers):
            self.end_transfer(transfer_id)
        self.scheduler.check_integrity()
        assert not self.scheduler.has_work, "no progress"
        self.check_ends()

    def check_ends(self) -> None:
        """Asserts that every request ended once, with the oracle's tokens, and gave all back."""
        load = self.scheduler.load()
        assert load.num_owned_pages == load.num_running == load.num_waiting == 0
        assert load.num_finished == len(self.requests)
        for request in self.requests:
            assert self.num_ends[request.request_id] == 1
            assert request.num_inflight_steps == request.num_inflight_tokens == 0
            if request.pooling is not None:
                self.check_pooled(request)
                continue
            output, expected = self.streams[request.request_id], oracle(request)
            assert request.output_token_ids == output
            if request.status in (RequestStatus.STOPPED, RequestStatus.LENGTH):
                assert output == expected
                stopped = is_stop(request, output[-1], len(output) - 1)
                assert (request.status is RequestStatus.STOPPED) == stopped
            else:
                assert output == expected[: len(output)]
            scores = [score.logprob for score in self.prompt_scores[request.request_id]]
            if request.sampling_params.prompt_logprobs is None:
                assert not scores
            else:
                positions = [float(i) for i in range(1, request.num_prompt_tokens)]
                assert scores == positions[: len(scores)]
                assert not output or scores == positions

    def check_pooled(self, request: Request) -> None:
        """Asserts that a pooled request said nothing, and ended well just if its sum is right."""
        assert not request.output_token_ids
        assert not self.streams[request.request_id]
        found = self.pooled.get(request.request_id)
        assert (found is not None) == (request.status is RequestStatus.STOPPED)
        if found is not None:
            np.testing.assert_array_equal(found, whole_sum(request))
            assert not (request.pooling.needs_every_token and request.num_cached_tokens)


def make_limits(**changes: Any) -> StepLimits:
    """Small limits: pages of 4 tokens, 4 rows, 16 tokens a step."""
    values = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_num_steps": 8,
        "max_prefill_rows": 4,
        "max_pages_per_seq": 64,
        "page_size": 4,
        "num_pages": 65,
        "max_model_len": 128,
        "token_edges": (16,),
    }
    return StepLimits(**{**values, **changes})


@pytest.fixture(scope="session")
def fakes() -> SimpleNamespace:
    """The parts above, for tests that need several."""
    return SimpleNamespace(
        Driver=Driver,
        FakeDevice=FakeDevice,
        limits=make_limits,
        request=make_request,
        oracle=oracle,
    )


@pytest.fixture
def drive(fakes: SimpleNamespace) -> Callable[..., Any]:
    """Builds drivers over small limits (changed by `limits`); each must end in order."""
    made: list[Driver] = []

    def make(limits: dict[str, Any] | None = None, **arguments: Any) -> Driver:
        driver = Driver(make_limits(**(limits or {})), **{"watermark": 0.0, **arguments})
        made.append(driver)
        return driver

    yield make
    for driver in made:
        driver.scheduler.check_integrity()


@pytest.fixture
def request_of(fakes: SimpleNamespace) -> Callable[..., Request]:
    """Makes requests: see `make_request`."""
    return make_request
