"""A simulated device that knows what every page holds, and asserts whatever a real one would not.

A page of the pool, or of the host tier, holds the tokens written to it and the digest of all
before them; a snapshot of a recurrent state, all tokens that went into it. A row that reads a page
or a snapshot which was shared, evicted, copied, given back or handed on wrongly is found in the
step that reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.executor import TransferDone
from octavo.engine.request import Request
from octavo.engine.scheduler.step_plan import (
    MAX_SAVES,
    PageCopy,
    PrefillRow,
    StepLimits,
    StepPlan,
)
from octavo.engine.simulation.executor import SimulatedExecutor, SimulatedStep


class BrokenPlanError(BaseException):
    """A plan that no device could run as meant.

    Not an `Exception`: the loop must not take it for a step that failed on a sound plan.
    """


@dataclass(slots=True)
class _Page:
    """What a page holds: tokens from a multiple of the page size on, and what came before."""

    digest: int
    tokens: list[int] = field(default_factory=list)

    def copy(self) -> _Page:
        return _Page(self.digest, list(self.tokens))


@dataclass(slots=True)
class _Row:
    """A row of the device: its block tables, by cache group."""

    request: Request
    tables: list[list[int]]
    num_written: int


class CheckedExecutor(SimulatedExecutor):
    """As `SimulatedExecutor`; every plan is checked when it is dispatched.

    Raises:
        BrokenPlanError: a plan beyond its budgets, a page with the wrong content, a copy that reads
            what is not there or writes what is in use.
    """

    def __init__(self, limits: StepLimits, *args: Any, **keywords: Any) -> None:
        super().__init__(limits, *args, **keywords)
        self._device_kv: dict[int, _Page] = {}
        self._host_kv: dict[int, _Page] = {}
        self._rows: dict[int, _Row] = {}
        self._snapshots: dict[int, tuple[int, ...]] = {}
        self._copies: dict[int, tuple[PageCopy, bool, list[_Page]]] = {}
        self._known: dict[str, tuple[int, ...]] = {}
        self._last_step_id = -1
        self._needs = limits.needs
        self._written: dict[int, int] = {}  # in the step at hand: page -> slot
        self._read: list[tuple[int, int]] = []  # (page, slot)

    def dispatch(self, plan: StepPlan) -> SimulatedStep:
        """Checks the plan and plays what it does to pages."""
        try:
            self._play(plan)
        except (AssertionError, LookupError) as error:
            raise BrokenPlanError(f"step {plan.step_id}: {error!r}") from error
        return super().dispatch(plan)

    def _play(self, plan: StepPlan) -> None:
        self._check_budgets(plan)
        for copy in plan.copy_outs:
            assert len(copy.device_pages) == len(copy.host_pages) > 0
            read = [self._device_kv.get(page, _Page(0)).copy() for page in copy.device_pages]
            self._begin(copy, False, read)
        arriving = {
            page for copy, is_in, _ in self._copies.values() if is_in for page in copy.device_pages
        }
        for copy in plan.copy_ins:
            assert len(copy.device_pages) == len(copy.host_pages) > 0
            for page in copy.host_pages:
                assert page in self._host_kv, f"host page {page} holds nothing"
            assert arriving.isdisjoint(copy.device_pages), "two copies fill one page"
            arriving.update(copy.device_pages)
            self._begin(copy, True, [self._host_kv[page].copy() for page in copy.host_pages])
        for slot, index, *pages in plan.page_updates:
            for group, (table, page) in enumerate(zip(self._rows[slot].tables, pages, strict=True)):
                assert 0 < page < self.limits.num_pages
                if index == len(table):
                    table.append(page)
                else:  # a chunk names what it writes to in all groups
                    is_window = self._needs.windows[group] is not None
                    assert is_window or table[index] == page, (slot, index, page)
                    table[index] = page
        self._written.clear()
        self._read.clear()
        for chunk in plan.prefill_rows:
            self._prefill(chunk)
        if self.limits.has_states:
            self._play_snapshots(plan.prefill_rows)
        for decode in plan.decode_rows:
            row = self._rows[decode.slot]
            assert row.request is decode.request, "another request's row"
            assert decode.start == row.num_written, (decode.start, row.num_written)
            self._write(decode.slot, decode.start, decode.max_new_tokens)
        for page, slot in self._read:
            assert self._written.get(page, slot) == slot, f"page {page} is read and written at once"
        busy = {page for page, _ in self._read} | self._written.keys()
        assert arriving.isdisjoint(busy), "a row in the step has pages that are on their way"

    def poll_transfers(self) -> list[TransferDone]:
        """Ends copies: what arrived is there, what failed is not."""
        ended = super().poll_transfers()
        for done in ended:
            copy, is_in, read = self._copies.pop(done.transfer_id)
            target = self._device_kv if is_in else self._host_kv
            pages = copy.device_pages if is_in else copy.host_pages
            for page, content in zip(pages, read, strict=True):
                if done.ok:
                    target[page] = content
                else:
                    target.pop(page, None)
        return ended

    def read_host_page(self, page: int) -> _Page:
        """The tokens that a host page holds."""
        return self._host_kv[page].copy()

    def write_host_page(self, page: int, content: object) -> None:
        """Fills a host page that no copy is at."""
        assert isinstance(content, _Page)
        for copy, is_in, _ in self._copies.values():
            assert is_in or page not in copy.host_pages, "a copy fills the page"
        self._host_kv[page] = content.copy()

    def reset(self) -> None:
        """The device's memory is lost; the host's is not."""
        super().reset()
        self._device_kv.clear()
        self._snapshots.clear()
        self._rows.clear()

    def forget_output(self, request_id: str) -> None:
        super().forget_output(request_id)
        self._known.pop(request_id, None)

    def _begin(self, copy: PageCopy, is_in: bool, read: list[_Page]) -> None:
        assert copy.transfer_id not in self._copies
        self._copies[copy.transfer_id] = (copy, is_in, read)
        if not is_in:
            for page in copy.host_pages:
                assert 0 <= page < self.limits.num_host_pages, page
                self._host_kv.pop(page, None)

    def _prefill(self, chunk: PrefillRow) -> None:
        request = chunk.request
        if chunk.is_new:
            given = [page for page in chunk.page_ids if page]
            assert len(set(given)) == len(given)
            length = len(chunk.page_ids) // self._needs.num_groups
            tables = [
                list(chunk.page_ids[group * length : (group + 1) * length])
                for group in range(self._needs.num_groups)
            ]
            self._rows[chunk.slot] = _Row(request, tables, chunk.start)
        row = self._rows[chunk.slot]
        assert row.request is request, "another request's row"
        assert chunk.start == row.num_written
        num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
        end = chunk.start + chunk.num_tokens
        assert chunk.samples == (end == num_known), (end, num_known)
        self._write(chunk.slot, chunk.start, chunk.num_tokens)

    def _play_snapshots(self, chunks: Sequence[PrefillRow]) -> None:
        """Checks what rows' states begin with, and writes what they leave."""
        read, written = Counter[int](), dict[int, tuple[int, ...]]()
        for chunk in chunks:
            known, end = self._tokens(chunk.request), chunk.start + chunk.num_tokens
            assert (chunk.restores is not None) == (chunk.is_new and chunk.start > 0)
            if chunk.restores is not None:
                read[chunk.restores] += 1
                held = self._snapshots[chunk.restores]
                assert held == known[: chunk.start], f"snapshot {chunk.restores} is another's"
            assert len(chunk.saves) <= MAX_SAVES
            for position, place in chunk.saves:
                assert chunk.start < position <= end
                assert position % self.limits.snapshot_tokens == 0
                assert 0 <= place < self.limits.num_snapshots
                assert place not in written, f"two write snapshot {place}"
                written[place] = known[:position]
        for chunk in chunks:
            for _, place in chunk.saves:  # a row itself reads before it writes
                is_own = place == chunk.restores
                assert read[place] == is_own, f"snapshot {place} is read and written at once"
        self._snapshots |= written

    def _write(self, slot: int, start: int, count: int) -> None:
        """Checks what a row reads, and writes the KV of `count` tokens."""
        row = self._rows[slot]
        known, size = self._tokens(row.request), self.limits.page_size
        row.num_written = start + count
        if start >= len(known):
            return  # it has stopped: an idle row reads nothing and writes nothing that is read
        end = min(start + count, len(known))
        digests = [0]
        for index in range(end // size):
            digests.append(hash((digests[-1], known[index * size : (index + 1) * size])))
        for table, window in zip(row.tables, self._needs.windows, strict=True):
            for index in range(self._needs.first_seen(window, start), -(-start // size)):
                number = table[index]
                page = self._device_kv.get(number)
                held = known[index * size : min(start, (index + 1) * size)]
                assert number, f"entry {index} of a block table was given back"
                assert page is not None, f"page {number} holds nothing"
                assert page.digest == digests[index], f"page {number} follows another prefix"
                assert tuple(page.tokens[: len(held)]) == held, f"page {number} is another's"
                self._read.append((number, slot))
            for position in range(start, end):
                index, offset = divmod(position, size)
                number = table[index]
                assert number, f"entry {index} of a block table has no page"
                if offset == 0:
                    self._device_kv[number] = _Page(digests[index])
                assert self._written.setdefault(number, slot) == slot, f"two write page {number}"
                page = self._device_kv[number]
                del page.tokens[offset:]
                page.tokens.append(known[position])

    def _tokens(self, request: Request) -> tuple[int, ...]:
        known = self._known.get(request.request_id)
        if known is None:
            outputs = self._outputs.get(request.request_id)
            said = request.output_token_ids if outputs is None else outputs.tolist()
            known = (*request.prompt_token_ids, *said)
            self._known[request.request_id] = known
        return known

    def _check_budgets(self, plan: StepPlan) -> None:
        limits = self.limits
        assert plan.step_id > self._last_step_id
        self._last_step_id = plan.step_id
        rows = [*plan.decode_rows, *plan.prefill_rows]
        assert rows or plan.copy_outs or plan.copy_ins, "an empty plan"
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(rows) <= limits.max_num_seqs
        assert len(plan.prefill_rows) <= limits.max_prefill_rows
        assert len({row.slot for row in rows}) == len(rows), "one slot twice"
        assert len({row.request.request_id for row in rows}) == len(rows), "one request twice"
        assert all(0 <= row.slot < limits.max_num_seqs for row in rows)
        assert 1 <= plan.num_steps <= limits.max_num_steps
        assert plan.num_steps == 1 or not plan.prefill_rows
        for row in plan.decode_rows:
            assert 1 <= row.max_new_tokens <= plan.num_steps
            assert row.start + row.max_new_tokens < limits.max_model_len
        for chunk in plan.prefill_rows:
            assert chunk.num_tokens >= 1
