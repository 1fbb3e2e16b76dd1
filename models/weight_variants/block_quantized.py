"""Block-quantized linear layers in panels, for decode steps of several rows on a CPU.

`models/loading/block_quantized.py` reads them from the checkpoint as one row wants them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from octavo.models.weight_variants.tree import VariantTree, abstract_on
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    BlockQuantizedWeight,
    PanelWeight,
    make_panels,
)


def in_panels(weights: VariantTree) -> VariantTree:
    """Block-quantized weights laid out for steps of several rows. Nothing is donated."""
    laid: VariantTree = jax.tree.map(_make_panels, weights, is_leaf=_is_block_quantized)
    return laid


def abstract_in_panels(weights: VariantTree, mesh: Mesh) -> VariantTree:
    """What `in_panels` makes, as `jax.ShapeDtypeStruct`s with shardings.

    Args:
        weights: of `jax.ShapeDtypeStruct`s, on `mesh`, which is of one device.
    """
    one = partial(abstract_on, mesh, _panels)
    laid: VariantTree = jax.tree.map(one, weights, is_leaf=_is_block_quantized)
    return laid


def _is_block_quantized(weight: Any) -> bool:
    return isinstance(weight, BlockQuantizedWeight)


def _panels(weight: BlockQuantizedWeight) -> PanelWeight:
    """In panels; of a stack, each of its weights is."""
    return (jax.vmap(make_panels) if weight.is_stack else make_panels)(weight)


_make_panels = jax.jit(_panels)
