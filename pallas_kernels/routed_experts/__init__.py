"""Routed experts: gated MLPs of which each token is multiplied by the few that are chosen for it.

Tokens and the choice go in, tokens come out. No choice is dropped, however many tokens an expert
gets, and what a token's sum is made of depends on no other token. A choice that is no expert's
number counts nothing: padded rows, and experts that another device holds.

All ways sort the choices by their expert, so that each weight is read once for all of its tokens:

- "ragged" (`ragged.py`) multiplies the sorted rows by `jax.lax.ragged_dot`, a grouped kernel on
  TPUs.
- "mosaic_gpu" (`grouped_gpu.py`) is a grouped kernel for Hopper GPUs, where `ragged_dot` multiplies
  every row by every expert. Weights that it does not take go the ragged way.
- "tiles" (`tiles.py`) cuts each expert's rows into tiles and multiplies
  tile by tile: on a CPU, `ragged_dot` takes ten times as long.
- "reference" multiplies every token by every expert.

Shape suffixes: T tokens, K experts chosen for each, X experts, E hidden, F an expert's width.
"""

from __future__ import annotations

from typing import Literal

import jax

from octavo.pallas_kernels.compat import has_mosaic_gpu_kernels
from octavo.pallas_kernels.hopper import is_hopper
from octavo.pallas_kernels.routed_experts.ragged import ragged_experts
from octavo.pallas_kernels.routed_experts.reference import routed_experts_reference
from octavo.pallas_kernels.routed_experts.tiles import tiled_experts
from octavo.pallas_kernels.routed_experts.weights import ExpertWeights, Gated

ExpertBackend = Literal["ragged", "tiles", "mosaic_gpu", "reference"]

__all__ = ["ExpertBackend", "ExpertWeights", "Gated", "backend_for", "routed_experts"]


def backend_for(platform: str, device_kind: str) -> ExpertBackend:
    """The fastest way on a kind of device, as JAX names its platform and itself."""
    if platform == "cpu":
        return "tiles"
    return "mosaic_gpu" if is_hopper(device_kind) and has_mosaic_gpu_kernels() else "ragged"


def routed_experts(
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    weights: ExpertWeights,
    gated: Gated,
    backend: ExpertBackend,
    num_parts: int = 1,
) -> jax.Array:
    """The sum of each token's chosen experts, times their shares.

    Args:
        x: [T, E], float32 or bfloat16.
        chosen: int32 [T, K], each the number of an expert, or else one that counts nothing: X or
            more, or negative. A token chooses no expert twice.
        share: float32 [T, K].
        weights: of the experts.
        gated: of gates and ups [T, F], what `down` is multiplied with.
        backend: which way.
        num_parts: equal parts that all experts are in, of which these are one: tokens choose as few
            of them.

    Returns:
        [T, E] in x's dtype; zeros for a token whose choices count nothing.

    Raises:
        ValueError: shapes that do not fit.
    """
    fits = chosen.shape == share.shape and chosen.shape[:1] == x.shape[:1]
    if x.ndim != 2 or chosen.ndim != 2 or not fits:
        raise ValueError(
            f"x {x.shape}, chosen {chosen.shape}, share {share.shape}: want [T, E] and twice [T, K]"
        )
    if backend == "mosaic_gpu":
        # Imported here: nobody else needs a compiler of kernels.
        from octavo.pallas_kernels.routed_experts import grouped_gpu

        if grouped_gpu.takes(x, weights):
            return grouped_gpu.grouped_experts(x, chosen, share, weights, gated)
        backend = "ragged"
    if backend == "tiles":
        return tiled_experts(x, chosen, share, weights, gated, num_parts)
    way = ragged_experts if backend == "ragged" else routed_experts_reference
    return way(x, chosen, share, weights, gated)
