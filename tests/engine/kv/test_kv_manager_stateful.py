"""Sequences come, grow, share and go: no page is lost, written by two, or found with other content.

The test keeps its own picture of what each page holds, by token.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.sequence_pages import SequencePages
from tests.engine.made_requests import make_request


class KVMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(2, 16),
        run_pages=st.sampled_from([1, 3]),
    )
    def start(self, page_size: int, num_pages: int, run_pages: int) -> None:
        self.kv = KVManager(
            num_pages=num_pages,
            page_size=page_size,
            enable_prefix_caching=True,
            run_pages=run_pages,
        )
        self.live: list[SequencePages] = []
        self.content: dict[int, tuple[str, list[int]]] = {}
        self.num_opened = 0

    @rule(length=st.integers(1, 24), fork=st.integers(0, 24), salt=st.sampled_from(["", "", "s"]))
    def open(self, length: int, fork: int, salt: str) -> None:
        tokens = [0] * min(length, fork) + [1] * max(0, length - fork)
        request = make_request(str(self.num_opened), tokens, 1, cache_salt=salt)
        self.num_opened += 1
        pages = self.kv.open(request)
        matched = self.kv.lookup.match(pages)
        available = self.kv.num_available
        needed = self.kv.num_pages_to_take(matched, length)
        if needed > available:
            return
        assert len(matched) * self.kv.page_size < length
        self.kv.admit(pages, matched, length)
        assert self.kv.num_available == available - needed
        assert len(pages.page_ids) == self.kv.needs.held(length)
        for index, page in enumerate(matched.page_ids):
            assert self.content[page] == (salt, tokens[: (index + 1) * self.kv.page_size])
        self._write(pages, len(matched) * self.kv.page_size)
        self.live.append(pages)

    def _write(self, pages: SequencePages, start: int) -> None:
        """Computes the known tokens from `start` on."""
        size, tokens = self.kv.page_size, pages.request.all_token_ids
        for index in range(start // size, self.kv.needs.held(len(tokens))):
            page = pages.page_ids[index]
            assert self.kv.pool.num_references(page) == 1
            self.content[page] = (pages.request.cache_salt, tokens[: (index + 1) * size])

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        pages = data.draw(st.sampled_from(self.live))
        start = pages.request.num_tokens
        if self.kv.needs.held(start + 1) - len(pages.page_ids) <= self.kv.num_available:
            self.kv.grow(pages, start + 1)
            pages.request.output_token_ids.append(token)
            self._write(pages, start)

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.live))
        self.kv.register_full_pages(pages, data.draw(st.integers(0, pages.request.num_tokens)))

    @precondition(lambda self: getattr(self, "live", None))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.live))
        self.live.remove(pages)
        self.kv.release(pages)
        assert pages.page_ids == []

    @rule()
    def forget(self) -> None:
        self.kv.forget_prefixes()
        assert self.kv.pool.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity(self.live)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for pages in self.live:
                self.kv.release(pages)
            self.kv.check_integrity([])
            assert self.kv.num_available == self.kv.pool.num_usable


TestKVManager = KVMachine.TestCase
