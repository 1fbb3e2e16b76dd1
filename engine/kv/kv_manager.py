"""Pages for sequences: allocation, sharing by prefix, release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from octavo.engine.kv.held_prefixes import HeldPrefixes, PrefixRun
from octavo.engine.kv.host_tier import HostTier
from octavo.engine.kv.page_hash import PageHash, page_hashes, root_hash
from octavo.engine.kv.page_pool import TRASH_PAGE, PagePool
from octavo.engine.kv.page_watch import PageWatch
from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.kv.prefix_lookup import PrefixLookup
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import Request


class KVManager:
    """The one owner of the page pool and the prefix cache.

    A full page becomes findable when the step that wrote its last token was committed, and stays
    findable after its sequence let go of it until the page is needed for something else.

    Args:
        num_pages: pages in the pool, the trash page included.
        page_size: tokens in a page.
        enable_prefix_caching: whether full pages are shared and kept.
        num_host_pages: pages of the host tier; 0 for none.
        run_pages: a sequence that grows page by page is kept up to so many in a row, where a device
            reads pages faster that follow each other. They are free until it takes them; to find
            them, pages of the prefix cache are evicted that much earlier.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool,
        num_host_pages: int = 0,
        run_pages: int = 1,
    ) -> None:
        self.run_pages = run_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = PagePool(num_pages, page_size)
        self.watch = PageWatch()
        self.cache = PrefixCache(num_pages, self.watch)
        self._prefixes = HeldPrefixes(self.pool, self.cache)
        self.host = HostTier(num_host_pages, self.watch)
        self.lookup = PrefixLookup(self.cache, self.host, page_size)
        self._evicted: list[tuple[int, PageHash]] = []

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """Share of the pool that live sequences hold, 0 to 1."""
        return self.pool.num_owned / self.pool.num_usable

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def open(self, request: Request) -> SequencePages:
        """An empty set of pages for `request`.

        The prompt's pages are hashed now, and never while a step is planned.
        """
        pages = SequencePages(
            request=request,
            root=root_hash(request.tenant, request.cache_salt),
            reads_cache=(
                self.enable_prefix_caching and request.sampling_params.prompt_logprobs is None
            ),
        )
        if self.enable_prefix_caching:
            self._extend_hashes(pages, request.num_prompt_tokens // self.page_size)
        return pages

    def match_prefix(self, pages: SequencePages, num_tokens: int | None = None) -> PrefixRun:
        """The cached pages that the request's known tokens begin with; nothing is taken.

        At least the last known token is left to compute. A request that wants its prompt's
        log-probabilities computes every token.

        Args:
            num_tokens: how many tokens are known, if whoever asks knows that already.
        """
        if num_tokens is None:
            num_tokens = pages.request.num_tokens
        num_pages = (num_tokens - 1) // self.page_size if pages.reads_cache else 0
        if len(pages.hashes) < num_pages:
            self._extend_hashes(pages, num_pages)
        return self._prefixes.match(pages.hashes, num_pages)

    def hash_known(self, pages: SequencePages) -> None:
        """Hashes the full pages of the request's known tokens, as far as that was not done yet."""
        if self.enable_prefix_caching:
            self._extend_hashes(pages, pages.request.num_tokens // self.page_size)

    def num_cached_tokens(
        self, token_ids: Sequence[int], *, tenant: str = "", cache_salt: str = ""
    ) -> int:
        """Tokens of a prompt that the device's prefix cache holds now; only reads."""
        if not self.enable_prefix_caching:
            return 0
        num_tokens = (len(token_ids) - 1) // self.page_size * self.page_size
        root = root_hash(tenant, cache_salt)
        hashes = page_hashes(root, token_ids[:num_tokens], self.page_size)
        return self.cache.num_matching(hashes) * self.page_size

    def match_host(self, pages: SequencePages, num_matched: int) -> list[int]:
        """Host pages that go on where the first `num_matched` pages found on the device end.

        Asked right after `match_prefix`; empty unless bringing them back is the cheaper way.
        """
        if not self.host.num_cached or not pages.reads_cache:
            return []
        num_pages = (pages.request.num_tokens - 1) // self.page_size
        return self.host.longest_match(islice(pages.hashes, num_matched, num_pages))

    def take_evicted(self) -> list[tuple[int, PageHash]]:
        """Prefix pages evicted since the last call, and what they hold until they are written."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def count_query(self, pages: SequencePages, num_tokens: int, num_hit_tokens: int) -> None:
        """Counts a sequence's look-up once, when it is first admitted."""
        if pages.reads_cache:
            self.cache.num_queried_tokens += num_tokens
            self.cache.num_hit_tokens += num_hit_tokens

    def num_pages_to_take(self, matched: PrefixRun, num_tokens: int) -> int:
        """Available pages that `admit` would use: new ones, and matched ones nobody holds now."""
        num_pages = -(-num_tokens // self.page_size)
        return num_pages - self._prefixes.num_held(matched) if matched.page_ids else num_pages

    def admit(self, pages: SequencePages, matched: PrefixRun, num_tokens: int) -> None:
        """Gives a sequence without pages the matched ones and new ones for `num_tokens` in all.

        `num_pages_to_take` of them must be available.
        """
        assert not pages.page_ids, pages.request.request_id
        num_new = -(-num_tokens // self.page_size)
        page_ids = matched.page_ids
        if page_ids:
            pages.prefix = self._prefixes.hold(matched)
            pages.page_ids += page_ids
            num_new -= len(page_ids)
        pages.num_registered = len(page_ids)
        pages.page_ids += self._allocate(num_new)

    def grow(self, pages: SequencePages, num_tokens: int) -> list[int]:
        """Adds pages until the sequence has room for `num_tokens`; they must be available.

        Returns:
            The pages added.
        """
        num_new = -(-num_tokens // self.page_size) - len(pages.page_ids)
        if num_new <= 0:
            return []
        if num_new == 1 and self.run_pages > 1 and pages.page_ids:
            new = self.take_after(pages.page_ids[-1:])
        else:
            if pages.page_ids:
                self.pool.give_up_run(pages.page_ids[-1])  # to be taken now
            new = self._allocate(num_new)
        pages.page_ids += new
        return new

    def _allocate(self, num_pages: int) -> list[int]:
        """Takes pages for one sequence: cached ones as far as there are not enough free ones."""
        num_lacking = num_pages - self.pool.num_free
        if num_lacking <= 0:
            return self.pool.allocate(num_pages)
        pages = self._evict(num_lacking)
        pages.reverse()
        if num_pages > num_lacking:
            pages += self.pool.allocate(num_pages - num_lacking)
        return pages

    def take(self, num_pages: int) -> list[int]:
        """Pages for as many sequences, one each, which must be available.

        Whoever asks adds them to the sequences' `page_ids`. They are those that `grow` would add
        if it were called for one sequence after the other.
        """
        pool = self.pool
        num_free = pool.num_free
        new = pool.allocate(min(num_pages, num_free)) if num_free else []
        if num_pages > num_free:
            new += self._evict(num_pages - num_free)
        return new

    def take_after(self, last_pages: list[int]) -> list[int]:
        """As `take`, for the sequences with these last pages: each the one that follows, if it is
        kept for it, and else the first of `run_pages` in a row as far as there are."""
        pool, run = self.pool, self.run_pages
        if pool.num_cached:
            num_lacking = pool.num_without_run(last_pages) * run - pool.num_not_kept
            if num_lacking > 0:
                pool.reclaim(self._give_up(min(num_lacking, pool.num_cached)))
        return pool.allocate_each(last_pages, run)

    def _evict(self, num_pages: int) -> list[int]:
        """Makes cached pages owned ones, those unreferenced for longest first."""
        pages = self._give_up(num_pages)
        self.pool.take_over(pages)
        return pages

    def _give_up(self, num_pages: int) -> list[int]:
        """The cache's pages that were unreferenced for longest, which it forgets.

        What they hold is remembered if there is a host tier to keep it.
        """
        cache = self.cache
        if self.host.num_pages:
            self._evicted += [
                (page, cache.hash_of(page)) for page in cache.next_to_evict(num_pages)
            ]
        return cache.evict(num_pages)

    def flush(self) -> None:
        """Enters in the books which pages were taken and given up: nobody need wait for it."""
        self.pool.flush()
        self.cache.flush()

    def register_full_pages(self, pages: SequencePages, num_committed: int) -> None:
        """Makes findable the pages that the first `num_committed` tokens fill."""
        num_full = num_committed // self.page_size
        if num_full <= pages.num_registered or not self.enable_prefix_caching:
            return
        self._extend_hashes(pages, num_full)
        new = slice(pages.num_registered, num_full)
        self.cache.register_all(pages.hashes[new], pages.page_ids[new])
        pages.num_registered = num_full

    def release(self, pages: SequencePages) -> None:
        """Takes every page from the sequence; registered ones stay cached.

        The end of a prefix is put up for eviction before its beginning.
        """
        prefix, page_ids = pages.prefix, pages.page_ids
        if page_ids:
            self.pool.give_up_run(page_ids[-1])
        num_own = len(page_ids) if prefix is None else len(page_ids) - len(prefix.page_ids)
        owned: Iterable[int] = islice(reversed(page_ids), num_own)
        if pages.arriving:
            # They are nobody's until their transfer ends, which frees them.
            owned = [page for page in owned if page not in pages.arriving]
            pages.arriving = ()
        self.cache.mark_unreferenced(self.pool.release(owned, self.cache.contents))
        if prefix is not None:
            self._prefixes.release(prefix)
            pages.prefix = None
        pages.page_ids.clear()
        pages.num_registered = 0

    def drop_host_copy(self, pages: SequencePages) -> None:
        """Frees what the host holds of a sequence, unless it is still being copied there."""
        if pages.is_on_host:
            self.host.release(pages.host_pages)
            pages.host_pages, pages.is_on_host = [], False

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: what the pages hold can no longer be trusted."""
        self._prefixes.forget()
        self.pool.reclaim(self.cache.forget_all())

    def check_integrity(
        self, live: Iterable[SequencePages], host_in_transfer: Iterable[int] = ()
    ) -> None:
        """Asserts that pool, cache, host tier and the pages of all live sequences agree.

        Args:
            host_in_transfer: host pages that belong to a transfer and no sequence.
        """
        self.pool.check_integrity()
        live = list(live)
        self.host.check_integrity(
            [*host_in_transfer, *(page for pages in live for page in pages.host_pages)]
        )
        prefixes = [pages.prefix for pages in live if pages.prefix is not None]
        held = self._prefixes.check_integrity(prefixes)
        for pages in live:
            num_shared = 0 if pages.prefix is None else len(pages.prefix)
            held.update(page for page in pages.page_ids[num_shared:] if page not in pages.arriving)
        assert TRASH_PAGE not in held
        assert len(held) == self.pool.num_owned, (len(held), self.pool.num_owned)
        for page, count in held.items():
            assert self.pool.num_references(page) == count, page
        cached = [page for page in range(self.pool.num_pages) if self.pool.is_cached(page)]
        self.cache.check_integrity(cached)
        for pages in live:
            assert len(set(pages.page_ids)) == len(pages.page_ids)
            for page in pages.page_ids[pages.num_registered :]:
                assert held[page] == (page not in pages.arriving), (
                    f"page {page} may be written and has {held[page]} owners"
                )

    def _extend_hashes(self, pages: SequencePages, num_pages: int) -> None:
        hashes, size = pages.hashes, self.page_size
        num_hashed = len(hashes)
        if num_hashed < num_pages:
            parent = hashes[-1] if hashes else pages.root
            tokens = pages.tokens(num_hashed * size, num_pages * size)
            hashes.extend(page_hashes(parent, tokens, size))
