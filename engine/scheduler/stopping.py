"""Where new tokens end a sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def find_stop(
    token_ids: Sequence[int], position: int, stop_ids: Collection[int], stop_from: int
) -> int | None:
    """Index in `token_ids` of the first token that ends the sequence, or None.

    The device stops a row by the same rule (`octavo.engine.execution.next_tokens`): at the first
    stop token at or after `stop_from`. No row emits one before that: it is forbidden there.

    Args:
        token_ids: new tokens in order.
        position: of the first of them in its sequence.
        stop_from: see `Request.stop_from`.
    """
    first = max(0, stop_from - position)
    for index in range(first, len(token_ids)):
        if token_ids[index] in stop_ids:
            return index
    return None
