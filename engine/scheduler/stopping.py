"""Where new tokens end a sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def find_stop(
    token_ids: Sequence[int], num_output: int, stop_ids: Collection[int], min_tokens: int
) -> int | None:
    """Index in `token_ids` of the first token that ends the sequence, or None.

    A stop token counts from output index `min_tokens` on, that is after `min_tokens` others.

    Args:
        token_ids: new tokens in order.
        num_output: output tokens before them.
    """
    first = max(0, min_tokens - num_output)
    for index in range(first, len(token_ids)):
        if token_ids[index] in stop_ids:
            return index
    return None
