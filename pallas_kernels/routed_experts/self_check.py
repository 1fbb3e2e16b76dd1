"""Compares a kernel of routed experts with the ragged products on the device at hand."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.routed_experts import (
    ExpertBackend,
    ExpertWeights,
    Gated,
    routed_experts,
)

TOLERANCE = 2e-2
"""Of the largest sum: bfloat16 rounds inputs, what gates make, and sums to 8 bits."""
_EXPERTS, _CHOSEN = 4, 2
"""As few as have everything: one that most tokens choose, and one that none does."""
_TOKENS = (5, 300)
"""Few tokens an expert and many, which a kernel may divide in other ways."""


def check_experts(
    backend: ExpertBackend, hidden_size: int, width: int, gated: Gated, *, has_biases: bool
) -> float | None:
    """Runs bfloat16 tokens through a backend and through the ragged products.

    Args:
        hidden_size: E.
        width: F, of the features that a device has of an expert.
        gated: see `routed_experts`.
        has_biases: experts have them.

    Returns:
        The largest difference, as a part of the largest sum, of the first case that exceeds the
        tolerance or is NaN; None if the backend is right.

    Raises:
        Exception: whatever the compiler or the device raises.
    """
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    def stack(inputs: int, outputs: int) -> jax.Array:
        return normal(_EXPERTS, inputs, outputs) / inputs**0.5

    weights = ExpertWeights(
        gate=stack(hidden_size, width),
        up=stack(hidden_size, width),
        down=stack(width, hidden_size),
        gate_bias=normal(_EXPERTS, width) if has_biases else None,
        up_bias=normal(_EXPERTS, width) if has_biases else None,
        down_bias=normal(_EXPERTS, hidden_size) if has_biases else None,
    )
    for num_tokens in _TOKENS:
        rng = np.random.default_rng(num_tokens)
        # The first expert is everybody's, the last one nobody's; each seventh token counts nothing.
        second = rng.integers(1, _EXPERTS - 1, num_tokens, np.int32)
        chosen = np.stack([np.zeros_like(second), second], axis=1)
        chosen[::7] = -1
        share = jnp.full((num_tokens, _CHOSEN), 1 / _CHOSEN, jnp.float32)
        x = jax.random.normal(jax.random.key(num_tokens), (num_tokens, hidden_size), jnp.bfloat16)

        def run(
            backend: ExpertBackend,
            x: jax.Array = x,
            chosen: np.ndarray = chosen,
            share: jax.Array = share,
        ) -> np.ndarray:
            multiply = jax.jit(partial(routed_experts, gated=gated, backend=backend))
            return np.asarray(multiply(x, chosen, share, weights), np.float32)

        got, want = run(backend), run("ragged")
        difference = float(np.abs(got - want).max() / np.abs(want).max())
        if not difference <= TOLERANCE:  # nor is NaN
            return difference
    return None
