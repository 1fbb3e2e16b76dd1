"""The weights of experts, and what all ways of multiplying by them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.linear_weight import LinearWeight, sliced_from_stack

Gated = Callable[[jax.Array, jax.Array], jax.Array]
"""Elementwise, of gates and ups; it hashes, as it is a static argument."""
Product = Callable[[jax.Array, "jax.Array | LinearWeight", "jax.Array | None"], jax.Array]
"""Rows times a stack of weights, with what is to be added of a stack of biases."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Stacked weights: every leaf's first dimension is the expert.

    Attributes:
        gate, up: [X, E, F]; or a `LinearWeight` whose leaves have X before their own dimensions.
        down: [X, F, E], or likewise.
        gate_bias, up_bias: [X, F]; None where experts add none.
        down_bias: [X, E], or None.
    """

    gate: jax.Array | LinearWeight
    up: jax.Array | LinearWeight
    down: jax.Array | LinearWeight
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    @property
    def num_experts(self) -> int:
        """X, of those that are here."""
        return int(jax.tree.leaves(self.gate)[0].shape[0])

    def stacks(self) -> tuple[jax.Array | LinearWeight, ...]:
        """Those that rows are multiplied by."""
        return self.gate, self.up, self.down

    def map_axes(self, one: Callable[[jax.Array, tuple[str | None, ...]], Any]) -> ExpertWeights:
        """The same tree, of what `one` makes of each leaf and the logical axes it has."""

        def weight(stack: jax.Array | LinearWeight, inputs: str, outputs: str) -> Any:
            # A plain stack has its inputs first, a quantized one last; scales have none.
            is_plain = not isinstance(stack, LinearWeight)
            order = (inputs, outputs) if is_plain else (outputs, inputs)
            # Behind blocks of inputs come their codes.
            axes = ("expert", *order, None)
            return jax.tree.map(lambda leaf: one(leaf, axes[: leaf.ndim]), stack)

        def bias(stack: jax.Array | None, outputs: str) -> Any:
            return None if stack is None else one(stack, ("expert", outputs))

        return ExpertWeights(
            gate=weight(self.gate, "embed", "mlp"),
            up=weight(self.up, "embed", "mlp"),
            down=weight(self.down, "mlp", "embed"),
            gate_bias=bias(self.gate_bias, "mlp"),
            up_bias=bias(self.up_bias, "mlp"),
            down_bias=bias(self.down_bias, "embed"),
        )

    def with_down_bias(self, counts: jax.Array) -> ExpertWeights:
        """The same weights, `down_bias` zero unless it counts."""
        assert self.down_bias is not None
        bias = jnp.where(counts, self.down_bias, jnp.zeros_like(self.down_bias))
        return replace(self, down_bias=bias)

    def of(self, expert: jax.Array) -> ExpertWeights:
        """One expert's weights, without the first dimension."""

        def one(stack: jax.Array | LinearWeight) -> jax.Array | LinearWeight:
            if isinstance(stack, LinearWeight):
                return stack.of_stack(expert)
            return sliced_from_stack(stack, expert)

        weights: ExpertWeights = jax.tree.map(
            one, self, is_leaf=lambda node: isinstance(node, LinearWeight)
        )
        return weights


class Sorted(NamedTuple):
    """Choices by their expert; those that count nothing come last.

    Attributes:
        order: int32 [T · K], the places in the flattened choices.
        expert: int32 [T · K], sorted; X for those that count nothing.
        sizes: int32 [X], choices of each expert.
    """

    order: jax.Array
    expert: jax.Array
    sizes: jax.Array


def sort_choices(chosen: jax.Array, num_experts: int) -> Sorted:
    """Sorts choices [T, K]; equal ones stay in their order."""
    flat = chosen.reshape(-1)
    flat = jnp.where((flat < 0) | (flat > num_experts), num_experts, flat)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    sizes = jnp.zeros((num_experts,), jnp.int32).at[flat].add(1, mode="drop")
    return Sorted(order, flat[order], sizes)


def place_choices(
    by_expert: Sorted, first_place: jax.Array, num_places: int
) -> tuple[jax.Array, jax.Array]:
    """Gives each choice a place of its own: an expert's rows side by side.

    Args:
        first_place: int32 [X], of each expert's rows.
        num_places: in all.

    Returns:
        The place of each flattened choice, int32 [T · K], and the choice in each place, int32
        [num_places]. A choice that counts nothing has some place, and a place that none has the
        choice 0.
    """
    num_choices, num_experts = len(by_expert.order), len(by_expert.sizes)
    expert = jnp.minimum(by_expert.expert, num_experts - 1)
    before = (jnp.cumsum(by_expert.sizes) - by_expert.sizes)[expert]
    place = first_place[expert] + jnp.arange(num_choices, dtype=jnp.int32) - before
    place = jnp.where(by_expert.expert < num_experts, place, num_places)
    choice = jnp.zeros((num_places,), jnp.int32).at[place].set(by_expert.order, mode="drop")
    at = jnp.zeros_like(place).at[by_expert.order].set(jnp.minimum(place, num_places - 1))
    return at, choice


def through(x: jax.Array, weights: ExpertWeights, gated: Gated, product: Product) -> jax.Array:
    """Rows through a gated MLP, or through several: which row meets which, the product decides."""
    gate = product(x, weights.gate, weights.gate_bias)
    up = product(x, weights.up, weights.up_bias)
    return product(gated(gate, up), weights.down, weights.down_bias)


def summed(outs: jax.Array, chosen: jax.Array, share: jax.Array, num_experts: int) -> jax.Array:
    """Each token's sum over its choices, in the order of its choices, in float32.

    Args:
        outs: [T, K, E]; whatever a choice that counts nothing has there is not looked at.

    Returns:
        [T, E] in the dtype of `outs`.
    """
    counts = (chosen >= 0) & (chosen < num_experts)
    weighed = jnp.where(counts[..., None], outs.astype(jnp.float32) * share[..., None], 0.0)
    return weighed.sum(1).astype(outs.dtype)
