"""The weight of a linear layer, whatever its variant: all that a model's functions know of it.

A variant is a class of this interface, registered as a pytree: dense, eight bits wide
(`quantized_linear`), or one of those that only CPUs read (`cpu/`). A dense weight stands in the
tree of weights as a plain array, so that checkpoints, shardings and layouts see arrays;
`linear_weight` and `embedding_table` give it the interface where it is used.

Shape suffixes: T tokens (rows of a step), V vocabulary, E hidden.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


class LinearWeight(ABC):
    """A weight that rows of activations are multiplied by."""

    __slots__ = ()

    @abstractmethod
    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        """x · weight, contracting x's last dimensions with the weight's inputs.

        float32 stays float32 on every device: no TF32 or bfloat16 passes.

        Args:
            x: [T, *inputs].
            num_inputs: how many dimensions are contracted.
            out_dtype: of the result; None is x's.

        Returns:
            [T, *outputs].
        """

    def of_stack(self, number: jax.Array) -> LinearWeight:
        """One of a stack of such weights, whose arrays have a dimension before their own.

        Args:
            number: int32, which.
        """
        one: LinearWeight = jax.tree.map(lambda leaf: sliced_from_stack(leaf, number), self)
        return one

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, or of what their `jax.ShapeDtypeStruct`s announce."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


class EmbeddingTable(LinearWeight):
    """The weight of an output layer whose rows are looked up, too: its outputs are tokens."""

    __slots__ = ()

    @abstractmethod
    def rows(self, ids: jax.Array) -> jax.Array:
        """Some tokens' embeddings [T, E]; ids int32[T], clipped to what there is."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DenseWeight(LinearWeight):
    """A weight as one array.

    Attributes:
        array: [*inputs, *outputs], of the activations' dtype.
    """

    array: jax.Array

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        contracted = (tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs)))
        return dense_product(x, self.array, contracted, out_dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DenseTable(EmbeddingTable):
    """An embedding table as one array; a product with it is one with its transpose.

    Attributes:
        array: [V, E], of the activations' dtype.
    """

    array: jax.Array

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        return dense_product(x, self.array, ((1,), (1,)), out_dtype)

    def rows(self, ids: jax.Array) -> jax.Array:
        return jnp.take(self.array, ids, axis=0, mode="clip")


def sliced_from_stack(stack: jax.Array, number: jax.Array) -> jax.Array:
    """stack[number], without its first dimension; a copy, as far as XLA makes one."""
    return jax.lax.dynamic_index_in_dim(stack, number, 0, keepdims=False)


def linear_weight(weight: jax.Array | LinearWeight) -> LinearWeight:
    """A linear layer's weight as it stands in the tree of weights."""
    return weight if isinstance(weight, LinearWeight) else DenseWeight(weight)


def embedding_table(table: jax.Array | EmbeddingTable) -> EmbeddingTable:
    """An embedding table as it stands in the tree of weights."""
    return table if isinstance(table, EmbeddingTable) else DenseTable(table)


def dense_product(
    x: jax.Array,
    weight: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    out_dtype: Any | None,
) -> jax.Array:
    """x · weight, both dense; float32 stays float32.

    Args:
        contracted: dimensions of x and of the weight, as `jax.lax.dot_general` has them.
        out_dtype: of the result; None is x's.
    """
    is_float32 = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        weight,
        dimension_numbers=(contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=x.dtype if out_dtype is None else out_dtype,
    )
