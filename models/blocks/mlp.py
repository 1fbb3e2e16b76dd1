"""A multi-layer perceptron: down(activation(gate(x)) · up(x)), or down(activation(up(x))).

Shape suffixes: T tokens, E hidden, F the MLP's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import check_flag, check_positive, check_size
from octavo.models.layers import Activation, activate, linear, scaled
from octavo.models.parameters import param
from octavo.models.tensor_layouts import Stacked, Tensor, Transposed, Whole

NUM_INPUTS = {"w_gate_up": 1, "w_up": 1, "w_down": 1}
"""Linear layer -> leading dimensions of its weight that the product contracts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """An MLP.

    Attributes:
        intermediate_size: F.
        activation: of the gate, or of what goes up if there is none.
        bias: all linear layers add one.
        gated: whether there is a gate.
        gate_scale: multiplies what the gate's nonlinearity takes.
        output_scale: multiplies what is returned.
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    gate_scale: float = 1.0
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        check_size("intermediate_size", self.intermediate_size)
        check_flag("mlp_bias", self.bias)
        check_flag("gated", self.gated)
        check_positive("mlp gate_scale", self.gate_scale)
        check_positive("mlp output_scale", self.output_scale)
        if not self.gated and self.gate_scale != 1.0:
            raise ModelLoadError(
                f"mlp gate_scale = {self.gate_scale} is not allowed: 1, without a gate"
            )
        if self.activation not in get_args(Activation):
            raise UnsupportedModelError(
                f"activation = {shorten(self.activation)} is not supported: "
                f"{' or '.join(get_args(Activation))}"
            )

    def parameters(
        self,
        hidden_size: int,
        dtype: jnp.dtype,
        prefix: str = "mlp",
        gguf: str = "ffn_{name}",
    ) -> nnx.Module:
        """w_gate_up [E, 2, F] (w_up [E, F] if there is no gate) and w_down [F, E], with b_gate_up
        [2, F] (b_up [F]) and b_down [E] if any.

        Args:
            prefix: how its tensors' names begin.
            gguf: what llama.cpp calls the linear layer `name`: gate, up or down.
        """
        return _Parameters(self, hidden_size, dtype, prefix, gguf)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        return (3 if self.gated else 2) * hidden_size * self.intermediate_size

    def apply(self, weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        hidden = self._hidden(weights, x)
        out = linear(hidden, weights["w_down"])
        if self.bias:
            out = out + weights["b_down"][None]
        return scaled(out, self.output_scale)

    def _hidden(self, weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """What goes down: [T, F]."""
        name = "gate_up" if self.gated else "up"
        up = linear(x, weights[f"w_{name}"])  # [T, 2, F], or [T, F]
        if self.bias:
            up = up + weights[f"b_{name}"][None]
        if not self.gated:
            return activate(up, self.activation)
        return activate(scaled(up[:, 0], self.gate_scale), self.activation) * up[:, 1]


class _Parameters(nnx.Module):
    def __init__(self, mlp: MLP, hidden: int, dtype: jnp.dtype, prefix: str, gguf: str) -> None:
        width = mlp.intermediate_size

        def tensor(name: str, kind: str, *shape: int) -> Tensor:
            return Tensor(
                name=f"{prefix}.{name}_proj.{kind}",
                gguf=f"{gguf.format(name=name)}.{kind}",
                shape=shape,
            )

        def gate_and_up(kind: str, *shape: int) -> Stacked:
            return Stacked(tuple(tensor(name, kind, *shape) for name in ("gate", "up")))

        if mlp.gated:
            self.w_gate_up = param(
                (hidden, 2, width),
                dtype,
                ("embed", None, "mlp"),
                gate_and_up("weight", width, hidden),
                num_inputs=NUM_INPUTS["w_gate_up"],
            )
        else:
            self.w_up = param(
                (hidden, width),
                dtype,
                ("embed", "mlp"),
                Transposed(tensor("up", "weight", width, hidden)),
                num_inputs=NUM_INPUTS["w_up"],
            )
        self.w_down = param(
            (width, hidden),
            dtype,
            ("mlp", "embed"),
            Transposed(tensor("down", "weight", hidden, width)),
            num_inputs=NUM_INPUTS["w_down"],
        )
        if mlp.bias and mlp.gated:
            self.b_gate_up = param(
                (2, width), dtype, (None, "mlp"), gate_and_up("bias", width), init="zeros"
            )
        if mlp.bias and not mlp.gated:
            self.b_up = param(
                (width,), dtype, ("mlp",), Whole(tensor("up", "bias", width)), init="zeros"
            )
        if mlp.bias:
            self.b_down = param(
                (hidden,), dtype, ("embed",), Whole(tensor("down", "bias", hidden)), init="zeros"
            )
