"""Pages for sequences: allocation, sharing by prefix, release.

A sequence has a table of pages for each cache group (`octavo.models.cache_groups`). All groups take
pages of one pool, so that what one gives back another can use.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, groupby, islice, zip_longest

from octavo.engine.kv.cache_events import SHARED_ROOT, CacheEvents
from octavo.engine.kv.held_prefixes import HeldPrefixes
from octavo.engine.kv.host_tier import HostTier
from octavo.engine.kv.page_allocator import PageAllocator
from octavo.engine.kv.page_hash import root_hash
from octavo.engine.kv.page_needs import NEVER, PageNeeds, page_needs
from octavo.engine.kv.page_pool import TRASH_PAGE, PagePool
from octavo.engine.kv.page_watch import PageWatch
from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.kv.prefix_lookup import PrefixLookup, PrefixMatch
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.kv.state_snapshots import StateSnapshots
from octavo.engine.request import Request


class KVManager:
    """The one owner of the page pool and the prefix cache.

    A full page becomes findable when the step that wrote its last token was committed. It stays
    findable after its sequence has released it, until the page is needed for something else.

    A group with a window gives back the pages that no step will see which is still to be planned
    (`give_back`). Steps run in the order of their plans: a later step writes to such a page after
    all earlier steps have read it.

    Args:
        num_pages: pages in the pool, the trash page included.
        page_size: tokens in a page.
        enable_prefix_caching: whether full pages are shared and kept.
        num_host_pages: pages of the host tier; 0 for none.
        run_pages: a sequence that grows page by page has up to so many in a row kept for it, where
            a device reads pages faster that follow each other. They are free until it takes them;
            to find them, pages of the prefix cache are evicted that much earlier.
        windows, chunk_tokens: see `PageNeeds`.
        num_snapshots, snapshot_tokens: see `StepLimits`. 0 for a model without recurrent layers.

    Attributes:
        needs: how many pages so many tokens take.
        pool, cache, host: the device's pages, the prefixes that can be found, the host tier.
        allocator: takes pages for sequences.
        lookup: says how much of a sequence is cached; takes nothing.
        snapshots: of recurrent states; None without recurrent layers.
        watch: notified of pages that come and go.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool,
        num_host_pages: int = 0,
        run_pages: int = 1,
        windows: tuple[int | None, ...] = (None,),
        chunk_tokens: int = 1 << 30,
        num_snapshots: int = 0,
        snapshot_tokens: int = 1,
    ) -> None:
        self.page_size = page_size
        self.needs: PageNeeds = page_needs(page_size, windows, chunk_tokens)
        self._windows = [
            (group, window) for group, window in enumerate(windows) if window is not None
        ]
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = PagePool(num_pages, page_size)
        self.watch = PageWatch()
        self.cache = PrefixCache(num_pages, self.watch)
        self._prefixes = HeldPrefixes(self.pool, self.cache)
        self.host = HostTier(num_host_pages, self.watch)
        self.snapshots = (
            StateSnapshots(num_snapshots, snapshot_tokens // page_size, page_size)
            if num_snapshots
            else None
        )
        assert self.snapshots is None or self.needs.is_plain
        self.lookup = PrefixLookup(
            self._prefixes, self.cache, self.host, self.needs, self.snapshots
        )
        # Evicted prefixes are looked for on the host only where one group sees everything.
        self.allocator = PageAllocator(
            self.pool,
            self.cache,
            run_pages,
            remembers_evicted=num_host_pages > 0 and self.needs.is_plain,
        )

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now."""
        return self.pool.num_available

    def tell(self, events: CacheEvents) -> None:
        """Reports shared pages that come and go, from now on. There must be one group only, which
        sees everything: a page of a window says nothing of the prefix before it."""
        assert self.needs.is_plain
        self.cache.events = events

    @property
    def serves_each_page(self) -> bool:
        """Whether a sequence may go on behind any page, once it is computed: none is given back
        before, and there are no states to be restored."""
        return not self._windows and self.snapshots is None

    @property
    def has_windows(self) -> bool:
        """Whether any group gives back pages before its sequence ends."""
        return bool(self._windows)

    def open(self, request: Request) -> SequencePages:
        """An empty set of pages for `request`.

        The prompt's pages are hashed now, and never while a step is planned.
        """
        computes_all = request.sampling_params.prompt_logprobs is not None or (
            request.pooling is not None and request.pooling.needs_every_token
        )
        pages = SequencePages(
            request=request,
            root=root_hash(request.tenant, request.cache_salt),
            page_size=self.page_size,
            num_groups=self.needs.num_groups,
            reads_cache=self.enable_prefix_caching and not computes_all,
        )
        if self.enable_prefix_caching:
            pages.name(request.num_prompt_tokens // self.page_size)
        return pages

    def name_known(self, pages: SequencePages) -> None:
        """Names the full pages of the request's known tokens, as far as that was not done yet."""
        if self.enable_prefix_caching:
            pages.name(pages.request.num_tokens // self.page_size)

    def pages_at(self, pages: SequencePages, position: int) -> tuple[list[int], ...]:
        """By group, those of a sequence's pages with KV before a position that a query there sees,
        in order."""
        end, needs = self.needs.num_positions(position), self.needs
        return tuple(
            table[needs.first_seen(window, position) : end]
            for table, window in zip(pages.tables, needs.windows, strict=True)
        )

    def num_to_bring_back(self, pages: SequencePages, num_matched: int) -> int:
        """Of a swapped sequence's pages, those that the device lacks if it holds the first
        `num_matched` of each group that sees everything."""
        whole = pages.host_pages[: self.needs.num_whole]
        return pages.num_host_pages - sum(min(num_matched, len(held)) for held in whole)

    def count_query(self, pages: SequencePages, num_tokens: int, num_hit_tokens: int) -> None:
        """Counts a sequence's look-up once, when it is first admitted."""
        if pages.reads_cache:
            self.cache.num_queried_tokens += num_tokens
            self.cache.num_hit_tokens += num_hit_tokens

    def num_pages_to_take(self, matched: PrefixMatch, num_tokens: int) -> int:
        """Available pages that `admit` would use: new ones, and matched ones without a holder."""
        if self.needs.is_plain:
            num_pages, run = -(-num_tokens // self.page_size), matched.runs[0]
            return num_pages - self._prefixes.num_held(run) if run.page_ids else num_pages
        num_pages = sum(
            end - first for first, end in zip(*self._ranges(matched, num_tokens), strict=True)
        )
        num_pages -= sum(self._prefixes.num_held(run) for run in matched.runs)
        return num_pages - sum(self.pool.num_held(seen) for seen in matched.seen)

    def _ranges(self, matched: PrefixMatch, num_tokens: int) -> tuple[list[int], list[int]]:
        """By group, the indices of the pages that `admit` gives a sequence: the first, and the one
        after the last."""
        needs, end = self.needs, self.needs.num_positions(num_tokens)
        firsts = [needs.first_seen(window, matched.resumes_at) for window in needs.windows]
        ends = [
            end if window is None else min(end, first + needs.most_in(window, needs.chunk_tokens))
            for window, first in zip(needs.windows, firsts, strict=True)
        ]
        return firsts, ends

    def admit(self, pages: SequencePages, matched: PrefixMatch, num_tokens: int) -> None:
        """Gives a sequence without pages the matched ones and new ones for `num_tokens` in all; in
        a window, as many as its first chunk may need.

        `num_pages_to_take` of them must be available.
        """
        assert not pages.page_ids, pages.request.request_id
        firsts, ends = self._ranges(matched, num_tokens)
        # First all that is there: new pages may be taken from cached pages that have no holder.
        for group, run in enumerate(matched.runs):
            if run.page_ids:
                pages.runs[group] = self._prefixes.hold(run)
                pages.tables[group].extend(run.page_ids)
        for (group, _), seen in zip(self._windows, matched.seen, strict=True):
            pages.first[group] = firsts[group]
            pages.tables[group].extend([TRASH_PAGE] * firsts[group])
            pages.tables[group].extend(seen)
            self.cache.mark_referenced(self.pool.share(seen))
        pages.num_registered = matched.num_pages
        if self.snapshots is not None:
            self.snapshots.admit(pages, matched.num_found)
        for table, end in zip(pages.tables, ends, strict=True):
            table += self.allocator.allocate(end - len(table))

    def grow(self, pages: SequencePages, num_tokens: int) -> list[int]:
        """Adds pages until the sequence has room for `num_tokens` in each group; they must be
        available.

        Returns:
            The pages added, index by index of the block table, each group's in turn.
        """
        num_new = -(-num_tokens // self.page_size) - len(pages.page_ids)
        if num_new <= 0:
            return []
        if num_new == 1 and self.allocator.run_pages > 1 and pages.page_ids:
            new = self.allocator.take_after([table[-1] for table in pages.tables])
        else:
            if pages.page_ids:
                for table in pages.tables:
                    self.pool.give_up_run(table[-1])  # to be taken now
            new = self.allocator.allocate(num_new * self.needs.num_groups)
        for group, table in enumerate(pages.tables):
            table += new[group :: self.needs.num_groups]
        return new

    def give_back(self, pages: SequencePages, position: int) -> int:
        """Releases the pages that no query from a position on sees.

        Pages whose content has a name stay findable. No step may be planned any more that computes
        the sequence before that position.

        Returns:
            The position from which on there is something to give back again; `NEVER` if none.
        """
        needs, next_position = self.needs, NEVER
        for group, window in self._windows:
            table, old = pages.tables[group], pages.first[group]
            first = min(needs.first_seen(window, position), len(table))
            if first > old:
                start, end = max(old, pages.num_registered), min(first, len(pages.keys[group]))
                if start < end:
                    self.cache.register_all(pages.keys[group][start:end], table[start:end])
                gone = table[old:first]
                if first == len(table):
                    self.pool.give_up_run(gone[-1])
                self.cache.mark_unreferenced(self.pool.release(gone, self.cache.contents))
                table[old:first] = [TRASH_PAGE] * (first - old)
                pages.first[group] = first
            next_position = min(next_position, (first + 1) * self.page_size + window - 1)
        return next_position

    def reach_ahead(self, pages: SequencePages, num_tokens: int) -> int:
        """Gives a sequence whose known tokens are being computed pages for what comes next, as far
        as they are available.

        Args:
            num_tokens: how many tokens are known.

        Returns:
            Tokens that it has room for now.
        """
        end, needs = self.needs.num_positions(num_tokens), self.needs
        for group, window in self._windows:
            table = pages.tables[group]
            most = min(end, pages.first[group] + needs.most_in(window, needs.chunk_tokens))
            num_new = min(most - len(table), self.num_available)
            if num_new > 0:
                table += self.allocator.allocate(num_new)
        return pages.num_filled * self.page_size

    def flush(self) -> None:
        """Enters in the books which pages were taken and evicted. No plan waits for it."""
        self.pool.flush()
        self.cache.flush()
        if self.snapshots is not None:
            self.snapshots.flush()

    def register_full_pages(self, pages: SequencePages, num_committed: int) -> None:
        """Makes findable the pages that the first `num_committed` tokens fill, and snapshots."""
        num_full = num_committed // self.page_size
        if self.snapshots is not None:
            self.snapshots.commit(pages, num_full)
        if num_full <= pages.num_registered or not self.enable_prefix_caching:
            return
        pages.name(num_full)
        if self.cache.events is not None and pages.root == SHARED_ROOT:
            self._tell_stored(self.cache.events, pages, num_full)
        for table, first, keys in zip(pages.tables, pages.first, pages.keys, strict=True):
            new = slice(max(first, pages.num_registered), num_full)  # others were when given back
            self.cache.register_all(keys[new], table[new])
        pages.num_registered = num_full

    def _tell_stored(self, events: CacheEvents, pages: SequencePages, num_full: int) -> None:
        """Reports the pages that are about to be registered, but for contents that are there."""
        self.cache.flush()  # what was evicted goes before the same comes back
        hashes, size = pages.hashes, self.page_size
        new = range(pages.num_registered, num_full)
        for is_known, run in groupby(new, lambda index: self.cache.knows(hashes[index])):
            if not is_known:
                first, *others = run
                end = first + len(others) + 1
                parent = hashes[first - 1] if first else None
                events.stored(hashes[first:end], parent, pages.tokens(first * size, end * size))

    def release(self, pages: SequencePages) -> None:
        """Takes every page from the sequence; registered ones stay cached.

        The end of a prefix is put up for eviction before its beginning, in all groups alike.
        """
        by_group = [
            islice(reversed(table), len(table) - start)
            for table, start in zip(pages.tables, pages.alone_from, strict=True)
        ]
        owned: Iterable[int] = by_group[0]
        if len(by_group) > 1:
            in_turn = chain.from_iterable(zip_longest(*by_group))
            owned = [page for page in in_turn if page is not None]
        for table in pages.tables:
            if table:
                self.pool.give_up_run(table[-1])
        if pages.arriving:
            # They have no owner until their transfer ends, which frees them.
            owned = [page for page in owned if page not in pages.arriving]
            pages.arriving = ()
        self.cache.mark_unreferenced(self.pool.release(owned, self.cache.contents))
        if self.snapshots is not None:
            self.snapshots.leave(pages)
        for group, (run, table) in enumerate(zip(pages.runs, pages.tables, strict=True)):
            if run is not None:
                self._prefixes.release(run)
                pages.runs[group] = None
            table.clear()
            pages.first[group] = 0
        pages.num_registered = 0

    def drop_host_copy(self, pages: SequencePages) -> None:
        """Frees what the host holds of a sequence, unless it is still being copied there."""
        if pages.is_on_host:
            self.host.release(chain.from_iterable(pages.host_pages))
            self.forget_host_copy(pages)

    def forget_host_copy(self, pages: SequencePages) -> None:
        """The host holds nothing of a sequence any more; the caller sees to its pages there."""
        pages.host_pages, pages.num_host_tokens, pages.is_on_host = (), 0, False

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: what the pages hold can no longer be trusted."""
        self._prefixes.forget()
        if self.snapshots is not None:
            self.snapshots.forget()
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
        if self.snapshots is not None:
            self.snapshots.check_integrity(place for each in live for place in each.saves.values())
        self.host.check_integrity(
            [*host_in_transfer, *(page for each in live for page in chain(*each.host_pages))]
        )
        prefixes = [run for pages in live for run in pages.runs if run is not None]
        held = self._prefixes.check_integrity(prefixes)
        for pages in live:
            for table, start in zip(pages.tables, pages.alone_from, strict=True):
                held.update(page for page in table[start:] if page not in pages.arriving)
            pages.check_integrity(self.needs)
        assert TRASH_PAGE not in held
        assert len(held) == self.pool.num_owned, (len(held), self.pool.num_owned)
        for page, count in held.items():
            assert self.pool.num_references(page) == count, page
        cached = [page for page in range(self.pool.num_pages) if self.pool.is_cached(page)]
        self.cache.check_integrity(cached)
        for pages in live:
            for table, first in zip(pages.tables, pages.first, strict=True):
                for page in table[max(first, pages.num_registered) :]:
                    assert held[page] == (page not in pages.arriving), (
                        f"page {page} may be written and has {held[page]} owners"
                    )
