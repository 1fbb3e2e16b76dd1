"""Weights without a checkpoint: for tests, and to measure a model's shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from octavo.models.config import ModelConfig
from octavo.models.parameters import INIT_STDDEV, Init, declare, is_spec
from octavo.models.quantization import is_quantized, path_keys, quantize_parameter
from octavo.pallas_kernels.quantized_linear import Quantization


def random_weights(
    config: ModelConfig,
    dtype: str | jnp.dtype,
    mesh: Mesh,
    seed: int = 0,
    quantization: Quantization | None = None,
) -> dict[str, Any]:
    """Weights of the right shapes with random values, made on the devices themselves.

    The same seed gives the same values on every mesh, as long as KV heads need no copies.

    Args:
        config: the model, already with KV heads copied for the mesh.
        dtype: of the weights; norms are float32.
        mesh: where they go.
        seed: of the values.
        quantization: of linear layers; each is rounded as it is made.

    Returns:
        The tree of `declare(config, dtype)`; see `octavo.models.quantization`.
    """
    leaves, tree = jax.tree.flatten_with_path(declare(config, jnp.dtype(dtype)), is_leaf=is_spec)
    key = jax.random.key(seed)
    arrays: list[Any] = []
    for number, (keys, spec) in enumerate(leaves):
        make = _initializer(spec.shape, spec.dtype, spec.init, spec.sharding(mesh))
        array, path = make(jax.random.fold_in(key, number)), path_keys(keys)
        if quantization is not None and is_quantized(path, config):
            quantized = quantize_parameter(path, spec, array, quantization, mesh)
            array = jax.block_until_ready(quantized)  # before the next: `array` is freed
        arrays.append(array)
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
