"""What the caches of all groups hold of a sequence's beginning."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.kv.held_prefixes import PrefixRun


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a sequence that every group can serve. Nothing is taken.

    Good for `KVManager.admit` until a sequence releases its pages, or pages are given up.

    Attributes:
        runs: of each group that sees everything, its pages.
        seen: of each group with a window, in their order, those of its last pages that the next
            query sees.
        num_pages: how long the prefix is, in pages.
        resumes_at: the first position that is computed once the sequence is there: the end of the
            prefix, or what the host brings back.
        num_found: pages that were found, those counted that lie behind the last snapshot of a
            recurrent state.
    """

    runs: tuple[PrefixRun, ...]
    seen: tuple[list[int], ...]
    num_pages: int
    resumes_at: int
    num_found: int = 0

    def __len__(self) -> int:
        return self.num_pages

    @property
    def page_ids(self) -> list[int]:
        """The first group's pages."""
        return self.runs[0].page_ids if self.runs else self.seen[0]
