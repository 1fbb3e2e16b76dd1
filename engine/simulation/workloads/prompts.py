"""Prompts as pieces of token streams: compact, and equal where beginnings are shared.

A stream is an endless sequence of tokens, named by a number. A segment is the first tokens of a
stream. Prompts that begin with the same segments begin with the same tokens, in a simulation and
on a live engine, so that the real prefix cache finds what they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.errors import InvalidConfigError

NUM_RESERVED_TOKENS = 256
"""Token ids below this are left out of random prompts: tokenizers keep specials and bytes there."""

_STREAM_BYTES = 6


class Segment(NamedTuple):
    """The first `num_tokens` tokens of a stream, a number from 0 to 2**48 - 1."""

    stream: int
    num_tokens: int


def stream_of(*names: object) -> int:
    """The stream that goes by these names: a number from 0 to 2**48 - 1, the same everywhere."""
    data = "\x1f".join(map(str, names)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=_STREAM_BYTES).digest(), "little")


def block_segments(
    block_ids: Iterable[object], block_tokens: int, num_tokens: int
) -> tuple[Segment, ...]:
    """Segments of a prompt of `num_tokens` tokens that is given as a list of named blocks.

    Args:
        block_ids: equal names are equal blocks.
        block_tokens: tokens of a block; the last one may hold fewer.
        num_tokens: blocks beyond it are left out.
    """
    segments = []
    for begin, block in zip(range(0, num_tokens, block_tokens), block_ids, strict=False):
        segments.append(Segment(stream_of("block", block), min(block_tokens, num_tokens - begin)))
    return tuple(segments)


def salted(segments: Sequence[Segment], *salt: object) -> tuple[Segment, ...]:
    """The segments of other streams: they share with each other what they shared, and no more."""
    return tuple(Segment(stream_of(stream, *salt), num) for stream, num in segments)


def stream_tokens(segments: Iterable[Segment], vocab_size: int) -> list[int]:
    """The tokens of a prompt for a model.

    Args:
        segments: the prompt.
        vocab_size: token ids are from [NUM_RESERVED_TOKENS, vocab_size).

    Raises:
        InvalidConfigError: a vocabulary of reserved ids alone.

    Source: splitmix64 (Steele, Lea, Flood 2014) of (stream, position).
    """
    if vocab_size <= NUM_RESERVED_TOKENS:
        raise InvalidConfigError(
            "vocab_size", vocab_size, f"more than the {NUM_RESERVED_TOKENS} reserved ids"
        )
    tokens: list[int] = []
    for stream, num_tokens in segments:
        ids = _splitmix64(stream, num_tokens) % np.uint64(vocab_size - NUM_RESERVED_TOKENS)
        tokens += (ids + np.uint64(NUM_RESERVED_TOKENS)).tolist()
    return tokens


def _splitmix64(stream: int, num_tokens: int) -> NDArray[np.uint64]:
    """uint64[num_tokens]. Streams are spread first, so that none is a shift of another."""
    spread = int.from_bytes(blake2b(stream.to_bytes(8, "little"), digest_size=8).digest(), "little")
    x = np.arange(num_tokens, dtype=np.uint64) + np.uint64(spread)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
