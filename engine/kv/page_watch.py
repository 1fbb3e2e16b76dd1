"""Which requests depend on whether a page with some content can be found."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.engine.kv.page_hash import PageHash


class PageWatch:
    """Subscriptions to page hashes. A hash without watchers costs one set look-up.

    Watchers are numbers of live requests. They are not called: `take_changed` names the ones of
    which any page has come or gone since the last time.
    """

    def __init__(self) -> None:
        # One request alone stands there by its number, as nearly always.
        self._watchers: dict[PageHash, int | set[int]] = {}
        self._changed: set[int] = set()

    def subscribe(self, page_hash: PageHash, number: int) -> None:
        """A request hears of this content from now on."""
        watchers = self._watchers.setdefault(page_hash, number)
        if isinstance(watchers, set):
            watchers.add(number)
        elif watchers != number:
            self._watchers[page_hash] = {watchers, number}

    def unsubscribe(self, page_hash: PageHash, number: int) -> None:
        """A request hears of it no longer."""
        watchers = self._watchers[page_hash]
        if isinstance(watchers, set):
            watchers.remove(number)
            if watchers:
                return
        del self._watchers[page_hash]

    def note(self, hashes: Collection[PageHash]) -> None:
        """Pages with these contents have come or gone."""
        watched = self._watchers
        if watched and not watched.keys().isdisjoint(hashes):
            for page_hash in hashes:
                self._note(watched.get(page_hash))

    def note_to_others(self, page_hash: PageHash | None, number: int) -> bool:
        """A request is about to compute a page with this content: all who watch it but that one
        hear of it.

        Returns:
            Whether there are any.
        """
        if page_hash is None:
            return False
        watchers = self._watchers.get(page_hash)
        if watchers is None or watchers == number or watchers == {number}:
            return False
        self._note(watchers - {number} if isinstance(watchers, set) else watchers)
        return True

    def _note(self, watchers: int | set[int] | None) -> None:
        if isinstance(watchers, set):
            self._changed |= watchers
        elif watchers is not None:
            self._changed.add(watchers)

    def note_loss(self, number: int) -> None:
        """The host has nothing of a swapped request any more."""
        self._changed.add(number)

    def note_all(self) -> None:
        """Every page has gone."""
        for watchers in self._watchers.values():
            self._note(watchers)

    def take_changed(self) -> Iterable[int]:
        """Requests of which a watched page has come or gone since the last call, in order."""
        if not self._changed:
            return ()
        changed = sorted(self._changed)
        self._changed.clear()
        return changed

    def check_integrity(self, subscribed: Iterable[tuple[PageHash, int]]) -> None:
        """Asserts that just these subscriptions are there."""
        held: set[tuple[PageHash, int]] = set()
        for page_hash, watchers in self._watchers.items():
            numbers = watchers if isinstance(watchers, set) else {watchers}
            assert numbers
            held |= {(page_hash, number) for number in numbers}
        assert held == set(subscribed)
