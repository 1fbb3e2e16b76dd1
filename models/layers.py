"""The parts a decoder is made of, each a pure function.

Shape suffixes: T tokens (rows of a step), E hidden, F MLP, D head dimension, H heads.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from octavo.models.rope import Rope, RopeScaling
from octavo.pallas_kernels.compat import device_kind, laid_out_row_major
from octavo.pallas_kernels.linear_weight import LinearWeight, linear_weight

Activation = Literal["silu", "gelu_tanh", "relu", "relu2"]
Rotary = tuple[jax.Array, ...]
"""What `rotary_tables` makes of a step's positions."""


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / rms(x) · weight over the last dimension, in float32.

    Args:
        x: [..., E] in the activation dtype.
        weight: [E] float32, the whole multiplier (no offset left to add); None is one of ones.
        eps: added to the mean square.

    Returns:
        [..., E] in x's dtype.
    """
    x_f32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    normed = x_f32 * jax.lax.rsqrt(mean_square + jnp.float32(eps))
    if weight is None:
        return normed.astype(x.dtype)
    per_feature = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (normed * per_feature).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """(x - mean(x)) / std(x) · weight + bias over the last dimension, in float32.

    Args and returns: as for `rms_norm`; bias [E] float32, None for none.
    """
    x_f32 = x.astype(jnp.float32)
    centered = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    lead = (1,) * (x.ndim - 1)
    out = centered * jax.lax.rsqrt(variance + jnp.float32(eps))
    out = out * weight.astype(jnp.float32).reshape(lead + weight.shape)
    if bias is not None:
        out = out + bias.astype(jnp.float32).reshape(lead + bias.shape)
    return out.astype(x.dtype)


def linear(x: jax.Array, weight: jax.Array | LinearWeight, num_inputs: int = 1) -> jax.Array:
    """x · weight, contracting x's last `num_inputs` dimensions with weight's first ones.

    float32 stays float32 on every device: no TF32 or bfloat16 passes.

    Args:
        x: [T, *inputs].
        weight: [*inputs, *outputs], of x's dtype; or another variant of it.
        num_inputs: how many dimensions are contracted.

    Returns:
        [T, *outputs] in x's dtype.
    """
    return linear_weight(weight).apply(x, num_inputs)


def row_major(x: jax.Array) -> jax.Array:
    """x, which on a TPU lies in the order of its dimensions.

    Left to itself, XLA puts the tokens of `wqkv`'s product last from 128 of them on, and copies the
    weight in every dispatch, so that its inputs come last, too.
    """
    if not device_kind().startswith("TPU"):
        return x
    return laid_out_row_major(x)


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The gate's nonlinearity, elementwise."""
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "relu":
        return jax.nn.relu(x)
    if activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=True)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """x · scale, rounded to x's dtype once: the scale keeps its digits."""
    if scale == 1.0:
        return x
    return (x.astype(jnp.float32) * jnp.float32(scale)).astype(x.dtype)


def softcap(logits: jax.Array, cap: float) -> jax.Array:
    """cap · tanh(logits / cap): squeezes logits into (-cap, cap)."""
    scale = jnp.asarray(cap, logits.dtype)
    return jnp.tanh(logits / scale) * scale


def rotary_tables(positions: jax.Array, rope: Rope, head_dim: int) -> Rotary:
    """Cosines and sines of every token's rotation angles.

    Args:
        positions: [T] int32.
        rope: base and scaling of the frequencies.
        head_dim: D.

    Returns:
        cos, sin: [T, D / 2] float32. If the temperature of queries depends on their positions, what
        multiplies them, [T] float32, is a third.
    """
    frequencies = jnp.asarray(rotary_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.amplitude != 1.0:
        # What is not rotated is not multiplied either: its cosine stays 1.
        amplitudes = np.ones(head_dim // 2, np.float32)
        amplitudes[: rope.rotary_dim(head_dim) // 2] = rope.amplitude
        cos, sin = cos * amplitudes[None, :], sin * amplitudes[None, :]
    if rope.temperature is None:
        return cos, sin
    counted = (positions + rope.temperature.first).astype(jnp.float32)
    spans = jnp.floor(counted / jnp.float32(rope.temperature.span))
    return cos, sin, 1.0 + jnp.float32(rope.temperature.beta) * jnp.log1p(spans)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the halves of each head against each other.

    Args:
        x: [T, H, D].
        cos, sin: [T, D / 2] float32.

    Returns:
        [T, H, D] in x's dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def rotary_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians a position for each pair of dimensions: [D / 2] float32, computed on the host.

    Pairs that are not rotated come last, and have none.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    whole = head_dim if rope.proportional else rotary_dim
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / whole
    frequencies = rope.theta**-exponents
    if rope.scaling is not None:
        frequencies = _scaled(frequencies, rope.scaling, rope.theta)
    frequencies = np.pad(frequencies, (0, (head_dim - rotary_dim) // 2))
    return frequencies.astype(np.float32)


def _scaled(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / np.asarray(scaling.factors, np.float64)
    if scaling.kind == "longrope":
        return frequencies / np.asarray(scaling.long_factors, np.float64)
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(len(frequencies), scaling, theta)
        return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
    # llama3: wavelengths longer than the original context are stretched by the whole factor, those
    # short against it not at all, with a linear blend between.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1.0 - blend) * frequencies / scaling.factor + blend * frequencies


def _kept_by_yarn(num_frequencies: int, scaling: RopeScaling, theta: float) -> np.ndarray:
    """How much of each frequency stays as it is: all of those that turn more often than `beta_fast`
    times over the original context, nothing of those that turn less than `beta_slow` times.

    Source: Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
    """

    def index_of(turns: float) -> float:
        """The frequency that turns so often over the original context."""
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return num_frequencies * math.log(wavelength) / math.log(theta)

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    width = last - first if last != first else 0.001
    return 1.0 - np.clip((np.arange(num_frequencies) - first) / width, 0.0, 1.0)
