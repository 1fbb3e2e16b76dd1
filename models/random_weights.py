"""Weights without a checkpoint: for tests, warm-up and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from octavo.models.config import ModelConfig
from octavo.models.parameters import INIT_STDDEV, Init, declare, is_spec


def random_weights(
    config: ModelConfig, dtype: str | jnp.dtype, mesh: Mesh, seed: int = 0
) -> dict[str, Any]:
    """Weights of the right shapes with random values, made on the devices themselves.

    The same seed gives the same values on every mesh, as long as KV heads need no copies.

    Args:
        config: the model, already with KV heads copied for the mesh.
        dtype: of the weights; norms are float32.
        mesh: where they go.
        seed: of the values.

    Returns:
        The tree of `declare(config, dtype)`.
    """
    leaves, tree = jax.tree.flatten(declare(config, jnp.dtype(dtype)), is_leaf=is_spec)
    key = jax.random.key(seed)
    arrays = [
        _initializer(spec.shape, spec.dtype, spec.init, spec.sharding(mesh))(
            jax.random.fold_in(key, number)
        )
        for number, spec in enumerate(leaves)
    ]
    weights: dict[str, Any] = jax.tree.unflatten(tree, arrays)
    return weights


@lru_cache(maxsize=64)
def _initializer(
    shape: tuple[int, ...], dtype: jnp.dtype, init: Init, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """A compiled key -> array; one for all parameters that are alike."""

    def values(key: jax.Array) -> jax.Array:
        if init == "zeros":
            return jnp.zeros(shape, dtype)
        if init == "ones":
            return jnp.ones(shape, dtype)
        return (jax.random.normal(key, shape, jnp.float32) * INIT_STDDEV).astype(dtype)

    return jax.jit(values, out_shardings=sharding)
