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
        page_ids: its pages in order; empty while it has none.
        prefix: what of them was found when it was given them, and is held for others, too.
        hashes: hashes of its first full pages, as far as they were needed. They outlive the
            pages: tokens never change.
        num_registered: its first pages that have been offered to the prefix cache.
        arriving: those of its pages that a transfer is filling.
        host_pages: its pages in the host tier, while it is swapped out.
        num_host_tokens: positions whose KV they hold.
        is_on_host: whether they can be read: the copy out has ended.
    """

    request: Request
    root: PageHash
    reads_cache: bool
    page_ids: list[int] = field(default_factory=list)
    prefix: PrefixRun | None = None
    hashes: list[PageHash] = field(default_factory=list)
    num_registered: int = 0
    arriving: tuple[int, ...] = ()
    host_pages: list[int] = field(default_factory=list)
    num_host_tokens: int = 0
    is_on_host: bool = False

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens from position `start` to `end` - 1."""
        prompt = self.request.prompt_token_ids
        num_prompt = len(prompt)
        if end <= num_prompt:
            return prompt[start:end]
        output = self.request.output_token_ids
        return prompt[start:] + output[max(0, start - num_prompt) : end - num_prompt]
