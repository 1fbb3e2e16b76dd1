"""Weights for tiny models, the same numbers on every machine and with every NumPy."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

PROMPT_LENGTH = 12
NUM_TOKENS = 16


def tensors(shapes: Mapping[str, tuple[int, ...]], norm_offset: float) -> dict[str, np.ndarray]:
    """A value for every tensor, as a checkpoint stores it: float32, in Hugging Face's layout."""
    return {name: _tensor(name, shape, norm_offset) for name, shape in shapes.items()}


def token_ids(vocab_size: int) -> np.ndarray:
    """A prompt and its continuation: [NUM_TOKENS] int32."""
    return (uniform("tokens", (NUM_TOKENS,)) * (vocab_size - 4)).astype(np.int32) + 4


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [0, 1), float64, from the name alone (splitmix64)."""
    count = int(np.prod(shape))
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(zlib.crc32(name.encode()) << 20)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return ((state >> np.uint64(11)) / 2.0**53).reshape(shape)


def _tensor(name: str, shape: tuple[int, ...], norm_offset: float) -> np.ndarray:
    values = uniform(name, shape) * 2.0 - 1.0
    if "norm" in name:
        return (1.0 - norm_offset + 0.3 * values).astype(np.float32)
    if name.endswith(("scale", "scalar")):
        return (1.0 + 0.3 * values).astype(np.float32)
    scale = 0.5 if name.endswith(".bias") else 1.5 / np.sqrt(shape[-1])
    if "embed_tokens" in name:
        scale = 1.0
    return (values * scale).astype(np.float32)
