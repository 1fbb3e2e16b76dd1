"""Who computes which page before all others, by what the page will hold."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.scheduler.live_request import LiveRequest


class PageLeaders:
    """Running prompts and waiting requests, each under the first page that it is to compute.

    One look-up is enough to find who computes the next page that a request misses: whoever does has
    computed all before it, or holds them as the request does.

    Args:
        kv: owner of the pages; whoever watches a page hears that there is a request to compute it.
    """

    def __init__(self, kv: KVManager) -> None:
        self._serves_each_page = kv.serves_each_page
        self._watch = kv.watch
        self._lookup = kv.lookup
        self._page_size = kv.page_size
        self._by_page: dict[PageHash, dict[int, LiveRequest]] = {}

    def enter(self, entry: LiveRequest, page_hash: PageHash | None) -> bool:
        """Enters a request under a page, and nowhere else; None to take it out.

        Returns:
            Whether it was not there before.
        """
        old = entry.computes
        if old == page_hash:
            return False
        if old is not None:
            holders = self._by_page[old]
            del holders[entry.number]
            if not holders:
                del self._by_page[old]
        entry.computes = page_hash
        if page_hash is not None:
            self._by_page.setdefault(page_hash, {})[entry.number] = entry
            self._watch.note_to_others(page_hash, entry.number)  # it may lead them from now on
        return True

    def find(self, pages: SequencePages, index: int, rank: float) -> LiveRequest | None:
        """Who computes a page of a request before it does: a running prompt, or else whoever has
        waited longest.

        Args:
            rank: of those who wait, the ones with a smaller number come before the request.
        """
        found: LiveRequest | None = None
        for other in self._by_page.get(pages.hashes[index], {}).values():
            if other.pages is pages:
                continue
            if other.request.slot is not None:
                return other
            if other.number < rank and (found is None or other.number < found.number):
                found = other
        return found

    def end(self, leader: LiveRequest) -> int:
        """Pages of a leader that can be found once its prompt is computed."""
        if leader.request.slot is None:
            return self._lookup.num_full(leader.pages)
        return min(len(leader.pages.hashes), leader.prefill_end // self._page_size)

    def computed_twice(self, running: Iterable[LiveRequest]) -> list[PageHash]:
        """Pages that two running prompts compute at once, though the later one could have waited:
        it reads the cache, and waiting would not have made it late."""
        num_holders: dict[PageHash, int] = {}
        for entry in running:
            pages = entry.pages
            if not pages.reads_cache or entry.goes_alone or pages.arriving:
                continue  # what arrives is not computed
            first = max(pages.num_registered, entry.num_committed_tokens // self._page_size)
            for page_hash in pages.hashes[first : min(self.end(entry), self._lookup.most(pages))]:
                num_holders[page_hash] = num_holders.get(page_hash, 0) + 1
        return [page_hash for page_hash, count in num_holders.items() if count > 1]

    def check_integrity(self, live: Iterable[LiveRequest]) -> None:
        """Asserts that just the live requests are here, each under its page, and that none computes
        what another does."""
        expected: dict[PageHash, dict[int, LiveRequest]] = {}
        running: list[LiveRequest] = []
        for entry in live:
            if entry.computes is not None:
                expected.setdefault(entry.computes, {})[entry.number] = entry
            if entry.request.slot is not None:
                running.append(entry)
        assert self._by_page == expected
        # What a window saw may have gone by the time that it could be shared, and where there is no
        # snapshot of a state, pages are computed again.
        assert not self._serves_each_page or not self.computed_twice(running)
