"""A GGUF file as a model: its tensors in Hugging Face's names and layouts, dequantized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf.quants import dequantize

from octavo.engine.errors import ModelLoadError
from octavo.models.config import ModelConfig
from octavo.models.families.table import GGUF_ARCHITECTURES
from octavo.models.loading.aligned import aligned_empty
from octavo.models.loading.gguf_blocks import BLOCK_TYPES, read_blocks
from octavo.models.loading.gguf_config import config_from_gguf
from octavo.models.loading.gguf_file import GGUFFile, GGUFTensor
from octavo.models.loading.tensors import expected_tensors
from octavo.models.tensor_layouts import Index
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""One divisor a rotary frequency; part of the configuration here, not a weight."""

FLOATS = ("F32", "F16", "BF16")
"""Types of tensors whose numbers stand one by one."""
MAX_ROPE_FACTORS = 1 << 12
"""Most divisors that are read to compare them with the heads: half of the widest head."""
_CHUNK_BYTES = 1 << 18
"""Bytes converted at a time: enough to amortize the call, few enough to stay in cache."""


class GGUFSource:
    """A `TensorSource` over a GGUF file.

    Attributes:
        config: what the file's metadata say.
        metadata: what they say beyond it, the tokenizer above all.
        norms_include_offset: True: whoever writes a GGUF adds the offset.
        is_quantized: whether any tensor is made of blocks.

    Raises (on construction):
        ModelLoadError: a damaged file, or metadata that make no sense.
        UnsupportedModelError: an architecture, feature or tensor type that is not supported.
    """

    norms_include_offset = True

    def __init__(self, path: str | Path) -> None:
        self.file = GGUFFile(path)
        self.metadata = self.file.metadata
        tensors = dict(self.file.tensors)
        self.is_quantized = any(tensor.type.name not in FLOATS for tensor in tensors.values())
        factors, long_factors, short_factors = (
            self._rope_factors(tensors.pop(name, None))
            for name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
        )
        self.config: ModelConfig = config_from_gguf(
            self.file.metadata,
            where=str(path),
            vocab_rows=_num_rows(tensors.get("token_embd.weight")),
            tied="output.weight" not in tensors,
            rope_factors=factors,
            longrope=(short_factors, long_factors),
            checkpoint_dtype=_checkpoint_dtype(tensors),
        )
        architecture = self.file.metadata["general.architecture"]
        expected = expected_tensors(self.config)
        self._tensors: dict[str, GGUFTensor] = {}
        # Which part of its tensor each expert's is, where there is one for each.
        self._experts: dict[str, int] = {}
        canonical: dict[str, list[str]] = {}
        for name, (_, gguf) in expected.items():
            canonical.setdefault(gguf, []).append(name)
        for stored, tensor in tensors.items():
            names = canonical.get(stored, [stored])
            if not self._tensors.keys().isdisjoint(names):
                raise ModelLoadError(f"{path} holds a tensor twice, under two names")
            self._tensors |= dict.fromkeys(names, tensor)
            if tensor.shape[0] == len(names):
                parts = ((name, expected[name][0].expert) for name in names if name in expected)
                self._experts |= {name: part for name, part in parts if part is not None}
        self._rotary_dims: dict[str, int] = {}
        if GGUF_ARCHITECTURES[architecture].gguf_pairs:
            self._rotary_dims = {
                name: tensor.rotary_dim
                for name, (tensor, _) in expected.items()
                if tensor.rotary_dim is not None
            }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: tensor.shape[1:] if name in self._experts else tensor.shape
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        tensor = self._tensors[name]
        if name in self._experts:
            tensor, index = self._expert(tensor, self._experts[name], index)
        rows = self._dequantized(tensor, index[0])
        if name in self._rotary_dims:
            rows = _halves_from_pairs(rows, self._rotary_dims[name])
        return rows if rows.ndim == 1 else rows[:, index[1]]

    def is_bfloat16(self, name: str) -> bool:
        """Whether a tensor's numbers are stored in bfloat16."""
        return self._tensors[name].type.name == "BF16"

    def block_type(self, name: str) -> BlockType | None:
        """How the blocks of a tensor are held; None if it has none."""
        return BLOCK_TYPES.get(self._tensors[name].type)

    def read_blocks(self, name: str) -> Blocks:
        """All of a tensor that has blocks; what they stand for is what `read` reads."""
        tensor = self._tensors[name]
        raw = self.file.raw(tensor.name)
        if name in self._experts:
            raw = raw.reshape(tensor.shape[0], -1, raw.shape[1])[self._experts[name]]
        blocks = read_blocks(raw, tensor.type)
        if name not in self._rotary_dims:
            return blocks
        head_dim, minimum = self._rotary_dims[name], blocks.minimum
        return replace(
            blocks,
            codes=_halves_from_pairs(blocks.codes, head_dim),
            scale=_halves_from_pairs(blocks.scale, head_dim),
            minimum=None if minimum is None else _halves_from_pairs(minimum, head_dim),
        )

    @staticmethod
    def _expert(tensor: GGUFTensor, expert: int, index: Index) -> tuple[GGUFTensor, Index]:
        """A slice of an expert's part, as one of all experts' rows end to end."""
        num_experts, num_rows, width = tensor.shape
        first = expert * num_rows
        rows = slice(first + index[0].start, first + index[0].stop)
        return replace(tensor, shape=(num_experts * num_rows, width)), (rows, index[1])

    def _rope_factors(self, tensor: GGUFTensor | None) -> tuple[float, ...]:
        if tensor is None:
            return ()
        if math.prod(tensor.shape) > MAX_ROPE_FACTORS:
            raise ModelLoadError(
                f"{self.file.path}: {tensor.name} of shape {tensor.shape} is not allowed: "
                f"at most {MAX_ROPE_FACTORS} numbers"
            )
        return tuple(self._dequantized(tensor).reshape(-1).tolist())

    def _dequantized(self, tensor: GGUFTensor, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a tensor in float32 (of a vector, its elements)."""
        raw = self.file.raw(tensor.name)
        if len(tensor.shape) == 1:
            return dequantize(raw, tensor.type).reshape(-1)[rows]
        raw = raw[rows]
        num_rows, row_bytes = raw.shape
        out = aligned_empty((num_rows, *tensor.shape[1:]), np.float32)
        chunk = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, num_rows, chunk):
            # Blocks lie side by side across rows: `gguf` sees one long row, and converts it in one
            # call instead of one for every sixteen rows.
            part = out[start : start + chunk]
            line = raw[start : start + chunk].reshape(1, -1)
            part[...] = dequantize(line, tensor.type).reshape(part.shape)
        return out


def _halves_from_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder whole heads' rows from rotary pairs (0, 1), (2, 3), … to halves (0, D/2), …."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(rows.shape)


def _num_rows(embedding: GGUFTensor | None) -> int:
    if embedding is None:
        raise ModelLoadError("the GGUF file lacks 'token_embd.weight'")
    return embedding.shape[0]


def _checkpoint_dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """float32 if the matrices are, else bfloat16: no quantized type holds more than it does."""
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16"
