"""Gives prefix pages to other engines and takes theirs, while the engine serves.

Pages go by way of the host tier: out of the device as evicted prefixes go, into it as recalled ones
come. What arrives is a cached prefix like any other, used where that is priced below computing it,
and given up when the room is wanted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.engine.core import EngineCore
from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv_transfer.page_batch import PageBatch

PAGES_AT_ONCE = 64
"""Pages that are copied to the host together: the tier need not hold a whole prompt for it."""
BATCH_BYTES = 8 << 20
"""Of pages that one turn of the engine gives, where a page is not larger: a millisecond or two."""

logger = logging.getLogger(__name__)

Receiver = Callable[[PageBatch | None], None]
"""Takes batches one after the other; None is the end."""


@dataclass(slots=True)
class _Gift:
    """Pages that are wanted elsewhere.

    Attributes:
        receiver: where they go.
        wanted: names of pages that have not been looked at.
        ready: of those that the host has, or is about to have.
        copy: the copy to the host that they wait for.
    """

    receiver: Receiver
    wanted: deque[PageHash]
    ready: deque[PageHash] = field(default_factory=deque)
    copy: int | None = None


class PageTransfer:
    """One engine's side of page transfers. The engine's thread drives it.

    Args:
        core: whose pages.
        executor: holds them.
        model: what makes pages of two engines the same: model, weights, dtypes. Lazy: reading it
            may take a moment.

    Attributes:
        num_given, num_taken: pages, since the start.
    """

    def __init__(
        self, core: EngineCore, executor: DeviceExecutor, model: Callable[[], str]
    ) -> None:
        self._core = core
        self._executor = executor
        self._model = model
        self._layout: str | None = None
        self._gifts: list[_Gift] = []
        self.num_given = 0
        self.num_taken = 0

    @property
    def layout(self) -> str:
        """What pages are of, and how they lie; equal where two engines can exchange them."""
        if self._layout is None:
            tokens = self._core.scheduler.limits.page_size
            pages = self._executor.host_page_layout
            self._layout = f"{self._model()}, {tokens} tokens a page, {pages}"
        return self._layout

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has anything to do."""
        return bool(self._gifts)

    def give(self, names: Sequence[PageHash], receiver: Receiver) -> None:
        """Begins to give prefix pages away; `poll` goes on with it. This engine keeps them, too.

        Args:
            names: of the pages; those that cannot be found are left out.
            receiver: called by `poll`.
        """
        self._gifts.append(_Gift(receiver, deque(names)))

    def take(self, batch: PageBatch) -> int:
        """Takes pages that another engine gave.

        Returns:
            How many it lacked and had room for.

        Raises:
            InvalidRequestError: they are of another model, or damaged; names the field.
        """
        batch.check(self.layout, self._executor.page_bytes)
        taken = self._core.take_in(batch.names)
        contents = dict(zip(batch.names, batch.contents, strict=True))
        for name, page in taken.items():
            self._executor.write_host_page(page, contents[name])
        self.num_taken += len(taken)
        return len(taken)

    def poll(self) -> None:
        """Gives what is there: of each gift at most one batch."""
        for gift in list(self._gifts):
            try:
                is_done = self._advance(gift)
            except Exception:
                logger.exception("pages that are wanted elsewhere cannot be given")
                is_done = True
            if is_done:
                self._gifts.remove(gift)
                gift.receiver(None)

    def _advance(self, gift: _Gift) -> bool:
        """Gives a batch, if there is one; whether that was all."""
        if gift.copy is not None and self._core.scheduler.transfers.is_under_way(gift.copy):
            return False
        gift.copy = None
        if not gift.ready:
            for _ in range(min(PAGES_AT_ONCE, len(gift.wanted))):
                gift.ready.append(gift.wanted.popleft())
            gift.copy = self._core.bring_to_host(tuple(gift.ready)) if gift.ready else None
            if gift.copy is not None:
                return False
        names: list[PageHash] = []
        contents: list[bytes] = []
        most = max(1, BATCH_BYTES // self._executor.page_bytes)
        while gift.ready and len(names) < most:
            name = gift.ready.popleft()
            page = self._core.scheduler.transfers.host_page(name)
            if page is not None:  # else there was no room for it, or it was given up meanwhile
                names.append(name)
                contents.append(self._executor.read_host_page(page))
        if names:
            gift.receiver(PageBatch.of(self.layout, names, contents))
            self.num_given += len(names)
        return not (gift.ready or gift.wanted)
