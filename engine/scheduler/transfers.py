"""Page copies between device and host memory: begun by a plan, ended by a report.

Prefix pages go to other engines, and come from them, by way of the host tier.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.plan_builder import PlanBuilder
from octavo.engine.scheduler.step_plan import PageCopy

MAX_SPILLED_PAGES = 64
"""Evicted prefix pages that one plan copies to the host; more are forgotten."""


class _Kind(enum.Enum):
    SWAP_OUT = enum.auto()
    SPILL = enum.auto()
    SWAP_IN = enum.auto()
    RECALL = enum.auto()


@dataclass(slots=True, kw_only=True)
class _Transfer:
    """A copy on its way. `num_tokens`: positions that the sequence has KV for when it is done."""

    kind: _Kind
    copy: PageCopy
    begun_s: float
    entry: LiveRequest | None = None
    hashes: tuple[PageHash, ...] = ()
    num_tokens: int = 0


class Transfers:
    """Every copy that was planned and has not been reported to have ended.

    Pages that a copy fills have no other owner until it ends; pages that it reads on the host
    keep their content until then. Device pages that it reads are free at once: the device reads
    them before anything planned later writes to them.

    Args:
        kv: owner of pages on both sides.
        forecast: learns what copies took.
        builder: where copies are announced.
    """

    def __init__(self, kv: KVManager, forecast: Forecast, builder: PlanBuilder) -> None:
        self._kv = kv
        self._forecast = forecast
        self._builder = builder
        self._by_id: dict[int, _Transfer] = {}
        self._num_begun = 0
        self.num_pages_out = 0
        self.num_pages_in = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def carry_over(self, old: Transfers) -> None:
        """Goes on counting where another one ended; ends of its copies mean nothing here."""
        self._num_begun, self.num_failed = old._num_begun, old.num_failed
        self.num_pages_out, self.num_pages_in = old.num_pages_out, old.num_pages_in

    def swap_out(self, entry: LiveRequest, now_s: float) -> bool:
        """Begins to copy a running sequence's computed pages out, which it may lose then.

        Returns:
            False if the host tier has no room for them.
        """
        pages, num_tokens = entry.pages, entry.request.num_computed_tokens
        assert not pages.host_pages
        by_group = self._kv.pages_at(pages, num_tokens)
        device_pages = [*chain.from_iterable(by_group)]
        host_pages = self._kv.host.allocate(len(device_pages))
        if not device_pages or host_pages is None:
            return False
        in_order = iter(host_pages)
        pages.host_pages = tuple([*islice(in_order, len(part))] for part in by_group)
        pages.num_host_tokens, pages.is_on_host = num_tokens, False
        copy = self._begin(_Kind.SWAP_OUT, device_pages, host_pages, now_s, entry=entry)
        self._builder.copy_outs.append(copy)
        self.num_pages_out += len(host_pages)
        return True

    def spill(self, now_s: float) -> None:
        """Begins to copy out prefix pages that were evicted from the device in this plan."""
        evicted = [
            item for item in self._kv.allocator.take_evicted() if item[1] not in self._kv.host
        ]
        evicted = evicted[:MAX_SPILLED_PAGES]
        if not evicted:
            return
        host_pages = self._kv.host.allocate(len(evicted))
        if host_pages is None:
            return
        device_pages, hashes = zip(*evicted, strict=True)
        copy = self._begin(_Kind.SPILL, list(device_pages), host_pages, now_s, hashes=hashes)
        self._builder.copy_outs.append(copy)
        self.num_pages_out += len(host_pages)

    @property
    def can_exchange(self) -> bool:
        """Whether pages can go to other engines and come from them: with a host tier and prefix
        caching, and where one cache group sees everything."""
        kv = self._kv
        return kv.host.num_pages > 0 and kv.enable_prefix_caching and kv.needs.is_plain

    def host_page(self, name: PageHash) -> int | None:
        """The host page that holds a prefix page; None if none does."""
        return self._kv.host.find(name)

    def bring_to_host(self, names: Sequence[PageHash], now_s: float) -> int | None:
        """Begins to copy out prefix pages that the device alone holds, with the next plan. The
        device keeps them, too.

        Returns:
            The copy's number; None if the host has all that can be found, or no room for the rest.
        """
        kv = self._kv
        lacking = [name for name in dict.fromkeys(names) if name not in kv.host]
        found = [(page, name) for name in lacking if (page := kv.cache.find(name)) is not None]
        host_pages = kv.host.allocate(len(found)) if found else None
        if host_pages is None:
            return None
        device_pages, hashes = zip(*found, strict=True)
        copy = self._begin(_Kind.SPILL, list(device_pages), host_pages, now_s, hashes=hashes)
        self._builder.copy_outs.append(copy)
        self.num_pages_out += len(host_pages)
        return copy.transfer_id

    def is_under_way(self, transfer_id: int) -> bool:
        """Whether a copy has not been reported to have ended."""
        return transfer_id in self._by_id

    def take_in(self, names: Sequence[PageHash]) -> dict[PageHash, int]:
        """Host pages for prefix pages that another engine computed. They are found by their names
        from now on: the caller writes their content before the next plan is made.

        Returns:
            A page for each name that the host lacks; none at all where there is no room for them.
        """
        host = self._kv.host
        lacking = [name for name in dict.fromkeys(names) if name not in host]
        taken = dict(zip(lacking, host.allocate(len(lacking)) or (), strict=False))
        for name, page in taken.items():
            host.remember(page, name)
        return taken

    def swap_in(self, entry: LiveRequest, num_matched: int, now_s: float) -> None:
        """Begins to bring back a swapped sequence that was just admitted.

        Args:
            num_matched: its first pages, which the device still holds, of each cache group that
                sees everything.
        """
        kv, pages, num_tokens = self._kv, entry.pages, entry.pages.num_host_tokens
        device_pages: list[int] = []
        host_pages: list[int] = []
        by_group = zip(kv.pages_at(pages, num_tokens), pages.host_pages, strict=True)
        for group, (new, held) in enumerate(by_group):
            num_there = num_matched if group < kv.needs.num_whole else 0
            kv.host.release(held[:num_there])
            device_pages += new[num_there:]
            host_pages += held[num_there:]
        kv.forget_host_copy(pages)
        self._arrive(_Kind.SWAP_IN, entry, device_pages, host_pages, num_tokens, now_s)

    def recall(
        self, entry: LiveRequest, host_pages: list[int], num_matched: int, now_s: float
    ) -> None:
        """Begins to bring back evicted prefix pages for a sequence that was just admitted."""
        self._kv.host.begin_read(host_pages)
        end = num_matched + len(host_pages)
        device_pages = entry.pages.page_ids[num_matched:end]
        num_tokens = end * self._kv.page_size
        self._arrive(_Kind.RECALL, entry, device_pages, host_pages, num_tokens, now_s)

    def _arrive(
        self,
        kind: _Kind,
        entry: LiveRequest,
        device_pages: list[int],
        host_pages: list[int],
        num_tokens: int,
        now_s: float,
    ) -> None:
        self._kv.pool.begin_transfer(device_pages)
        entry.pages.arriving = tuple(device_pages)
        copy = self._begin(
            kind, device_pages, host_pages, now_s, entry=entry, num_tokens=num_tokens
        )
        self._builder.copy_ins.append(copy)
        self.num_pages_in += len(host_pages)

    def complete(
        self, transfer_id: int, ok: bool, now_s: float, seconds: float = 0.0
    ) -> tuple[LiveRequest, int] | None:
        """Takes in that a copy has ended; one that is not known any more means nothing.

        Args:
            seconds: what the copy itself took; 0 if only its end was noticed.

        Returns:
            For a copy back to the device whose sequence still waits for it: the sequence, and the
            positions that it has KV for now (0 if the copy failed).
        """
        transfer = self._by_id.pop(transfer_id, None)
        if transfer is None:
            return None
        kv, copy, entry = self._kv, transfer.copy, transfer.entry
        if ok and seconds > 0:
            self._forecast.observe_timed_copy(len(copy.host_pages), seconds)
        elif ok:
            self._forecast.observe_copy(len(copy.host_pages), now_s - transfer.begun_s)
        else:
            self.num_failed += 1
        if transfer.kind is _Kind.SPILL:
            for page, page_hash in zip(copy.host_pages, transfer.hashes, strict=True):
                if ok:
                    kv.host.remember(page, page_hash)
                else:
                    kv.host.release((page,))
            return None
        assert entry is not None
        if transfer.kind is _Kind.SWAP_OUT:
            if ok and entry.is_live:
                entry.pages.is_on_host = True
            else:
                kv.host.release(copy.host_pages)
                kv.forget_host_copy(entry.pages)
                kv.watch.note_loss(entry.number)
            return None
        if transfer.kind is _Kind.SWAP_IN:
            kv.host.release(copy.host_pages)
        else:
            kv.host.end_read(copy.host_pages)
        is_wanted = entry.is_live and entry.pages.arriving == copy.device_pages
        kv.pool.end_transfer(copy.device_pages, owned=is_wanted)
        if not is_wanted:
            return None
        entry.pages.arriving = ()
        return entry, transfer.num_tokens if ok else 0

    def abandon(self, now_s: float) -> None:
        """Ends every copy as failed: the device was lost."""
        for transfer_id in list(self._by_id):
            self.complete(transfer_id, False, now_s)

    def owned_host_pages(self) -> list[int]:
        """Host pages that belong to a copy and not to a sequence."""
        return [
            page
            for transfer in self._by_id.values()
            if transfer.kind in (_Kind.SPILL, _Kind.SWAP_IN)
            or (transfer.kind is _Kind.SWAP_OUT and not _is_live(transfer.entry))
            for page in transfer.copy.host_pages
        ]

    def _begin(
        self,
        kind: _Kind,
        device_pages: list[int],
        host_pages: list[int],
        now_s: float,
        *,
        entry: LiveRequest | None = None,
        hashes: tuple[PageHash, ...] = (),
        num_tokens: int = 0,
    ) -> PageCopy:
        copy = PageCopy(
            transfer_id=self._num_begun,
            request_id="" if entry is None else entry.request.request_id,
            device_pages=tuple(device_pages),
            host_pages=tuple(host_pages),
        )
        self._num_begun += 1
        self._by_id[copy.transfer_id] = _Transfer(
            kind=kind, copy=copy, begun_s=now_s, entry=entry, hashes=hashes, num_tokens=num_tokens
        )
        return copy


def _is_live(entry: LiveRequest | None) -> bool:
    return entry is not None and entry.is_live
