"""Sequences of models with windows come, advance, share and go: what a query sees is always there,
and what it does not see is given back.

The test keeps its own picture of what each page holds: a group, a salt and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.page_needs import NEVER
from octavo.engine.kv.sequence_pages import SequencePages
from tests.engine.made_requests import make_request

WINDOWS = [(None,), (5,), (None, 6), (None, None, 3), (None, 9, 9, 9, 9, 9), (7, 2)]


@dataclass(eq=False)
class Sequence:
    """A live sequence: `position` is that of its next query, `known` how many tokens it has."""

    pages: SequencePages
    position: int
    known: int
    gives_back_at: int = NEVER


class GroupsMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(8, 60),
        run_pages=st.sampled_from([1, 3]),
        windows=st.sampled_from(WINDOWS),
        chunk=st.integers(1, 6),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        run_pages: int,
        windows: tuple[int | None, ...],
        chunk: int,
    ) -> None:
        self.chunk = chunk
        self.kv = KVManager(
            num_pages=num_pages,
            page_size=page_size,
            enable_prefix_caching=True,
            run_pages=run_pages,
            windows=windows,
            chunk_tokens=chunk,
        )
        self.live: list[Sequence] = []
        self.content: dict[int, tuple[int, str, list[int]]] = {}
        self.num_opened = 0

    @rule(length=st.integers(1, 24), fork=st.integers(0, 24), salt=st.sampled_from(["", "", "s"]))
    def admit(self, length: int, fork: int, salt: str) -> None:
        tokens = [0] * min(length, fork) + [1] * max(0, length - fork)
        request = make_request(str(self.num_opened), tokens, 1, cache_salt=salt)
        self.num_opened += 1
        kv = self.kv
        pages = kv.open(request)
        matched = kv.lookup.match(pages)
        needed, available = kv.num_pages_to_take(matched, length), kv.num_available
        assert needed <= kv.needs.to_compute(length)
        if needed > available:
            return
        kv.admit(pages, matched, length)
        assert kv.num_available == available - needed
        assert pages.num_held <= kv.needs.to_compute(length)
        sequence = Sequence(pages, len(matched) * kv.page_size, length)
        assert sequence.position < length
        assert pages.num_filled * kv.page_size >= min(length, sequence.position + self.chunk)
        self.live.append(sequence)
        self.check_seen(sequence)

    def check_seen(self, sequence: Sequence) -> None:
        """What the next query sees is there, and holds what it should."""
        kv, pages = self.kv, sequence.pages
        size, tokens = kv.page_size, pages.request.all_token_ids
        for group, (window, table) in enumerate(zip(kv.needs.windows, pages.tables, strict=True)):
            start = 0 if window is None else max(0, sequence.position - window + 1)
            for index in range(start // size, -(-sequence.position // size)):
                held = tokens[: min((index + 1) * size, sequence.position)]
                found = self.content[table[index]]
                assert found[:2] == (group, pages.request.cache_salt)
                assert found[2][: len(held)] == held

    def write(self, sequence: Sequence, end: int) -> None:
        """Computes tokens up to `end`, and lets go of what no query from there on sees."""
        kv, pages = self.kv, sequence.pages
        size, tokens = kv.page_size, pages.request.all_token_ids
        for group, table in enumerate(pages.tables):
            for index in range(sequence.position // size, -(-end // size)):
                page = table[index]
                assert kv.pool.num_references(page) == 1
                self.content[page] = (
                    group,
                    pages.request.cache_salt,
                    tokens[: min(end, (index + 1) * size)],
                )
        sequence.position = end
        due = sequence.gives_back_at
        before = pages.num_held
        sequence.gives_back_at = kv.give_back(pages, end)
        assert end < due or pages.num_held < before, "it was said that there is something"
        assert sequence.gives_back_at > end

    def can(self, is_computed: bool) -> list[Sequence]:
        return [each for each in self.live if (each.position == each.known) == is_computed]

    @precondition(lambda self: hasattr(self, "live") and self.can(is_computed=False))
    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.can(is_computed=False)))
        kv, pages = self.kv, sequence.pages
        room = kv.reach_ahead(pages, sequence.known)
        end = min(sequence.known, sequence.position + min(count, self.chunk), room)
        if end <= sequence.position:  # others hold what it gave back
            assert len(self.live) > 1
            self.release(sequence)
            return
        self.check_seen(sequence)
        self.write(sequence, end)
        kv.reach_ahead(pages, sequence.known)
        assert pages.num_held <= kv.needs.to_compute(sequence.known)

    @precondition(lambda self: hasattr(self, "live") and self.can(is_computed=True))
    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 5))
    def decode(self, data: st.DataObject, token: int, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.can(is_computed=True)))
        kv, pages = self.kv, sequence.pages
        end = sequence.position + count
        num_new = max(0, kv.needs.num_positions(end) - len(pages.page_ids))
        if num_new * kv.needs.num_groups > kv.num_available:
            return
        new = kv.grow(pages, end)
        assert len(new) == num_new * kv.needs.num_groups
        pages.request.output_token_ids += [token] * count
        self.check_seen(sequence)
        self.write(sequence, end)
        sequence.known = end

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), share=st.floats(0, 1))
    def commit(self, data: st.DataObject, share: float) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.kv.register_full_pages(sequence.pages, int(share * sequence.position))

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(self.live)))

    def release(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.kv.register_full_pages(sequence.pages, sequence.position)
        self.kv.release(sequence.pages)
        assert sequence.pages.num_held == 0

    @rule()
    def forget(self) -> None:
        self.kv.forget_prefixes()
        assert self.kv.pool.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "kv"):
            return
        kv = self.kv
        kv.check_integrity([each.pages for each in self.live])
        for each in self.live:
            for window, first in zip(kv.needs.windows, each.pages.first, strict=True):
                assert first <= kv.needs.first_seen(window, each.position)
                if each.position:
                    assert first == kv.needs.first_seen(window, each.position)
        for page, (group, salt, tokens) in self.content.items():
            if page in kv.cache:
                name = kv.cache.hash_of(page)
                assert len(name) == 16 + bool(group), (group, salt, tokens)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for each in self.live:
                self.kv.release(each.pages)
            self.kv.check_integrity([])
            assert self.kv.num_available == self.kv.pool.num_usable


GroupsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheGroups = GroupsMachine.TestCase
