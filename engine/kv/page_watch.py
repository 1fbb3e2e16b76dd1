"""Who is to hear that a page with some content can be found from now on, or no longer."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.engine.kv.page_hash import PageHash


class PageWatch:
    """Subscriptions to page hashes. A hash that nobody watches costs one set look-up.

    Watchers are numbers of live requests. Nobody is called: `take_changed` names those of whom any
    page has come or gone since the last time.
    """

    def __init__(self) -> None:
        self._watchers: dict[PageHash, set[int]] = {}
        self._changed: set[int] = set()

    def subscribe(self, page_hash: PageHash, number: int) -> None:
        """A request hears of this content from now on."""
        self._watchers.setdefault(page_hash, set()).add(number)

    def unsubscribe(self, page_hash: PageHash, number: int) -> None:
        """A request hears of it no longer."""
        watchers = self._watchers[page_hash]
        watchers.remove(number)
        if not watchers:
            del self._watchers[page_hash]

    def note(self, hashes: Collection[PageHash]) -> None:
        """Pages with these contents have come or gone."""
        watchers = self._watchers
        if watchers and not watchers.keys().isdisjoint(hashes):
            self._changed.update(*(watchers[item] for item in hashes if item in watchers))

    def note_to_others(self, page_hash: PageHash | None, number: int) -> bool:
        """A request is about to compute a page with this content: all who watch it but that one
        hear of it.

        Returns:
            Whether there are any.
        """
        watchers = self._watchers.get(page_hash)  # type: ignore[arg-type]  # None has none
        if not watchers or (len(watchers) == 1 and number in watchers):
            return False
        self._changed.update(watchers - {number})
        return True

    def note_loss(self, number: int) -> None:
        """The host has nothing of a swapped request any more."""
        self._changed.add(number)

    def note_all(self) -> None:
        """Every page has gone."""
        self._changed.update(*self._watchers.values())

    def take_changed(self) -> Iterable[int]:
        """Requests of which a watched page has come or gone since the last call, in order."""
        if not self._changed:
            return ()
        changed = sorted(self._changed)
        self._changed.clear()
        return changed

    def check_integrity(self, subscribed: Iterable[tuple[PageHash, int]]) -> None:
        """Asserts that just these subscriptions are there."""
        held = {(item, number) for item, numbers in self._watchers.items() for number in numbers}
        assert held == set(subscribed)
        assert all(self._watchers.values())
