"""The pages of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.kv.held_prefixes import PrefixRun
from octavo.engine.kv.page_hash import PageHash, group_names, page_hashes
from octavo.engine.kv.page_needs import PageNeeds
from octavo.engine.kv.page_pool import TRASH_PAGE
from octavo.engine.request import Request


@dataclass(slots=True, kw_only=True, eq=False)
class SequencePages:
    """What the KV manager knows of one live request; only the manager changes it.

    Attributes:
        request: whose tokens the pages hold.
        root: parent of the first page's hash.
        page_size: tokens in a page.
        reads_cache: whether pages of others may stand for its own first ones.
        num_groups: cache groups.
        tables: by cache group, its pages in order; empty while it has none. A group with a window
            has the trash page in place of those that were given back, and no page yet for what is
            far ahead of the chunk at hand.
        first: by group, the index of the first page that it holds.
        runs: by group, what of its pages was found when it was given them, and is held for others,
            too; None if nothing was, and for groups with a window, which hold each page by itself.
        keys: by group, names of its first full pages, as far as they were needed. They outlive the
            pages: tokens never change.
        num_registered: its first pages that have been offered to the prefix cache.
        arriving: those of its pages that a transfer is filling.
        host_pages: by group, its pages in the host tier, while it is swapped out; else empty.
        num_host_tokens: positions whose KV they hold, as far as it is seen from there on.
        is_on_host: whether they can be read: the copy out has ended.
        diverges_at: pages that were found when it was admitted, of those with a snapshot or not; 0
            if nothing goes on behind them.
        saves: places of snapshots that its steps write, by how many pages they stand for, until
            these are committed.
        follows: the page hash of the snapshot that it began with or left last; empty for none.
    """

    request: Request
    root: PageHash
    page_size: int
    reads_cache: bool
    num_groups: int = 1
    tables: tuple[list[int], ...] = field(init=False)
    first: list[int] = field(init=False)
    runs: list[PrefixRun | None] = field(init=False)
    keys: tuple[list[PageHash], ...] = field(init=False)
    num_registered: int = 0
    arriving: tuple[int, ...] = ()
    host_pages: tuple[list[int], ...] = ()
    num_host_tokens: int = 0
    is_on_host: bool = False
    diverges_at: int = 0
    saves: dict[int, int] = field(default_factory=dict)
    follows: PageHash = b""
    hashes: list[PageHash] = field(init=False)
    page_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tables = tuple([] for _ in range(self.num_groups))
        self.first = [0] * self.num_groups
        self.runs = [None] * self.num_groups
        self.keys = tuple([] for _ in range(self.num_groups))
        self.hashes = self.keys[0]  # of all groups' pages, but for a byte
        self.page_ids = self.tables[0]

    @property
    def num_filled(self) -> int:
        """Entries that all its tables have."""
        return min(map(len, self.tables))

    @property
    def num_held(self) -> int:
        """Pages that it holds, of all groups together."""
        return sum(map(len, self.tables)) - sum(self.first)

    @property
    def alone_from(self) -> list[int]:
        """By group, the index of the first page that it holds by itself, and not in a run."""
        return [
            first if run is None else len(run.page_ids)
            for first, run in zip(self.first, self.runs, strict=True)
        ]

    @property
    def num_host_pages(self) -> int:
        """Pages that it has in the host tier."""
        return sum(map(len, self.host_pages))

    def all_tables(self) -> tuple[int, ...]:
        """One table after the other, as many entries of each: 0 where it has none."""
        if len(self.tables) == 1:
            return tuple(self.page_ids)
        most = max(map(len, self.tables))
        return tuple(page for table in self.tables for page in (*table, *[0] * (most - len(table))))

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens from position `start` to `end` - 1."""
        prompt = self.request.prompt_token_ids
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        output = self.request.output_token_ids
        return prompt[start:] + output[max(0, start - num_prompt) : end - num_prompt]

    def name(self, num_pages: int) -> None:
        """Names its first full pages in all groups, as far as that was not done yet."""
        num_named, size = len(self.hashes), self.page_size
        if num_named < num_pages:
            parent = self.hashes[-1] if self.hashes else self.root
            new = page_hashes(parent, self.tokens(num_named * size, num_pages * size), size)
            for group, keys in enumerate(self.keys):
                keys.extend(group_names(new, group))

    def check_integrity(self, needs: PageNeeds) -> None:
        """Asserts that its tables are of one length, but for windows that are not there yet, and
        hold each page once and the trash page only where pages were given back."""
        by_group = zip(self.tables, self.first, strict=True)
        own = [page for table, first in by_group for page in table[first:]]
        assert len(set(own)) == len(own) == self.num_held
        length = max(map(len, self.tables))
        for table, first, window in zip(self.tables, self.first, needs.windows, strict=True):
            assert table[:first] == [TRASH_PAGE] * first
            assert window is not None or (first == 0 and len(table) == length)
