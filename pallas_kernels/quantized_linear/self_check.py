"""Int8 products of the device at hand, against exact ones, in a model's own shapes."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.quantized_linear.product import quantized_linear
from octavo.pallas_kernels.quantized_linear.rounding import quantize
from octavo.pallas_kernels.quantized_linear.weight import QuantizedWeight

_ROWS = (1, 128)
_MOST_OUTPUTS, _COMPARED = 16384, 64
"""Outputs that are computed of a weight that has more, and compared."""


def wrong_int8_product(shapes: Iterable[tuple[int, int]]) -> str | None:
    """The first product that is wrong: compilers choose among many, and not all are right.

    On an H100 and an H200 (XLA of JAX 0.11.2) most were twice the right number with
    `--xla_gpu_autotune_level=0`, and without it those of 16 and 32 inputs.

    Args:
        shapes: inputs and outputs of weights.

    Returns:
        Its shape; None if all are right.
    """
    rng = np.random.default_rng(0)
    for inputs, outputs in shapes:
        outputs = min(outputs, _MOST_OUTPUTS)
        values = rng.integers(-127, 128, (outputs, inputs), np.int8)
        weight = QuantizedWeight(
            values=jnp.asarray(values), scale=jnp.ones(outputs), dtype=jnp.dtype("float32")
        )
        some = values[:_COMPARED].astype(np.float64)
        for rows in _ROWS:
            x = rng.standard_normal((rows, inputs)).astype(np.float32)
            rounded, scale = map(np.asarray, quantize(jnp.asarray(x), "int8", 1))
            exact = rounded.astype(np.float64) @ some.T * scale[:, None]
            got = np.asarray(jax.jit(quantized_linear)(x, weight))[:, :_COMPARED]
            if not np.allclose(got, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max()):
                return f"{rows} x {inputs} x {outputs}"
    return None
