"""What is left to compute of each waiting request, and whose pages it waits for.

A request need not compute what the device's prefix cache or the host tier holds, nor pages that
another request is about to compute: a running prompt, or a request that has waited longer. One
estimate of that, `Request.num_reusable_tokens`, serves admission, order, chunks and load reports.

    device pages │ pages that leaders compute │ host pages │ left to compute
    0 … num_device      … num_led                 … + num_host

Each request computes the first page that nobody computes before it, and is entered under that
page's hash; whoever shares it is led by it. An estimate stays right by subscription: to the last
page that it counts on (it may go) and to the first that it misses (it may come). Those of whom
anything changed are measured again after a plan, a few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.prefix_lookup import Reuse, num_common
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import COMPUTED
from octavo.engine.scheduler.feasibility import prefill_due_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.page_leaders import PageLeaders

MOST_MEASURED = 16
"""Estimates that are brought up to date after one plan; the others' turn comes with the next."""


class RemainingWork:
    """Keeps the estimates of the waiting requests, and the links between those that share pages.

    Args:
        kv: owner of the pages.
        forecast: prices copies and prompt tokens.
        requeue: puts a waiting request in its place anew after its estimate has changed.
    """

    def __init__(
        self, kv: KVManager, forecast: Forecast, requeue: Callable[[LiveRequest], None]
    ) -> None:
        self._kv = kv
        self._lookup = kv.lookup
        self._forecast = forecast
        self._requeue = requeue
        self._shares = kv.enable_prefix_caching
        self._leaders = PageLeaders(kv)
        self._waiting: dict[int, LiveRequest] = {}
        self._stale: dict[int, LiveRequest] = {}
        self._awaiting: set[int] = set()

    @property
    def num_awaiting(self) -> int:
        """Waiting requests that were passed over since they began to wait: their leaders, which
        were admitted, compute for them."""
        return len(self._awaiting)

    @property
    def num_stale(self) -> int:
        """Estimates that are not up to date."""
        self._note_changes()
        return len(self._stale)

    # Requests come and go.

    def num_reusable(self, pages: SequencePages) -> int:
        """Tokens of a request at the door that it need not compute; nothing is entered."""
        if not self._shares:
            return 0
        reuse, _ = self._look_up(pages, math.inf)
        return self._num_tokens(pages, reuse)

    def enter(self, entry: LiveRequest) -> None:
        """A request begins to wait: before it is put in its place."""
        entry.request.num_reusable_tokens = 0
        if not self._shares and not entry.pages.host_pages:
            return
        self._waiting[entry.number] = entry
        entry.reuse = Reuse()
        entry.prefill_due_s = prefill_due_s(entry.request, self._forecast)
        self._measure(entry)
        self._note_changes()  # whom it leads now must not be admitted as if it did not

    def leave(self, entry: LiveRequest) -> None:
        """A request ends, is preempted or held apart: no other counts on it any more."""
        entry.request.num_reusable_tokens = 0
        self._stop_leading(entry)
        self.forget(entry)

    def seat(self, entry: LiveRequest, num_matched: int) -> None:
        """A waiting request was admitted with so many pages: it computes those that follow.

        Need not be called if they follow where expected (`LiveRequest.computes_at`), if it has no
        leader, and if nothing has changed. What it subscribed to is left to `forget`.
        """
        if not self._shares:
            return
        if entry.leaders:
            self._unlink(entry)
        entry.computes_at = num_matched
        is_full = num_matched < self._lookup.num_full(entry.pages)
        key = entry.pages.hashes[num_matched] if is_full else None
        self._own(entry, key)
        self._kv.watch.note_to_others(key, entry.number)  # that it does so now, at the latest
        self._note_changes()  # whoever comes next in the plan may wait for it

    def changed(self, entry: LiveRequest) -> None:
        """A waiting request has got tokens, from a step that was on its way when it was preempted,
        or has lost what the host held of it."""
        self._mark(entry)

    def forget(self, entry: LiveRequest) -> None:
        """Drops what was kept of a request that waits no longer, but for what it computes."""
        if entry.number in self._waiting:
            self._forget(entry)

    def advance(self, entry: LiveRequest) -> None:
        """More pages of a running prompt can be found."""
        if entry.computes is None:
            return
        pages = entry.pages
        index = pages.num_registered
        if index < min(len(pages.hashes), entry.prefill_end // self._kv.page_size):
            self._own(entry, pages.hashes[index], leads_on=True)
            return
        self._stop_leading(entry)

    # Whom a request waits for.

    def leader_to_await(self, entry: LiveRequest, starts_s: float) -> LiveRequest | None:
        """The running prompt that computes the next page of a waiting request, which is passed over
        for it; None if there is none, or if waiting would make the request late and computing by
        itself would not."""
        entry.goes_alone = False
        leader = entry.leaders[0] if entry.leaders else None
        if (
            entry.is_stale
            or leader is None
            or leader.request.slot is None
            or leader.pages.num_registered >= entry.num_first_led
        ):
            self._measure(entry)
            self._mark(entry)  # its place in the queue is as it was
            entry.is_stale = False
            leader = entry.leaders[0] if entry.leaders else None
        if leader is None or leader.request.slot is None:
            self._unfollow(entry)
            return None
        entry.goes_alone = self._is_urgent(entry, leader, starts_s)
        if entry.goes_alone:
            self._unfollow(entry)
            return None
        if entry.follows is not leader:
            self._unfollow(entry)
            entry.follows = leader
            leader.followers = leader.followers or {}
            leader.followers[entry.number] = entry
            self._awaiting.add(entry.number)
        return leader

    def _is_urgent(self, entry: LiveRequest, leader: LiveRequest, starts_s: float) -> bool:
        """Whether a request would be late if it waited, and not if it began now."""
        due_s = entry.prefill_due_s
        if due_s == math.inf or not self._forecast.is_sound:
            return False
        forecast, size, request = self._forecast, self._kv.page_size, entry.request
        num_there = max(entry.reuse.num_device, leader.pages.num_registered)
        alone = request.num_tokens - num_there * size
        if starts_s + forecast.prefill_s(alone) > due_s:
            return False
        led = max(0, entry.num_first_led * size - int(leader.request.counts[COMPUTED]))
        wait_s = forecast.prefill_s(led + request.num_missing_tokens) + forecast.step_s
        return starts_s + wait_s > due_s

    # Estimates.

    def measure_changed(self) -> None:
        """Brings the estimates of a few requests up to date, and their places in the queue."""
        self._note_changes()
        if self._stale:
            for entry in list(islice(self._stale.values(), MOST_MEASURED)):
                self.bring_up_to_date(entry)

    def bring_up_to_date(self, entry: LiveRequest) -> bool:
        """Makes a waiting request's estimate exact, if anything has changed.

        Returns:
            Whether it is another one now.
        """
        self._note_changes()
        if self._stale.pop(entry.number, None) is None:
            return False
        self._measure(entry)
        if entry.request.num_reusable_tokens == entry.num_queued_reusable:
            return False
        self._requeue(entry)
        return True

    def _note_changes(self) -> None:
        for number in self._kv.watch.take_changed():
            entry = self._waiting.get(number)
            if entry is not None:
                self._mark(entry)

    def _mark(self, entry: LiveRequest) -> None:
        if entry.number in self._waiting and entry.request.slot is None:
            entry.is_stale = True
            self._stale[entry.number] = entry

    def _measure(self, entry: LiveRequest) -> None:
        """Looks up what a waiting request need not compute; subscribes to what that rests on."""
        pages, number = entry.pages, entry.number
        self._kv.name_known(pages)
        rank = math.inf if entry.is_demoted else number
        reuse, leaders = self._look_up(pages, rank, entry.reuse.num_led)
        entry.reuse, entry.is_stale = reuse, False
        entry.request.num_reusable_tokens = self._num_tokens(pages, reuse)
        if not self._shares:
            return
        if entry.leaders:
            self._unlink(entry)
        entry.leaders = tuple(leader for leader, _ in leaders)
        entry.num_first_led = leaders[0][1] if leaders else 0
        for leader in entry.leaders:
            leader.dependents = leader.dependents or {}
            leader.dependents[number] = entry
        if entry.follows is not None and entry.follows not in entry.leaders[:1]:
            self._unfollow(entry)
        hashes, end = pages.hashes, reuse.num_led
        is_first = end < self._lookup.num_full(pages)
        leads = not entry.is_demoted and not pages.host_pages
        # A last page that it cannot reuse it computes beside others: they must hear when it begins.
        is_alone = leads and end < self._lookup.most(pages)
        entry.computes_at = end if is_alone or not is_first else -1
        key = hashes[end] if is_first and leads else None
        self._own(entry, key)
        self._subscribe(entry)

    def _subscribe(self, entry: LiveRequest) -> None:
        hashes, reuse, watch = entry.pages.hashes, entry.reuse, self._kv.watch
        last = reuse.num_led + reuse.num_host
        wanted = {reuse.num_device - 1, last - 1, reuse.num_led, last}
        watched = {hashes[index] for index in wanted if 0 <= index < len(hashes)}
        if watched != entry.watched:
            for page_hash in entry.watched - watched:
                watch.unsubscribe(page_hash, entry.number)
            for page_hash in watched - entry.watched:
                watch.subscribe(page_hash, entry.number)
            entry.watched = frozenset(watched)

    def _look_up(
        self, pages: SequencePages, rank: float, guess: int = 0
    ) -> tuple[Reuse, list[tuple[LiveRequest, int]]]:
        """What a request need not compute, and who computes it for it, each up to which page.

        Args:
            rank: of those who wait, the ones with a smaller number come before it.
        """
        if not self._shares:
            return Reuse(), []
        end = num_device = self._lookup.on_device(pages, guess)
        if pages.host_pages:
            return Reuse(num_device, num_device), []  # its own copy holds the rest
        most, leaders = self._lookup.most(pages), list[tuple[LiveRequest, int]]()
        if self._kv.snapshots is not None:
            most = end  # pages of others are of no use before there is a snapshot
        while end < most:
            leader = self._leaders.find(pages, end, rank)
            if leader is None:
                break
            end = num_common(pages, leader.pages, end, min(most, self._leaders.end(leader)))
            leaders.append((leader, end))
        return Reuse(num_device, end, self._lookup.on_host(pages, end)), leaders

    def _num_tokens(self, pages: SequencePages, reuse: Reuse) -> int:
        """Tokens that need not be computed, less those that could be in the time of the copies."""
        size, forecast = self._kv.page_size, self._forecast
        spared = reuse.num_led * size
        num_copied, end = reuse.num_host, (reuse.num_led + reuse.num_host) * size
        if pages.host_pages:
            num_copied = self._kv.num_to_bring_back(pages, reuse.num_device)
            end = pages.num_host_tokens
        if num_copied > 0:
            price = num_copied * forecast.page_copy_s / max(forecast.prefill_token_s, 1e-12)
            spared = max(spared, int(end - price))
        return min(spared, pages.request.num_tokens - 1)

    # Links.

    def _own(self, entry: LiveRequest, key: PageHash | None, *, leads_on: bool = False) -> None:
        """Enters a request under the first page that nobody computes before it.

        Args:
            leads_on: whether those whom it leads are led by it as before.
        """
        if not self._leaders.enter(entry, key):
            return
        if not leads_on and entry.request.slot is None:
            for other in entry.dependents.values():
                self._mark(other)

    def _stop_leading(self, entry: LiveRequest) -> None:
        if entry.computes is not None:
            self._own(entry, None, leads_on=True)
        if entry.dependents:
            for other in list(entry.dependents.values()):
                self._unlink(other)
                self._mark(other)

    def _unlink(self, entry: LiveRequest) -> None:
        """A waiting request is led by nobody, for now."""
        for leader in entry.leaders:
            leader.dependents.pop(entry.number, None)
        entry.leaders, entry.num_first_led = (), 0
        self._unfollow(entry)

    def _unfollow(self, entry: LiveRequest) -> None:
        if entry.follows is not None:
            del entry.follows.followers[entry.number]
            entry.follows = None

    def _forget(self, entry: LiveRequest) -> None:
        self._waiting.pop(entry.number, None)
        self._awaiting.discard(entry.number)
        self._stale.pop(entry.number, None)
        entry.is_stale = False
        if entry.leaders:
            self._unlink(entry)
        for page_hash in entry.watched:
            self._kv.watch.unsubscribe(page_hash, entry.number)
        entry.watched = frozenset()

    def check_integrity(self, live: Iterable[LiveRequest]) -> None:
        """Asserts that links go both ways, and that estimates are right but for the stale ones."""
        self._note_changes()
        live = list(live)
        self._leaders.check_integrity(live)
        for entry in live:
            assert all(other.leaders for other in entry.dependents.values())
            assert all(entry.dependents[n].leaders[0] is entry for n in entry.followers)
            assert all(leader.dependents[entry.number] is entry for leader in entry.leaders)
            assert entry.follows is None or entry.follows.followers[entry.number] is entry
            if entry.number not in self._waiting:
                assert not entry.leaders
                assert not entry.watched
                assert not entry.request.num_reusable_tokens
                continue
            assert entry.request.slot is None
            assert not entry.is_stale or entry.number in self._stale
            assert entry.request.num_missing_tokens >= 1
            if self._shares and not entry.is_stale and self._kv.serves_each_page:
                # Pages go from the beginning of what a window saw, where no estimate looks, and
                # snapshots come and go without a word.
                self._check_estimate(entry)
        assert self._stale.keys() <= self._waiting.keys() <= {entry.number for entry in live}
        assert self._awaiting <= self._waiting.keys()
        self._kv.watch.check_integrity(
            (page_hash, entry.number) for entry in live for page_hash in entry.watched
        )

    def _check_estimate(self, entry: LiveRequest) -> None:
        """Asserts that an estimate is what a look-up from the beginning says."""
        pages, reuse = entry.pages, entry.reuse
        exact = len(self._kv.lookup.match(pages))
        if any(self._kv.cache.knows(page_hash) for page_hash in pages.hashes[exact + 1 :]):
            return  # pages have gone from the middle, which an estimate does not look at
        # While its leader gets on, what the device holds of it grows and the sum stays as it is.
        assert reuse.num_device <= exact, (reuse, exact)
        assert exact <= (reuse.num_led if entry.leaders else reuse.num_device), (reuse, exact)
        if pages.host_pages:
            return
        num_led = exact
        for leader in entry.leaders:
            assert leader.computes is not None
            assert leader.is_live
            most = min(self._lookup.most(pages), self._leaders.end(leader))
            num_led = num_common(pages, leader.pages, 0, most)
        assert reuse.num_led == num_led, (reuse, num_led)
        if num_led < self._lookup.most(pages):
            rank = math.inf if entry.is_demoted else entry.number
            assert self._leaders.find(pages, num_led, rank) is None
        num_host = self._lookup.on_host(pages, num_led)
        if num_host < reuse.num_host:  # the last to be read go first: a prefix may have gaps
            assert pages.hashes[num_led + reuse.num_host - 1] in self._kv.host
        else:
            assert reuse.num_host == num_host, (reuse, num_host)
