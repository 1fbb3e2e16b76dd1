"""A gated short convolution over a row's tokens.

Shape suffixes: T tokens, E hidden, W width.

Source: LFM2, Liquid AI 2025, as transformers' `Lfm2ShortConv` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.state_rows import StateRows, causal_conv
from octavo.models.cache_spec import RecurrentState, StateArray
from octavo.models.checks import check_flag, check_size, is_integer
from octavo.models.layers import Rotary, linear
from octavo.models.parameters import param
from octavo.models.tensor_layouts import Stacked, Taps, Tensor, Transposed, Whole

NUM_INPUTS = {"conv_in": 1, "conv_out": 1}
"""Linear layer -> leading dimensions of its weight that the product contracts."""
MAX_WIDTH = 64
"""Most taps of a convolution: far more than any that exists."""


def check_width(name: str, width: int) -> None:
    """Refuse a convolution's width that keeps nothing, or is absurd.

    Raises:
        ModelLoadError: naming it.
    """
    if not is_integer(width, 2, MAX_WIDTH):
        raise ModelLoadError(
            f"{name} = {shorten(width)} is not allowed: an integer from 2 to {MAX_WIDTH}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """out(after · conv(before · x)), all three of one linear layer.

    Attributes:
        size: channels; E.
        width: W, tokens that the convolution sees, the newest included.
        bias: linear layers and convolution add one.
    """

    size: int
    width: int
    bias: bool = False

    def __post_init__(self) -> None:
        check_size("size", self.size)
        check_width("conv_L_cache", self.width)
        check_flag("conv_bias", self.bias)

    def cache(self) -> RecurrentState:
        """The inputs of the convolution that the next token sees."""
        return RecurrentState((StateArray((self.width - 1, self.size), split=1),))

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        return 4 * hidden_size * self.size

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """conv_in [E, 3, E], conv_taps [E, W], conv_out [E, E], and, if any, their biases
        conv_in_bias [3, E], conv_bias [E], conv_out_bias [E]."""
        return _Parameters(self, hidden_size, dtype)

    def apply(
        self,
        weights: Mapping[str, Any],
        x: jax.Array,
        rotary: Rotary | None,
        cache: tuple[jax.Array, ...],
        rows: StateRows,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The convolution of x's tokens.

        Args:
            weights: the layer's.
            x: [T, E], normalized.
            rotary: none.
            cache: the window, float32 [L, W - 1, E].
            rows: whose tokens these are.

        Returns:
            [T, E], and the new cache.
        """
        del rotary
        mixed = linear(x, weights["conv_in"])  # [T, 3, E]
        if self.bias:
            mixed = mixed + weights["conv_in_bias"][None]
        before, after, inner = mixed[:, 0], mixed[:, 1], mixed[:, 2]
        bias = weights["conv_bias"] if self.bias else None
        out, window = causal_conv(before * inner, weights["conv_taps"], bias, cache[0], rows)
        out = linear(after * out.astype(x.dtype), weights["conv_out"])
        if self.bias:
            out = out + weights["conv_out_bias"][None]
        return out, (window,)


class _Parameters(nnx.Module):
    def __init__(self, conv: ShortConv, hidden: int, dtype: jnp.dtype) -> None:
        size = conv.size

        def part(index: int, kind: str, *shape: int) -> Tensor:
            return Tensor(
                name=f"conv.in_proj.{kind}",
                gguf=f"shortconv.in_proj.{kind}",
                shape=(size, *shape),
                first_row=index * size,
                stored_rows=3 * size,
            )

        def tensor(name: str, gguf: str, *shape: int) -> Tensor:
            return Tensor(name=f"conv.{name}", gguf=f"shortconv.{gguf}", shape=shape)

        self.conv_in = param(
            (hidden, 3, size),
            dtype,
            ("embed", None, "mlp"),
            Stacked(tuple(part(index, "weight", hidden) for index in range(3))),
            num_inputs=NUM_INPUTS["conv_in"],
        )
        taps = tensor("conv.weight", "conv.weight", size, 1, conv.width)
        self.conv_taps = param((size, conv.width), dtype, ("mlp", None), Taps(taps))
        self.conv_out = param(
            (size, hidden),
            dtype,
            ("mlp", "embed"),
            Transposed(tensor("out_proj.weight", "out_proj.weight", hidden, size)),
            num_inputs=NUM_INPUTS["conv_out"],
        )
        if conv.bias:
            self.conv_in_bias = param(
                (3, size),
                dtype,
                (None, "mlp"),
                Stacked(tuple(part(index, "bias") for index in range(3))),
                init="zeros",
            )
            of_conv = Whole(tensor("conv.bias", "conv.bias", size))
            self.conv_bias = param((size,), dtype, ("mlp",), of_conv, init="zeros")
            of_out = Whole(tensor("out_proj.bias", "out_proj.bias", hidden))
            self.conv_out_bias = param((hidden,), dtype, ("embed",), of_out, init="zeros")
