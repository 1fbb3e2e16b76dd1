"""How checkpoint tensors become parameters, slice by slice.

A block names the tensors of each of its parameters, and says by one of these layouts how they lie
in it. Names and layouts on a checkpoint's side are Hugging Face's, the common tongue: linear
weights are [out, in], query heads of one KV head are adjacent. A GGUF's names stand beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from octavo.models.loading.aligned import aligned_empty

Index = tuple[slice, ...]
"""One slice a dimension, with start and stop set and step 1."""


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Where the rows of a head lie on disk.

    In memory, row i of a head is rotated with row i + size / 2. Rows that are not rotated come last
    in both halves, where rotary frequencies are zero.

    Attributes:
        size: rows of a head.
        num_rotated: how many of them are rotated, which come first on disk.
        pairs: on disk, rows that are rotated together lie side by side, not half of them apart.
        num_others: rows of something else that follow each head's, as they are.
        num_before: rows of something else that come before each head's, as they are.
    """

    size: int
    num_rotated: int
    pairs: bool
    num_others: int = 0
    num_before: int = 0

    @property
    def num_rows(self) -> int:
        """Of a head, with what comes before and what follows."""
        return self.num_before + self.size + self.num_others

    def stored_rows(self) -> np.ndarray:
        """Which row on disk each row in memory is."""
        before, head, following = np.split(
            np.arange(self.num_rows), [self.num_before, self.num_before + self.size]
        )
        rotated, rest = np.split(head, [self.num_rotated])
        halves = (rotated[::2], rotated[1::2]) if self.pairs else np.split(rotated, 2)
        others = np.split(rest, 2)
        return np.concatenate([before, halves[0], others[0], halves[1], others[1], following])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a checkpoint, or some rows of one.

    Attributes:
        name: Hugging Face's; in a layer, what follows "model.layers.N.".
        gguf: llama.cpp's; in a layer, what follows "blk.N.".
        shape: on disk; of the rows that it has, if it is a part.
        rotary_dim: size of the heads that its rows are queries or keys of, which some GGUF files
            store for rotary embeddings of adjacent pairs; None for other tensors.
        order: of the heads that its rows are of; None if rows lie as they are.
        first_row: of a part of a stored tensor, where it begins there.
        stored_rows: of a part, all rows of the stored tensor; None if it is whole.
        expert: which part it is of a GGUF's tensor, whose first dimension is the expert; None for
            other tensors.
    """

    name: str
    gguf: str
    shape: tuple[int, ...]
    rotary_dim: int | None = None
    order: HeadOrder | None = None
    first_row: int = 0
    stored_rows: int | None = None
    expert: int | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what is stored under its name."""
        return self.shape if self.stored_rows is None else (self.stored_rows, *self.shape[1:])

    @property
    def is_stored_as_it_is(self) -> bool:
        """Whether nothing else is stored under its name, nor in another order."""
        return self.stored_rows is None and self.order is None

    def read(self, source: Source, prefix: str, index: Index) -> np.ndarray:
        """A slice of it; of whole heads, if they have an order. It may view the file."""
        if self.stored_rows is not None:
            first, last = index[0].start + self.first_row, index[0].stop + self.first_row
            index = (slice(first, last), *index[1:])
        return self._ordered(source.read(prefix + self.name, index))

    def of_stored(self, stored: np.ndarray) -> np.ndarray:
        """Its rows, of all that are stored under its name."""
        return self._ordered(stored[self.first_row : self.first_row + self.shape[0]])

    def _ordered(self, rows: np.ndarray) -> np.ndarray:
        if self.order is None:
            return rows
        heads = rows.reshape(-1, self.order.num_rows, *rows.shape[1:])
        return heads[:, self.order.stored_rows()].reshape(rows.shape)


class Source(Protocol):
    """What a layout reads from: an open checkpoint, see `models.loading.tensors.TensorSource`."""

    norms_include_offset: bool

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of one tensor as float32, float16 or bfloat16; it may view the file."""
        ...


class TensorLayout(Protocol):
    """How the tensors of one parameter lie in it."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the parameter is made of, in the order of its outputs."""
        ...

    @property
    def num_interleaved(self) -> int:
        """Groups of outputs that hold a part of each tensor in turn; 1 puts tensors end to end."""
        ...

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        """A slice of the parameter.

        Args:
            source: the checkpoint.
            prefix: how the names of the layer's tensors begin.
            index: the slice, in the parameter's own dimensions.
            dtype: of the result.

        Returns:
            An array of the slice's shape; it may view the file.
        """
        ...


@dataclass(frozen=True, slots=True)
class OfOneTensor:
    """What layouts of a single tensor have in common."""

    tensor: Tensor
    num_interleaved = 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)


@dataclass(frozen=True, slots=True)
class Whole(OfOneTensor):
    """A tensor as it is."""

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        return self.tensor.read(source, prefix, index).astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class NormWeight(OfOneTensor):
    """A norm's multiplier.

    Attributes:
        offset: added to what is stored, unless the checkpoint's format includes it already.
    """

    offset: float

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        offset = (
            np.zeros((), dtype) if source.norms_include_offset else np.asarray(self.offset, dtype)
        )
        return self.tensor.read(source, prefix, index).astype(dtype) + offset


@dataclass(frozen=True, slots=True)
class Transposed(OfOneTensor):
    """A linear weight [out, in] as [in, out]."""

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        out = _empty(index, dtype)
        out[...] = self.tensor.read(source, prefix, index[::-1]).T
        return out


@dataclass(frozen=True, slots=True)
class Stacked:
    """Linear weights [out, in] of equal shapes as [in, n, out], or biases [out] as [n, out]."""

    tensors: tuple[Tensor, ...]
    num_interleaved = 1

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        out = _empty(index, dtype)
        for row, tensor in enumerate(self.tensors[index[-2]]):
            # A bias is its own transpose.
            part = tensor.read(source, prefix, (index[-1], *index[:-2]))
            out[..., row, :] = part.T
        return out


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Linear weights [out, in] of experts as [X, in, out]."""

    tensors: tuple[Tensor, ...]
    num_interleaved = 1

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        out = _empty(index, dtype)
        for row, tensor in enumerate(self.tensors[index[0]]):
            out[row] = tensor.read(source, prefix, index[:0:-1]).T
        return out


@dataclass(frozen=True, slots=True)
class ExpertRows(OfOneTensor):
    """Of a tensor of all experts' linear weights [X, rows, in], some rows as [X, in, out].

    Attributes:
        first: of those rows.
    """

    first: int

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        experts, inputs, rows = index
        stored = slice(self.first + rows.start, self.first + rows.stop)
        out = _empty(index, dtype)
        out[...] = self.tensor.read(source, prefix, (experts, stored, inputs)).swapaxes(1, 2)
        return out


@dataclass(frozen=True, slots=True)
class EverySecond(OfOneTensor):
    """Of a tensor's last dimension, every second number.

    Attributes:
        first: 0 or 1.
    """

    first: int

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        *others, last = index
        both = (*others, slice(2 * last.start, 2 * last.stop))
        out = _empty(index, dtype)
        out[...] = self.tensor.read(source, prefix, both)[..., self.first :: 2]
        return out


@dataclass(frozen=True, slots=True)
class LastPart(OfOneTensor):
    """Of a tensor's last dimension, the numbers from one on.

    Attributes:
        first: that one.
    """

    first: int

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        *others, last = index
        part = slice(self.first + last.start, self.first + last.stop)
        return self.tensor.read(source, prefix, (*others, part)).astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class Reshaped(OfOneTensor):
    """A tensor as one dimension, whatever it has on disk."""

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        whole = tuple(slice(0, size, 1) for size in self.tensor.shape)
        return self.tensor.read(source, prefix, whole).reshape(-1)[index[0]].astype(dtype)


@dataclass(frozen=True, slots=True)
class ExpertVectors:
    """Biases [out] of experts as [X, out]."""

    tensors: tuple[Tensor, ...]
    num_interleaved = 1

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        out = _empty(index, dtype)
        for row, tensor in enumerate(self.tensors[index[0]]):
            out[row] = tensor.read(source, prefix, index[1:])
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedHeads:
    """Queries, keys and values fused by KV head: [in, Hkv, G + 2, D], or a bias [Hkv, G + 2, D].

    For each KV head come the queries that read it, then its key, then its value.

    Attributes:
        q: queries [Hq · D, in], or [Hq · D]; with gates, each behind its query, twice as many rows.
        kv: keys and values alike, [Hkv / copies · D, in]; none where a layer has no own.
        num_kv_heads: copies counted.
        num_queries: G, queries a KV head, gates counted.
        head_dim: D.
        copies: adjacent KV heads that are copies of one on disk.
    """

    q: Tensor
    kv: tuple[Tensor, ...]
    num_kv_heads: int
    num_queries: int
    head_dim: int
    copies: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q, *self.kv)

    @property
    def num_interleaved(self) -> int:
        return self.num_kv_heads

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        *inputs, heads, rows, dims = index
        count = heads.stop - heads.start

        def read(tensor: Tensor, first: int, last: int) -> np.ndarray:
            span = slice(first * self.head_dim, last * self.head_dim)
            part = tensor.read(source, prefix, (span, *inputs))
            return part.reshape(last - first, self.head_dim, *part.shape[1:])

        q = read(self.q, heads.start * self.num_queries, heads.stop * self.num_queries)
        parts = [q.reshape(count, self.num_queries, *q.shape[1:])]
        first, last = heads.start // self.copies, -(-heads.stop // self.copies)
        copied = np.arange(heads.start, heads.stop) // self.copies - first
        parts += [read(tensor, first, last)[copied][:, None] for tensor in self.kv]
        full = np.concatenate(parts, axis=1)  # [heads, G + 2, D], then inputs if any
        out = _empty(index, dtype)
        out[...] = np.moveaxis(full, -1, 0)[:, :, rows, dims] if inputs else full[:, rows, dims]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMatrices(OfOneTensor):
    """Of each head's rows of a linear weight [H · R, in], some: [H, rows, in], or [H, in, rows].

    Attributes:
        head_rows: R, rows that a head has on disk.
        first, num_rows: which of them.
        transposed: whether inputs come before the rows.
    """

    head_rows: int
    first: int
    num_rows: int
    transposed: bool

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        heads, rows, inputs = (index[0], index[2], index[1]) if self.transposed else index
        span = slice(heads.start * self.head_rows, heads.stop * self.head_rows)
        part = self.tensor.read(source, prefix, (span, inputs))
        full = part.reshape(-1, self.head_rows, part.shape[1])
        full = full[:, self.first + rows.start : self.first + rows.stop]
        out = _empty(index, dtype)
        out[...] = full.swapaxes(1, 2) if self.transposed else full
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadColumns(OfOneTensor):
    """An output projection [E, Hq · D] as [Hkv, G, D, E]."""

    num_queries: int
    head_dim: int

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        width = self.num_queries * self.head_dim
        columns = slice(index[0].start * width, index[0].stop * width)
        part = self.tensor.read(source, prefix, (index[3], columns))
        full = part.reshape(part.shape[0], -1, self.num_queries, self.head_dim)
        out = _empty(index, dtype)
        out[...] = np.moveaxis(full, 0, -1)[:, index[1], index[2]]
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHead(OfOneTensor):
    """One number a query head [Hq] as [Hkv, G]."""

    num_queries: int

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        span = slice(index[0].start * self.num_queries, index[0].stop * self.num_queries)
        part = self.tensor.read(source, prefix, (span,)).astype(dtype)
        return part.reshape(-1, self.num_queries)[:, index[1]]


@dataclass(frozen=True, slots=True)
class Taps(OfOneTensor):
    """A convolution's taps by channel, [C, 1, W] as [C, W]."""

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        part = self.tensor.read(source, prefix, (index[0], slice(0, 1, 1), index[1]))
        return part[:, 0].astype(dtype)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Tensors that have some rows for each head, side by side: linear weights [H · D, in] as
    [in, H, sum of D], a convolution's taps [H · D, 1, W] as [H, sum of D, W], or numbers [H · D] as
    [H, sum of D].

    Attributes:
        tensors: parts of a head, in the order of its rows.
        num_heads: H.
    """

    tensors: tuple[Tensor, ...]
    num_heads: int

    @property
    def num_interleaved(self) -> int:
        return self.num_heads

    def read(self, source: Source, prefix: str, index: Index, dtype: Any) -> np.ndarray:
        is_linear = len(self.tensors[0].shape) == 2
        inputs, (heads, rows, *taps) = (index[:1], index[1:]) if is_linear else ((), index)
        rest = inputs if is_linear else ((slice(0, 1, 1), *taps) if taps else ())
        parts = []
        for tensor in self.tensors:
            size = tensor.shape[0] // self.num_heads
            span = slice(heads.start * size, heads.stop * size, 1)
            part = tensor.read(source, prefix, (span, *rest))
            last = part.shape[-1:] if rest else ()
            parts.append(part.reshape(heads.stop - heads.start, size, *last))
        full = np.concatenate(parts, axis=1)[:, rows]
        out = _empty(index, dtype)
        out[...] = np.moveaxis(full, -1, 0) if is_linear else full
        return out


def _empty(index: Index, dtype: Any) -> np.ndarray:
    return aligned_empty([part.stop - part.start for part in index], dtype)


Layout = TypeVar("Layout")


def with_tensors(layout: Layout, change: Callable[[Tensor], Tensor]) -> Layout:
    """A layout whose tensors are other ones."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    fields = {
        field.name: changed(getattr(layout, field.name))
        for field in dataclasses.fields(layout)  # type: ignore[arg-type]
    }
    return type(layout)(**fields)
