"""Which replica takes a request: the one with the least to do, what it has cached counted.

Work is counted in tokens: those of a prompt that are to be computed, and those that are expected to
be generated, which take a share of a step each and so count for more. A replica that holds the
beginning of a prompt in its prefix cache has that much less to do for it: requests that begin alike
meet where their prefix is, unless there is more to wait for there than it spares.
Source of the idea: longest-prefix matching against load in SGLang's router and in llm-d.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

CHUNK_TOKENS = 64
"""Prompts are compared by so many tokens at a time."""
MAX_CHUNKS = 65_536
"""Beginnings remembered of each replica: the oldest are forgotten first, as a cache would."""
OUTPUT_WEIGHT = 3.0
"""Prompt tokens that take as long as one generated token, about, in a full batch of decode rows."""
FIRST_OUTPUT_LEN = 128
"""Tokens that an answer is taken to have while none has ended."""
LENGTH_SHARE = 0.05
"""Of the newest answer in the running mean of lengths."""


@dataclass(slots=True)
class _Taken:
    """A request under way."""

    replica: int
    cost: float


class Router:
    """Chooses replicas, and keeps count of what they have to do. Not thread-safe.

    Args:
        num_replicas: how many there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self._work = [0.0] * num_replicas
        self._num_taken = [0] * num_replicas
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._taken: dict[str, _Taken] = {}
        self._mean_output_len = float(FIRST_OUTPUT_LEN)

    def choose(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        num_sequences: int = 1,
        tenant: str = "",
        cache_salt: str = "",
        among: Collection[int],
    ) -> int:
        """Takes a request into account until `ended`.

        Args:
            request_id: of its own.
            prompt_token_ids: the prompt.
            max_tokens: most tokens of each sequence's answer.
            num_sequences: answers to it.
            tenant, cache_salt: prompts of another tenant or salt share nothing.
            among: replicas that can take it, one at least.

        Returns:
            The replica that has done with it first; of equals, the first.
        """
        chunks = _chunks(prompt_token_ids, (tenant, cache_salt))
        num_output = num_sequences * min(float(max_tokens), self._mean_output_len)

        def cost(replica: int) -> float:
            num_cached = CHUNK_TOKENS * self._num_known(replica, chunks)
            return len(prompt_token_ids) - num_cached + OUTPUT_WEIGHT * num_output

        costs = {replica: cost(replica) for replica in among}
        chosen = min(sorted(among), key=lambda replica: self._work[replica] + costs[replica])
        self._work[chosen] += costs[chosen]
        self._num_taken[chosen] += 1
        self._taken[request_id] = _Taken(chosen, costs[chosen])
        self._remember(chosen, chunks)
        return chosen

    def ended(self, request_id: str, output_len: int | None = None) -> None:
        """A request is over, or taken back.

        Args:
            output_len: tokens of its first answer; None where that tells nothing of others.
        """
        taken = self._taken.pop(request_id, None)
        if taken is not None:
            self._num_taken[taken.replica] -= 1
            left = self._work[taken.replica] - taken.cost
            # Nothing under way is no work at all, whatever was lost in adding up.
            self._work[taken.replica] = left if self._num_taken[taken.replica] else 0.0
        if output_len is not None:
            self._mean_output_len += LENGTH_SHARE * (output_len - self._mean_output_len)

    def forget(self, replica: int) -> None:
        """A replica has lost its prefix cache."""
        self._known[replica].clear()

    def work(self, replica: int) -> float:
        """What a replica has to do, in tokens of prompts."""
        return self._work[replica]

    def _num_known(self, replica: int, chunks: Sequence[int]) -> int:
        known = self._known[replica]
        for place, chunk in enumerate(chunks):
            if chunk not in known:
                return place
        return len(chunks)

    def _remember(self, replica: int, chunks: Sequence[int]) -> None:
        known = self._known[replica]
        for chunk in reversed(chunks):  # a beginning outlives what follows it
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > MAX_CHUNKS:
            known.popitem(last=False)


def _chunks(token_ids: Sequence[int], salt: tuple[str, str]) -> list[int]:
    """A hash of each whole chunk and all before it; a prompt's last token is always computed."""
    chained, hashes = hash(salt), []
    for start in range(0, len(token_ids) - CHUNK_TOKENS, CHUNK_TOKENS):
        chained = hash((chained, *token_ids[start : start + CHUNK_TOKENS]))
        hashes.append(chained)
    return hashes
