"""What a pool's numbers are, and how they are stored.

XLA's CPU backend scatters narrow floats by way of wider ones, and copies the whole pool to do it;
seeing a pool of integers as floats copies it too. So plain XLA stores bfloat16 and fp8 as unsigned
integers of their width, and only what was gathered is seen as floats. The kernels for TPU and GPU
take floats as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.quantized_linear.rounding import Quantization

KV_DTYPES = {
    "float32": jnp.dtype(jnp.float32),
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "int8": jnp.dtype(jnp.int8),
    "fp8": jnp.dtype(jnp.float8_e4m3fn),
}
"""Name of `--kv-cache-dtype` -> dtype of the numbers."""
SCALE_DTYPE = jnp.dtype(jnp.float32)

_BITS = {KV_DTYPES["bfloat16"]: jnp.dtype(jnp.uint16), KV_DTYPES["fp8"]: jnp.dtype(jnp.uint8)}
_NUMBERS = {bits: numbers for numbers, bits in _BITS.items()}


def kv_dtype_name(dtype: Any) -> str:
    """The name in `KV_DTYPES` of a dtype, stored or not."""
    numbers = number_dtype(dtype)
    return next(name for name, known in KV_DTYPES.items() if known == numbers)


def stored_dtype(dtype: Any) -> jnp.dtype:
    """The dtype that plain XLA's pools hold numbers of `dtype` in."""
    return _BITS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def number_dtype(stored: Any) -> jnp.dtype:
    """The dtype of the numbers in a pool whose array is of dtype `stored`."""
    return _NUMBERS.get(jnp.dtype(stored), jnp.dtype(stored))


def to_stored(numbers: jax.Array, stored: Any) -> jax.Array:
    """Numbers, rounded to the pool's and as its array holds them."""
    narrow = numbers.astype(number_dtype(stored))
    return narrow if narrow.dtype == stored else jax.lax.bitcast_convert_type(narrow, stored)


def to_float32(stored: jax.Array) -> jax.Array:
    """What a pool's array holds, as float32, before scales."""
    numbers = number_dtype(stored.dtype)
    if numbers != stored.dtype:
        stored = jax.lax.bitcast_convert_type(stored, numbers)
    return stored.astype(jnp.float32)


def kv_quantization(dtype: Any) -> Quantization | None:
    """The quantization that a pool of `dtype`, stored or not, needs scales for; None for none."""
    numbers = number_dtype(dtype)
    if numbers == KV_DTYPES["int8"]:
        return "int8"
    return "fp8" if numbers == KV_DTYPES["fp8"] else None


def bytes_per_head(dtype: Any, head_dim: int, num_scales: int = 1) -> int:
    """Bytes of one token's key or value in one head, its scale counted.

    Args:
        num_scales: places that the pool keeps for it, one of them used.
    """
    scale = 0 if kv_quantization(dtype) is None else num_scales * SCALE_DTYPE.itemsize
    return head_dim * jnp.dtype(dtype).itemsize + scale
