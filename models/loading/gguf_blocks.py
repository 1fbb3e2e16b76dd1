"""A GGUF's quantized tensors as codes, scales and minima, instead of the numbers they stand for.

Every number of these types is code · scale + minimum, computed in float32 as `gguf.quants` computes
it: code · scale needs at most 24 bits and so is exact, and adding rounds once in either.

Source: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`), as `gguf.quants` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from octavo.pallas_kernels.stored_blocks import Blocks, BlockType

_F16, _F32 = np.dtype(np.float16), np.dtype(np.float32)

BLOCK_TYPES: Final = {
    GGMLQuantizationType.Q4_0: BlockType(
        codes=32, nibbles=True, scale_dtype=_F16, minimum_dtype=_F32
    ),
    GGMLQuantizationType.Q4_1: BlockType(
        codes=32, nibbles=True, scale_dtype=_F16, minimum_dtype=_F16
    ),
    GGMLQuantizationType.Q5_0: BlockType(
        codes=32, nibbles=False, scale_dtype=_F16, minimum_dtype=None
    ),
    GGMLQuantizationType.Q5_1: BlockType(
        codes=32, nibbles=False, scale_dtype=_F16, minimum_dtype=_F16
    ),
    GGMLQuantizationType.Q8_0: BlockType(
        codes=32, nibbles=False, scale_dtype=_F16, minimum_dtype=None
    ),
    GGMLQuantizationType.Q4_K: BlockType(
        codes=32, nibbles=True, scale_dtype=_F32, minimum_dtype=_F32
    ),
    GGMLQuantizationType.Q5_K: BlockType(
        codes=32, nibbles=False, scale_dtype=_F32, minimum_dtype=_F32
    ),
    GGMLQuantizationType.Q6_K: BlockType(
        codes=16, nibbles=False, scale_dtype=_F32, minimum_dtype=None
    ),
}
"""How each type's blocks are held; types that are not here have no blocks."""

_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def read_blocks(raw: np.ndarray, kind: GGMLQuantizationType) -> Blocks:
    """The blocks of rows of a tensor.

    Args:
        raw: uint8 [rows, bytes a row].
        kind: one of `BLOCK_TYPES`.

    Returns:
        Codes, scales and minima; some may view `raw`.
    """
    held = BLOCK_TYPES[kind]
    num_rows = len(raw)
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    codes, scale, minimum = _READERS[kind](blocks)
    return Blocks(
        type=held,
        codes=codes.reshape(num_rows, -1, held.code_bytes),
        scale=scale.reshape(num_rows, -1),
        minimum=None if minimum is None else minimum.reshape(num_rows, -1),
    )


def _f16(blocks: np.ndarray, first_byte: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, first_byte : first_byte + 2]).view(_F16)


def _q4_0(blocks: np.ndarray) -> _Parts:
    scale = _f16(blocks, 0)
    return blocks[:, 2:], scale, scale.astype(np.float32) * np.float32(-8)


def _q4_1(blocks: np.ndarray) -> _Parts:
    return blocks[:, 4:], _f16(blocks, 0), _f16(blocks, 2)


def _q5_0(blocks: np.ndarray) -> _Parts:
    codes = _five_bits(blocks[:, 6:], blocks[:, 2:6]).view(np.int8) - np.int8(16)
    return codes, _f16(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    codes = _five_bits(blocks[:, 8:], blocks[:, 4:8]).view(np.int8)
    return codes, _f16(blocks, 0), _f16(blocks, 2)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _f16(blocks, 0), None


def _q4_k(blocks: np.ndarray) -> _Parts:
    scale, minimum = _sub_block_scales(blocks)
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32))
    codes = codes.reshape(-1, 2, 16)
    return codes[:, 0] | (codes[:, 1] << np.uint8(4)), scale, minimum


def _q5_k(blocks: np.ndarray) -> _Parts:
    scale, minimum = _sub_block_scales(blocks)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (low | ((high & np.uint8(1)) << np.uint8(4))).view(np.int8), scale, minimum


def _q6_k(blocks: np.ndarray) -> _Parts:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    codes = (low | (high.reshape(-1, 8, 32) << np.uint8(4))).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes, _f16(blocks, 208).astype(np.float32) * scales, None


def _halves(packed: np.ndarray) -> np.ndarray:
    """[n, groups, bytes] -> [n, groups, 2, bytes]: a group's low halves, then its high ones."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-2)


def _five_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Codes [n, 32] of halves of bytes [n, 16] and a fifth bit each [n, 4]."""
    fifth = np.unpackbits(high, axis=-1, bitorder="little")
    return _halves(low[:, None]).reshape(-1, 32) | (fifth << np.uint8(4))


def _sub_block_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of a K type's eight sub-blocks."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scale = _f16(blocks, 0).astype(np.float32) * scales.astype(np.float32)
    return scale, -(_f16(blocks, 2).astype(np.float32) * minima.astype(np.float32))


_READERS: Final[dict[GGMLQuantizationType, Callable[[np.ndarray], _Parts]]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
