"""Inputs of their own that layers take behind their feed-forward (per-layer embeddings).

Each token has a vector for every layer: a row of a second embedding table, added to a projection of
the token's first embedding. A layer's `Tail` gates it by the residual stream and adds it there.

Shape suffixes: T tokens, E hidden, L layers, P numbers of a layer's input.
Source: Gemma 3n and Gemma 4 ("per-layer embeddings"), as transformers computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.blocks.norms import Norm
from octavo.models.checks import check_flag, check_size
from octavo.models.layers import Activation, activate, linear
from octavo.models.parameters import param
from octavo.models.tensor_layouts import Tensor, Transposed, Whole
from octavo.pallas_kernels.linear_weight import embedding_table

NUM_INPUTS = {"w_layer_inputs": 1, "w_input_gate": 1, "w_input_out": 1}
"""Linear layer -> leading dimensions of its weight that the product contracts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What makes the inputs of all layers, before the first of them.

    Attributes:
        vocab_size: rows of their embedding table.
        size: P.
        norm: of what is projected.
    """

    vocab_size: int
    size: int
    norm: Norm

    def __post_init__(self) -> None:
        check_size("vocab_size_per_layer_input", self.vocab_size)
        check_size("hidden_size_per_layer_input", self.size)

    def num_weights(self, hidden_size: int, num_layers: int) -> int:
        """Numbers that a token's products multiply with."""
        return hidden_size * num_layers * self.size

    def parameters(self, hidden_size: int, num_layers: int, dtype: jnp.dtype) -> nnx.Module:
        """embed_layers [V, L · P], w_layer_inputs [E, L · P] and layer_inputs_norm [P]."""
        return _InputParameters(self, hidden_size, num_layers, dtype)

    def apply(self, weights: Mapping[str, Any], token_ids: jax.Array, x: jax.Array) -> jax.Array:
        """The inputs of every layer.

        Args:
            weights: the model's.
            token_ids: int32 [T].
            x: [T, E], the tokens' embeddings.

        Returns:
            [L, T, P] in x's dtype.
        """
        rows = embedding_table(weights["embed_layers"]).rows(token_ids)
        rows = rows * jnp.asarray(math.sqrt(self.size), rows.dtype)
        projected = linear(x, weights["w_layer_inputs"])
        projected = projected * jnp.asarray(x.shape[1] ** -0.5, x.dtype)
        by_layer = (len(x), -1, self.size)
        normed = self.norm(projected.reshape(by_layer), weights, "layer_inputs_norm")
        both = (normed + rows.reshape(by_layer)) * jnp.asarray(2.0**-0.5, x.dtype)
        return both.swapaxes(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows a layer's feed-forward.

    Attributes:
        norm: of what the layer's input adds to the residual stream.
        input_size: P; None where layers have no input of their own.
        activation: of the gate.
        scales: the residual stream is multiplied by a stored number in the end.
    """

    norm: Norm
    input_size: int | None = None
    activation: Activation = "gelu_tanh"
    scales: bool = False

    def __post_init__(self) -> None:
        check_flag("tail scales", self.scales)
        if self.input_size is not None:
            check_size("hidden_size_per_layer_input", self.input_size)
        elif not self.scales:
            raise ModelLoadError("tail = nothing is not allowed: input_size, scales or both")
        if self.activation not in get_args(Activation):
            raise UnsupportedModelError(
                f"activation = {shorten(self.activation)} is not supported: "
                f"{' or '.join(get_args(Activation))}"
            )

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        return 2 * hidden_size * (self.input_size or 0)

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """w_input_gate [E, P], w_input_out [P, E] and post_input_norm [E] if the layer has an
        input, layer_scale float32 [1] if it scales."""
        return _TailParameters(self, hidden_size, dtype)

    def apply(
        self, weights: Mapping[str, Any], x: jax.Array, layer_input: jax.Array | None
    ) -> jax.Array:
        """The residual stream [T, E] as the next layer takes it.

        Args:
            weights: the layer's.
            x: [T, E].
            layer_input: [T, P]; None if `input_size` is.
        """
        if self.input_size is not None:
            assert layer_input is not None
            gate = activate(linear(x, weights["w_input_gate"]), self.activation)
            out = linear(gate * layer_input, weights["w_input_out"])
            x = x + self.norm(out, weights, "post_input_norm")
        return x * weights["layer_scale"].astype(x.dtype)[None] if self.scales else x


class _InputParameters(nnx.Module):
    def __init__(self, inputs: LayerInputs, hidden: int, num_layers: int, dtype: jnp.dtype) -> None:
        width = num_layers * inputs.size
        table = Tensor(
            name="model.embed_tokens_per_layer.weight",
            gguf="per_layer_token_embd.weight",
            shape=(inputs.vocab_size, width),
        )
        projection = Tensor(
            name="model.per_layer_model_projection.weight",
            gguf="per_layer_model_proj.weight",
            shape=(width, hidden),
        )
        self.embed_layers = param(table.shape, dtype, ("vocab", None), Whole(table))
        self.w_layer_inputs = param(
            (hidden, width), dtype, ("embed", None), Transposed(projection),
            num_inputs=NUM_INPUTS["w_layer_inputs"],
        )  # fmt: skip
        norm = inputs.norm.params(
            "layer_inputs_norm", inputs.size, None,
            stored="model.per_layer_projection_norm", gguf="per_layer_proj_norm",
        )  # fmt: skip
        for name, value in norm.items():
            setattr(self, name, value)


class _TailParameters(nnx.Module):
    def __init__(self, tail: Tail, hidden: int, dtype: jnp.dtype) -> None:
        if tail.input_size is not None:
            size = tail.input_size
            gate = Tensor(
                name="per_layer_input_gate.weight", gguf="inp_gate.weight", shape=(size, hidden)
            )
            out = Tensor(
                name="per_layer_projection.weight", gguf="proj.weight", shape=(hidden, size)
            )
            self.w_input_gate = param(
                (hidden, size), dtype, ("embed", None), Transposed(gate),
                num_inputs=NUM_INPUTS["w_input_gate"],
            )  # fmt: skip
            self.w_input_out = param(
                (size, hidden), dtype, (None, "embed"), Transposed(out),
                num_inputs=NUM_INPUTS["w_input_out"],
            )  # fmt: skip
            norm = tail.norm.params(
                "post_input_norm", hidden, "embed",
                stored="post_per_layer_input_norm", gguf="post_norm",
            )  # fmt: skip
            for name, value in norm.items():
                setattr(self, name, value)
        if tail.scales:
            scale = Tensor(name="layer_scalar", gguf="layer_output_scale.weight", shape=(1,))
            self.layer_scale = param(
                (1,), jnp.dtype(jnp.float32), (None,), Whole(scale), init="ones"
            )
