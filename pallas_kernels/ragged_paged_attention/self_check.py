"""Compares a kernel with the reference on the device at hand, in the engine's own shapes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.ragged_paged_attention import ragged_paged_attention
from octavo.pallas_kernels.ragged_paged_attention.backends import (
    AttentionShape,
    Backend,
)
from octavo.pallas_kernels.ragged_paged_attention.batch import AttentionParams
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import kv_dtype_name
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Outputs are averages of unit normals; bfloat16 rounds weights and outputs to 8 bits."""
_ROWS = [(1, 150), (1, 1), (1, 33), (7, 40), (20, 20)]


def check_backend(
    backend: Backend, shape: AttentionShape, params: AttentionParams, *, has_sinks: bool = False
) -> float | None:
    """Runs decode rows and prefill chunks through a backend and the reference.

    Args:
        has_sinks: each head has a logit in the softmax's denominator.

    Returns:
        The largest difference if it exceeds the tolerance, None if the backend is right.

    Raises:
        Exception: whatever the compiler or the device raises.
    """
    page, dtype = shape.page_size, np.dtype(shape.q_dtype).name
    rng = np.random.default_rng(0)
    q, k, v, kv, batch = make_case(
        rng,
        _ROWS,
        num_tokens=40,
        num_rows=8,
        heads=(shape.num_heads, shape.num_kv_heads),
        head_dim=shape.head_dim,
        page_size=page,
        table=-(-256 // page),
        dtype=dtype,
        kv_dtype=kv_dtype_name(shape.kv_dtype),
        layout=pool_layout(backend, shape.head_dim, page, shape.value_size),
        as_bits=backend in ("xla", "reference"),
        value_size=shape.value_size,
    )
    sinks = jnp.asarray(rng.standard_normal(shape.num_heads), jnp.float32) if has_sinks else None

    def run(backend: Backend) -> np.ndarray:
        attend = partial(ragged_paged_attention, params=params, sinks=sinks, backend=backend)
        out, _ = jax.jit(attend)(q, k, v, kv, batch)
        return np.asarray(out, np.float32)[:30]

    worst = float(np.abs(run(backend) - run("reference")).max())
    return None if worst <= TOLERANCE[dtype] else worst
