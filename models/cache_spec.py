"""What a layer keeps of the tokens it has seen. No JAX; the engine gives it room.

Specs are compared and hashed by value: layers with equal specs form a group, whose caches have one
shape and one rule about which pages may be given back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKVCache:
    """Pages of keys and values, a key and a value a token and KV head.

    Attributes:
        num_kv_heads: copies for tensor parallelism counted.
        key_size, value_size: numbers of one head's key and value.
        window: tokens that a query may still see, itself included; None is all of them.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.num_kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCache:
    """Pages of latents, one a token, which all heads read: keys, whose beginnings are the values.

    Attributes:
        key_size: numbers of a latent, those of the key that is rotated counted.
        value_size: of them, from the first on, those that are the value, too.
    """

    key_size: int
    value_size: int
    num_kv_heads = 1
    window = None

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token takes: values take none of their own."""
        return self.key_size


PagedCache = PagedKVCache | LatentCache
"""Caches that lie in pages."""


@dataclass(frozen=True, slots=True)
class SharedCache:
    """The cache of an earlier layer, which this one reads and never writes.

    Attributes:
        layer: the one whose cache it is.
    """

    layer: int


@dataclass(frozen=True, slots=True)
class StateArray:
    """float32 numbers of a sequence's state.

    Attributes:
        shape: of one sequence's.
        split: the dimension that devices share, where it divides over them.
    """

    shape: tuple[int, ...]
    split: int


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A state of fixed size, which each token of a sequence changes. It lies in the sequence's row
    on the device, not in pages, and begins as zeros.

    Attributes:
        arrays: what it is made of.
        chunk_tokens: it is known at multiples of so many tokens of a sequence, and at the end of a
            step's; what lies between is computed without it.
    """

    arrays: tuple[StateArray, ...]
    chunk_tokens: int = 1

    @property
    def num_bytes(self) -> int:
        """Of one sequence's, in float32."""
        return sum(4 * math.prod(array.shape) for array in self.arrays)


CacheSpec = PagedCache | RecurrentState | SharedCache
