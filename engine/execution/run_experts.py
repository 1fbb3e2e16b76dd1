"""Routed experts as the decoder calls them: of a step's live tokens, over the mesh's devices.

Each device holds whole experts, or, where their number does not divide, a part of every expert's
features. All devices know all tokens: each computes what its own weights make of them, and the
results are summed.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from octavo.pallas_kernels.compat import shard_map
from octavo.pallas_kernels.routed_experts import (
    ExpertBackend,
    ExpertWeights,
    Gated,
    routed_experts,
)
from octavo.sharding.mesh import TENSOR_AXIS
from octavo.sharding.rules import DEFAULT_RULES

RunLive = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, ExpertWeights, Gated], jax.Array]

NOBODY = -1
"""Chosen by a token that does not count."""


def experts_over_mesh(mesh: Mesh, backend: ExpertBackend) -> RunLive:
    """Experts of the tokens that count.

    Args:
        mesh: the device mesh, over which experts are split as `DEFAULT_RULES` say.
        backend: which implementation.

    Returns:
        `run(live, x, chosen, share, weights, gate) -> out`: `live` bool [T], the others as for
        `routed_experts`. Zeros come of a token that is not live.
    """

    def run(
        live: jax.Array,
        x: jax.Array,
        chosen: jax.Array,
        share: jax.Array,
        weights: ExpertWeights,
        gate: Gated,
    ) -> jax.Array:
        chosen = jnp.where(live[:, None], chosen, NOBODY)
        if mesh.size == 1:
            return routed_experts(x, chosen, share, weights, gate, backend)
        # As `declare` and `quantize_parameter` have put them there.
        specs = weights.map_axes(
            lambda leaf, axes: DEFAULT_RULES.sharding(mesh, axes, leaf.shape).spec
        )
        gate_spec = jax.tree.leaves(specs.gate, is_leaf=lambda node: isinstance(node, P))[0]
        is_split, by_expert = TENSOR_AXIS in gate_spec, gate_spec[:1] == (TENSOR_AXIS,)

        def local(
            x: jax.Array, chosen: jax.Array, share: jax.Array, weights: ExpertWeights
        ) -> jax.Array:
            index = jax.lax.axis_index(TENSOR_AXIS)
            if by_expert:
                # What lies before the device's own experts or behind them counts nothing here.
                own = chosen - index * weights.num_experts
                chosen = jnp.where(chosen == NOBODY, NOBODY, own)
            elif weights.down_bias is not None and is_split:
                weights = weights.with_down_bias(index == 0)
            num_parts = mesh.shape[TENSOR_AXIS] if by_expert else 1
            out = routed_experts(x, chosen, share, weights, gate, backend, num_parts)
            return jax.lax.psum(out, TENSOR_AXIS) if is_split else out

        whole = (P(), P(), P())
        return shard_map(local, mesh=mesh, in_specs=(*whole, specs), out_specs=P())(
            x, chosen, share, weights
        )

    return run
