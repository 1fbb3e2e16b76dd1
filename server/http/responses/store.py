"""Responses that conversations go on from: in memory, bounded, each for its owner alone."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

ENTRY_BYTES = 512
"""What a stored response takes besides its JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response as its client was told of it.

    Attributes:
        id: of the response.
        previous_id: of the response that it went on from; None if it began its conversation.
        head: the response without its output, JSON.
        inputs, outputs: the items of its own turn, JSON lists.
    """

    id: str
    previous_id: str | None
    head: bytes
    inputs: bytes
    outputs: bytes

    @property
    def num_bytes(self) -> int:
        """What the response takes in the store."""
        return ENTRY_BYTES + len(self.head) + len(self.inputs) + len(self.outputs)

    @property
    def json(self) -> bytes:
        """The whole response."""
        return self.head[:-1] + b',"output":' + self.outputs + b"}"


@dataclass(slots=True)
class _Owned:
    """The responses of one owner, the least recently used first, each with the time of that use."""

    entries: OrderedDict[str, tuple[StoredResponse, float]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """Keeps responses for a while. Lives in the event loop.

    A response belongs to the credential that asked for it; no other caller finds it. To use a
    response is to use the conversation before it, too. If the store is full, the owner of its
    largest share gives up what that owner has not used for longest: no caller can push out what
    all others keep.

    Args:
        max_bytes: of all responses together; 0 keeps none.
        max_entries: responses.
        max_age_s: seconds without use after which a response is forgotten.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_entries: int,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._clock = clock
        self._owners: dict[str, _Owned] = {}
        self.num_bytes = 0
        """What all responses take together."""
        self.num_entries = 0

    @property
    def is_on(self) -> bool:
        """Whether responses are kept at all."""
        return self._max_bytes > 0

    def put(self, owner: str, response: StoredResponse) -> bool:
        """Keeps a response, in the place of one with its id; others may have to make room.

        Returns:
            Whether it is kept: one that is larger than the store is not.
        """
        self._forget_old()
        self._remove(owner, response.id)
        if response.num_bytes > self._max_bytes:
            return False
        owned = self._owners.setdefault(owner, _Owned())
        owned.entries[response.id] = response, self._clock()
        self._count(owned, response, 1)
        self._touch(owned, response.id)
        while self.num_bytes > self._max_bytes or self.num_entries > self._max_entries:
            self._give_up_one(response.id)
        return True

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response; None if the owner has none of this id."""
        chain, _ = self.chain(owner, response_id)
        return chain[-1] if chain else None

    def chain(self, owner: str, response_id: str) -> tuple[list[StoredResponse], str | None]:
        """A conversation up to a response.

        Returns:
            Its responses, the first one first, as far back as they are kept, and the id of the one
            that is missing before them; None if none is.
        """
        self._forget_old()
        owned = self._owners.get(owner)
        return ([], response_id) if owned is None else self._touch(owned, response_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """Forgets a response; whether the owner had it."""
        self._forget_old()
        return self._remove(owner, response_id)

    def _touch(self, owned: _Owned, response_id: str) -> tuple[list[StoredResponse], str | None]:
        """Uses a conversation; see `chain`."""
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None and wanted in owned.entries:
            chain.append(owned.entries[wanted][0])
            wanted = chain[-1].previous_id
        chain.reverse()
        now_s = self._clock()
        for response in chain:
            owned.entries[response.id] = response, now_s
            owned.entries.move_to_end(response.id)
        return chain, wanted

    def _give_up_one(self, kept_id: str) -> None:
        """Forgets a response other than `kept_id`, the newest of all."""
        owned = [each for each in self._owners.values() if next(iter(each.entries)) != kept_id]
        largest = max(owned, key=self._share)
        self._drop(largest, next(iter(largest.entries)))

    def _share(self, owned: _Owned) -> float:
        return max(owned.num_bytes / self._max_bytes, len(owned.entries) / self._max_entries)

    def _forget_old(self) -> None:
        before_s = self._clock() - self._max_age_s
        for owned in list(self._owners.values()):
            while owned.entries:
                response_id, (_, used_s) = next(iter(owned.entries.items()))
                if used_s >= before_s:
                    break
                self._drop(owned, response_id)

    def _remove(self, owner: str, response_id: str) -> bool:
        owned = self._owners.get(owner)
        if owned is None or response_id not in owned.entries:
            return False
        self._drop(owned, response_id)
        return True

    def _drop(self, owned: _Owned, response_id: str) -> None:
        response, _ = owned.entries.pop(response_id)
        self._count(owned, response, -1)
        if not owned.entries:
            self._owners = {name: each for name, each in self._owners.items() if each.entries}

    def _count(self, owned: _Owned, response: StoredResponse, sign: int) -> None:
        owned.num_bytes += sign * response.num_bytes
        self.num_bytes += sign * response.num_bytes
        self.num_entries += sign
