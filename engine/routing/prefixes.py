"""Which replica holds which beginning of a prompt, as far as a router knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

CHUNK_TOKENS = 64
"""Prompts are compared by so many tokens at a time."""
MAX_CHUNKS = 65_536
"""Beginnings remembered of each replica: the oldest are forgotten first, as a cache would."""


def prompt_chunks(token_ids: Sequence[int], *, tenant: str = "", cache_salt: str = "") -> list[int]:
    """A hash of each whole chunk and all before it; a prompt's last token is always computed.

    Prompts of another tenant or salt share nothing. Equal everywhere, in every process.
    """
    names = [text.encode("utf-8", "surrogatepass") for text in (tenant, cache_salt)]
    root = len(names[0]).to_bytes(8, "little") + b"".join(names)
    chained = int.from_bytes(blake2b(root, digest_size=8).digest(), "little")
    hashes = []
    for start in range(0, len(token_ids) - CHUNK_TOKENS, CHUNK_TOKENS):
        chained = hash((chained, *token_ids[start : start + CHUNK_TOKENS]))
        hashes.append(chained)
    return hashes


class PrefixMemory:
    """What each replica is thought to hold: the chunks that it was sent, the newest of them.

    Chunks of a prompt are kept as a chain: a replica that is thought to hold one holds all before
    it. Not thread-safe.

    Args:
        num_replicas: how many there are.
        most_chunks: remembered of each replica, unless `limit` says otherwise.
    """

    def __init__(self, num_replicas: int, most_chunks: int = MAX_CHUNKS) -> None:
        self._most_chunks = most_chunks
        self._most = [most_chunks] * num_replicas
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[int, set[int]] = {}

    def add_replica(self) -> None:
        """There is one more, which holds nothing."""
        self._most.append(self._most_chunks)
        self._held.append(OrderedDict())

    def limit(self, replica: int, most_chunks: int) -> None:
        """Remembers no more of a replica than so many chunks: as many as its cache can hold."""
        self._most[replica] = most_chunks

    def num_held(self, replica: int) -> int:
        """Chunks that a replica is thought to hold."""
        return len(self._held[replica])

    def num_known(self, chunks: Sequence[int]) -> NDArray[np.int64]:
        """int64[replicas], how many of a prompt's first chunks each is thought to hold."""
        counts = np.zeros(len(self._held), np.int64)
        # Each chunk's holders are among those of the chunk before it: only where they become fewer
        # does anybody's count end.
        before: set[int] = set()
        for place, chunk in enumerate(chunks):
            holders = self._holders.get(chunk)
            if len(before) != (0 if holders is None else len(holders)) and before:
                counts[list(before)] = place
            if not holders:
                return counts
            before = holders
        if before:
            counts[list(before)] = len(chunks)
        return counts

    def learn(self, replica: int, chunks: Sequence[int]) -> None:
        """A replica was sent a prompt: it holds it from now on."""
        held, holders = self._held[replica], self._holders
        for chunk in reversed(chunks):  # a beginning outlives what follows it
            if chunk in held:
                held.move_to_end(chunk)
                continue
            held[chunk] = None
            found = holders.get(chunk)
            if found is None:
                holders[chunk] = {replica}
            else:
                found.add(replica)
        while len(held) > self._most[replica]:
            self._drop(held.popitem(last=False)[0], replica)

    def forget(self, replica: int) -> None:
        """A replica has lost its prefix cache."""
        for chunk in self._held[replica]:
            self._drop(chunk, replica)
        self._held[replica].clear()

    def _drop(self, chunk: int, replica: int) -> None:
        holders = self._holders[chunk]
        holders.discard(replica)
        if not holders:
            del self._holders[chunk]
