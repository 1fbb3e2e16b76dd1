"""The pages of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.kv.held_prefixes import PrefixRun
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.request import Request


@dataclass(slots=True, kw_only=True, eq=False)
class SequencePages:
    """What the KV manager knows of one live request; only the manager changes it.

    Attributes:
        request: whose tokens the pages hold.
        root: parent of the first page's hash.
        reads_cache: whether pages of others may stand for its own first ones.
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
    reads_cache: bool
    tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))
    first: list[int] = field(default_factory=lambda: [0])
    runs: list[PrefixRun | None] = field(default_factory=lambda: [None])
    keys: tuple[list[PageHash], ...] = field(default_factory=lambda: ([],))
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
        self.hashes = self.keys[0]  # of all groups' pages, but for a byte
        self.page_ids = self.tables[0]

    @classmethod
    def none_yet(
        cls, request: Request, root: PageHash, num_groups: int, *, reads_cache: bool
    ) -> SequencePages:
        """An empty set of pages."""
        return cls(
            request=request,
            root=root,
            reads_cache=reads_cache,
            tables=tuple([] for _ in range(num_groups)),
            first=[0] * num_groups,
            runs=[None] * num_groups,
            keys=tuple([] for _ in range(num_groups)),
        )

    @property
    def prefix(self) -> PrefixRun | None:
        """What of the first group's pages was found."""
        return self.runs[0]

    @property
    def num_filled(self) -> int:
        """Entries that all its tables have."""
        return min(map(len, self.tables))

    @property
    def num_held(self) -> int:
        """Pages that it holds, of all groups together."""
        return sum(map(len, self.tables)) - sum(self.first)

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
