"""The one place that knows how JAX versions differ (0.10.2 to 0.12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh


def shard_map(
    function: Callable[..., Any], *, mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without the check of replicated outputs, which loops with traced bounds fail.

    Args: as for `jax.shard_map`.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
