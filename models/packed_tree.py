"""Weights of which some are packed: where these stand in a decoder's tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Packed = Mapping[str, Any]
"""Packed weights by their places in the tree of `declare`: "layers", a dict a layer, and "lm_head",
also where the output layer is the embedding table, of which a step looks up a few rows in float32.
Any may be missing."""


def with_packed(weights: Mapping[str, Any], packed: Packed) -> dict[str, Any]:
    """The tree of weights with the packed ones instead of others in their places."""
    layers = tuple(
        {**layer, **some} for layer, some in zip(weights["layers"], packed["layers"], strict=True)
    )
    return {**weights, **packed, "layers": layers}
