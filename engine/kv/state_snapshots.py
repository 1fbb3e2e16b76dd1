"""Snapshots of recurrent states, by the prefix that they stand for.

Pages alone restore no recurrent state: a sequence goes on from cached pages only where there is a
snapshot of the state after them, too. A sequence leaves two of them, which are the ones that others
are likely to begin with: at the end of its prompt, and where its prompt leaves what the cache holds
pages of without a snapshot, as there begin sequences that share no more than that. A prompt that
goes on where another sequence ended leaves nothing: it is the next turn.

A snapshot has a place on the device, which is

- free, or
- taken by a live sequence, one of whose steps writes it, until that step was committed, or
- findable by the hash of its last page, until the place is needed for another.

Steps run in the order of their plans: a place that a later plan gives away is written after all
that earlier ones read of it. Within a plan, what one row reads no other may write (`flush` ends
that), but what it alone reads it may itself.

Which one is given away first: one that is *passed*. Its sequence left a later one, and no other
sequence is known to go on from it, as of most turns of a conversation. Of equals, the one that was
not used for longest.

Source: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, for which
states are worth their room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.sequence_pages import SequencePages

NONE: PageHash = b""
"""No snapshot's."""

ENDS_PER_PLACE = 16
"""Ends of sequences that are remembered, for each place."""

DEFAULT_BYTES = 1 << 30
"""Of snapshots, unless more are asked for or a quarter of the rows takes more: the same on every
host."""


def default_num_places(num_rows: int, state_bytes: int) -> int:
    """Places where no number is asked for: as many as rows where they are cheap, else a quarter.

    Args:
        num_rows: that run at once, 1 or more; or 0, for none.
        state_bytes: of one snapshot.
    """
    return min(num_rows, max(1, num_rows // 4, DEFAULT_BYTES // state_bytes))


@dataclass(slots=True)
class _Snapshot:
    """A findable one.

    Attributes:
        place: where it is.
        num_followers: sequences that are known to go on from it, without the one that left it.
        is_passed: whether that one follower left a later one.
    """

    place: int
    num_followers: int
    is_passed: bool = False


class StateSnapshots:
    """The one owner of the places.

    Args:
        num_places: how many there are.
        num_pages: snapshots are taken at multiples of so many pages.
        page_size: tokens in a page.
    """

    def __init__(self, num_places: int, num_pages: int, page_size: int = 1) -> None:
        self.num_places = num_places
        self.num_pages = num_pages
        self._page_size = page_size
        self._free = list(range(num_places - 1, -1, -1))
        # The one that was not used for longest comes first.
        self._found: dict[PageHash, _Snapshot] = {}
        self._read: dict[PageHash, object] = {}  # in the plan at hand, by whom last
        self._ends: dict[PageHash, None] = {}  # the latest comes last

    def __contains__(self, page_hash: PageHash) -> bool:
        return page_hash in self._found

    def longest(self, hashes: Sequence[PageHash], num_pages: int) -> int:
        """Pages of the longest prefix, of up to `num_pages` with these contents, that has one."""
        step = self.num_pages
        for end in range(num_pages // step * step, 0, -step):
            if hashes[end - 1] in self._found:
                return end
        return 0

    # A sequence's life.

    def admit(self, pages: SequencePages, num_found: int) -> None:
        """A sequence is given its pages.

        Args:
            num_found: pages of it that the cache holds, with a snapshot behind them or not.
        """
        pages.diverges_at, pages.follows = num_found, NONE
        if num_found and self.goes_on(pages.hashes[num_found - 1]):
            pages.diverges_at = 0

    def restored(self, pages: SequencePages, position: int) -> int | None:
        """The snapshot that the first chunk of a sequence begins with; None at position 0, where
        it begins with nothing."""
        if position == 0:
            return None
        pages.follows = pages.hashes[position // self._page_size - 1]
        return self.read(pages.follows, pages)

    def saved(
        self, pages: SequencePages, start: int, end: int, last: int
    ) -> tuple[tuple[int, int], ...]:
        """Positions at which a chunk leaves snapshots, and the places taken for them.

        Args:
            start, end: the chunk's positions.
            last: where the known tokens end.
        """
        size, step = self._page_size, self.num_pages
        taken = []
        for num_pages in {each // step * step for each in (last // size, pages.diverges_at)}:
            if not start < num_pages * size <= end or num_pages > len(pages.hashes):
                continue
            if num_pages in pages.saves or pages.hashes[num_pages - 1] in self:
                continue
            place = self.take(pages.follows, pages)
            if place is not None:
                pages.saves[num_pages] = place
                taken.append((num_pages * size, place))
        return tuple(taken)

    def commit(self, pages: SequencePages, num_full: int) -> None:
        """Makes findable what the steps that filled a sequence's first pages have written."""
        branch = pages.diverges_at // self.num_pages * self.num_pages
        for num_pages in sorted(each for each in pages.saves if each <= num_full):
            pages.follows, place = pages.hashes[num_pages - 1], pages.saves.pop(num_pages)
            self.put(pages.follows, place, is_branch=num_pages == branch)

    def leave(self, pages: SequencePages) -> None:
        """A sequence gives its pages back: whatever is still written is of no use."""
        self.release(pages.saves.values())
        pages.saves.clear()
        if pages.num_registered:
            self.end(pages.hashes[pages.num_registered - 1])

    # Places.

    def read(self, page_hash: PageHash, reader: object = None) -> int:
        """The place of a snapshot that a sequence goes on from, in the plan at hand."""
        found = self._found[page_hash] = self._found.pop(page_hash)
        found.num_followers += 1
        found.is_passed = False
        self._read[page_hash] = reader
        return found.place

    def take(self, follows: PageHash = NONE, writer: object = None) -> int | None:
        """A place to be written; None if all others are read or taken.

        Args:
            follows: the snapshot that the sequence began with or left last, which it now passes.
            writer: the sequence, as `read` may know it.
        """
        own = None
        if follows in self._found and self._found[follows].num_followers <= 1:
            self._found[follows].is_passed = True
            own = follows if self._read.get(follows, self) is writer else None
        if self._free:
            return self._free.pop()
        unread = [each for each in self._found if each not in self._read or each == own]
        if not unread:
            return None
        gone = min(unread, key=lambda each: not self._found[each].is_passed)
        self._read.pop(gone, None)
        return self._found.pop(gone).place

    def put(self, page_hash: PageHash, place: int, *, is_branch: bool = False) -> None:
        """Makes a taken place findable: it was written. Of two that are equal one comes free.

        Args:
            is_branch: sequences are known to go on from there in different ways.
        """
        if page_hash in self._found:
            self._free.append(place)
        else:
            self._found[page_hash] = _Snapshot(place, 2 if is_branch else 0)

    def end(self, page_hash: PageHash) -> None:
        """A sequence ended, whose last full page this is."""
        self._ends.pop(page_hash, None)
        self._ends[page_hash] = None
        if len(self._ends) > ENDS_PER_PLACE * self.num_places:
            del self._ends[next(iter(self._ends))]

    def goes_on(self, page_hash: PageHash) -> bool:
        """Whether a sequence ended there, and no other went on from it before: asked once."""
        return self._ends.pop(page_hash, self) is None

    def release(self, places: Iterable[int]) -> None:
        """Frees taken places: whatever is written there will not be looked for."""
        self._free.extend(places)

    def flush(self) -> None:
        """The plan at hand was made: later ones may write what it reads."""
        self._read.clear()

    def forget(self) -> None:
        """Frees all findable ones: what they hold can no longer be trusted."""
        self._free.extend(found.place for found in self._found.values())
        self._found.clear()
        self._read.clear()
        self._ends.clear()

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Asserts that each place is free, findable or taken by one live sequence."""
        found = [each.place for each in self._found.values()]
        everywhere = [*self._free, *found, *taken]
        assert sorted(everywhere) == list(range(self.num_places)), everywhere
