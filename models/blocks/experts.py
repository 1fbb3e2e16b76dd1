"""Routed experts: of many gated MLPs, a router chooses a few for each token.

Shape suffixes: T tokens, E hidden, X experts, K chosen ones, F an expert's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norm
from octavo.models.blocks.router import Router
from octavo.models.checks import check_flag, check_positive, check_size
from octavo.models.layers import Activation, activate, linear
from octavo.models.parameters import param
from octavo.models.tensor_layouts import (
    EverySecond,
    ExpertMatrices,
    ExpertRows,
    ExpertVectors,
    LastPart,
    Reshaped,
    Tensor,
    TensorLayout,
    Transposed,
    Whole,
)
from octavo.pallas_kernels.routed_experts.ragged import ragged_experts
from octavo.pallas_kernels.routed_experts.weights import ExpertWeights

ALPHA = 1.702
"""Of a clamped gate: gate · sigmoid(alpha · gate)."""


class RunExperts(Protocol):
    """Multiplies tokens by the experts that are chosen for them, wherever those are."""

    def __call__(
        self,
        x: jax.Array,
        chosen: jax.Array,
        share: jax.Array,
        weights: ExpertWeights,
        gate: Gate,
        /,
    ) -> jax.Array:
        """See `routed_experts`."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """What an expert makes of its gates and ups.

    Attributes:
        activation: of gates.
        limit: see `Experts.gate_limit`.
    """

    activation: Activation
    limit: float | None = None

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """gate and up [..., F] -> [..., F]."""
        if self.limit is None:
            return activate(gate, self.activation) * up
        limit, alpha = (jnp.asarray(each, gate.dtype) for each in (self.limit, ALPHA))
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit) + jnp.ones((), up.dtype)
        return gate * jax.nn.sigmoid(gate * alpha) * up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What checkpoints of some families call a layer's tensors.

    Attributes:
        router, correction, input_scale, expert_scale: of the router.
        experts: how the names of experts' tensors begin, before their numbers.
        gate, up, down: of an expert, after its number.
        shared: how the names of the shared expert's tensors begin.
        stacked: a layer's experts are one tensor, and so are their gates and ups: inputs before
            outputs, "in turn" or "end to end", or "by rows", outputs first; None where experts
            have tensors of their own.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    input_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    stacked: Literal["in turn", "end to end", "by rows"] | None = None


_NAMES = {
    "glm": _Names(),
    "qwen": _Names(shared="mlp.shared_expert"),
    "hunyuan": _Names(router="mlp.gate.wg", shared="mlp.shared_mlp"),
    "ernie": _Names(correction="mlp.moe_statics.e_score_correction_bias"),
    "mixtral": _Names(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
    ),
    "gpt_oss": _Names(router="mlp.router", stacked="in turn"),
    "llama4": _Names(
        router="feed_forward.router",
        experts="feed_forward.experts",
        shared="feed_forward.shared_expert",
        stacked="end to end",
    ),
    "granite": _Names(
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe",
        gate="input_linear",
        up="input_linear",
        down="output_linear",
        shared="mlp",
        stacked="by rows",
    ),
    "nemotron_h": _Names(
        router="mixer.gate",
        correction="mixer.gate.e_score_correction_bias",
        experts="mixer.experts",
        shared="mixer.shared_experts",
    ),
    "gemma": _Names(router="router.proj", experts="experts", shared="mlp"),
    "lfm2": _Names(
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        experts="feed_forward.experts",
        gate="w1",
        up="w3",
        down="w2",
    ),
}

_NORMS_APART = {
    "experts_norm": "pre_feedforward_layernorm_2",
    "post_experts_norm": "post_feedforward_layernorm_2",
    "post_shared_norm": "post_feedforward_layernorm_1",
}
"""Norms of experts that are apart -> what they are called on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts with their router, and one that all tokens go to beside them.

    Attributes:
        router: which choose.
        intermediate_size: F.
        activation: of the gates.
        gated: whether there are gates; without, they are down(activation(up(x))), and so is the
            shared expert. The activation is "relu2" then, and no other one's is not.
        gate_limit: gates are at most so much, ups at most so far from zero; gates go through
            gate · sigmoid(1.702 · gate), and 1 is added to ups. None is a plain gated MLP.
        bias: experts' linear layers add one.
        shared_size: the shared expert's width; None is none.
        shared_gate: what the shared expert returns is multiplied by a gate of its own.
        apart: normalizes, of the residual stream, what routed experts take (their router takes it
            as it is), what they return, and what the shared expert does; None lets all of them take
            what the layer's norm returns.
        names: of tensors, as a family's checkpoints have them; the key of a table.
    """

    router: Router
    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    gate_limit: float | None = None
    bias: bool = False
    shared_size: int | None = None
    shared_gate: bool = False
    apart: Norm | None = None
    names: str = "qwen"

    def __post_init__(self) -> None:
        MLP(intermediate_size=self.intermediate_size, activation=self.activation, bias=self.bias)
        if not isinstance(self.names, str) or self.names not in _NAMES:
            raise ModelLoadError(
                f"names = {shorten(self.names)} is not allowed: {' or '.join(_NAMES)}"
            )
        check_flag("gated", self.gated)
        if self.gated == (self.activation == "relu2") or not (
            self.gated or (self.gate_limit is None and not self.bias)
        ):
            raise ModelLoadError(
                f"gated = {str(self.gated).lower()} is not allowed: false with activation = "
                f"'relu2' and neither gate_limit nor bias, or else true"
            )
        if self.gate_limit is not None:
            check_positive("gate_limit", self.gate_limit)
        if self.shared_size is not None:
            check_size("shared_size", self.shared_size)
        check_flag("shared_gate", self.shared_gate)
        if self.shared_gate and self.shared_size is None:
            raise ModelLoadError("shared_gate = true is not allowed: false, without shared_size")
        if self.bias and _NAMES[self.names].stacked == "by rows":
            raise ModelLoadError(f"bias = true is not allowed: false, with names = {self.names!r}")
        if self.apart is not None and self.shared_size is None:
            raise ModelLoadError("apart = a norm is not allowed: none, without shared_size")

    @property
    def shared(self) -> MLP | None:
        """The shared expert."""
        if self.shared_size is None:
            return None
        return MLP(intermediate_size=self.shared_size, activation=self.activation, gated=self.gated)

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """router float32 [E, X], experts_gate (if gated) and experts_up [X, E, F], experts_down
        [X, F, E].

        And, if any, router_bias, router_correction and router_expert_scale float32 [X],
        router_input_scale float32 [E], experts_gate_bias and experts_up_bias [X, F],
        experts_down_bias [X, E], the shared expert's parameters as of an `MLP` of S, its
        gate shared_gate [E, 1], and the norms experts_norm, post_experts_norm and post_shared_norm.
        """
        return _Parameters(self, hidden_size, dtype)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with: of the experts, the chosen ones."""
        router = self.router
        num_weights = hidden_size * router.num_experts
        num_weights += self._num_matrices * hidden_size * self.intermediate_size * router.num_chosen
        shared = self.shared
        return num_weights + (0 if shared is None else shared.num_weights(hidden_size))

    def num_idle_weights(self, hidden_size: int) -> int:
        """Numbers of the experts that a token does not go to."""
        num_idle = self.router.num_experts - self.router.num_chosen
        return self._num_matrices * hidden_size * self.intermediate_size * num_idle

    @property
    def _num_matrices(self) -> int:
        """Of an expert."""
        return 3 if self.gated else 2

    def apply(
        self,
        weights: Mapping[str, Any],
        x: jax.Array,
        run_experts: RunExperts | None = None,
        stream: jax.Array | None = None,
    ) -> jax.Array:
        """x [T, E] -> [T, E].

        Args:
            weights: the layer's.
            x: [T, E], normalized.
            run_experts: None is `ragged_experts`, and lets every token count.
            stream: the residual stream [T, E] that x is made of; read if there is `apart`.
        """
        routed = x
        with jax.named_scope("router"):
            if self.apart is None:
                chosen, share = self.router.choose(weights, x)
            else:
                assert stream is not None
                chosen, share = self.router.choose(weights, stream)
                routed = self.apart(stream, weights, "experts_norm")
        biases = ("gate_bias", "up_bias", "down_bias") if self.bias else ()
        names = ("gate", "up", "down", *biases)
        stored: dict[str, Any] = {name: weights.get(f"experts_{name}") for name in names}
        gate = Gate(self.activation, self.gate_limit)
        if not self.gated:
            # What goes up gates itself: relu(x) · x is relu(x)². XLA computes the product once.
            stored["gate"], gate = stored["up"], Gate("relu")
        experts = ExpertWeights(**stored)
        with jax.named_scope("experts"):
            run = ragged_experts if run_experts is None else run_experts
            if self.router.scales_inputs:
                out = _run_scaled(run, routed, chosen, share, experts, gate)
            else:
                out = run(routed, chosen, share, experts, gate)
        shared = self.shared
        if shared is None:
            return out
        with jax.named_scope("shared_expert"):
            also = shared.apply(weights, x)
            if self.shared_gate:
                also = also * jax.nn.sigmoid(linear(x, weights["shared_gate"]))
        if self.apart is None:
            return out + also
        out = self.apart(out, weights, "post_experts_norm")
        return out + self.apart(also, weights, "post_shared_norm")


def _run_scaled(
    run: RunExperts,
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    experts: ExpertWeights,
    gate: Gate,
) -> jax.Array:
    """Experts of tokens [T, E] that are multiplied by their shares before: one choice at a time, as
    a token is another for each of its experts."""
    total = jnp.zeros_like(x)
    for choice in range(chosen.shape[1]):
        one = slice(choice, choice + 1)
        scaled = x * share[:, one].astype(x.dtype)
        total = total + run(scaled, chosen[:, one], jnp.ones_like(share[:, one]), experts, gate)
    return total


class _Parameters(nnx.Module):
    def __init__(self, experts: Experts, hidden: int, dtype: jnp.dtype) -> None:
        names, router, float32 = _NAMES[experts.names], experts.router, jnp.dtype(jnp.float32)
        number, width = router.num_experts, experts.intermediate_size

        weight = Tensor(
            name=f"{names.router}.weight", gguf="ffn_gate_inp.weight", shape=(number, hidden)
        )
        self.router = param((hidden, number), float32, ("embed", None), Transposed(weight))
        if router.bias:
            bias = Tensor(name=f"{names.router}.bias", gguf="ffn_gate_inp.bias", shape=(number,))
            self.router_bias = param((number,), float32, (None,), Whole(bias), init="zeros")
        if router.corrects:
            # ERNIE's files have a dimension of one before it.
            shape = (1, number) if experts.names == "ernie" else (number,)
            added = Tensor(name=names.correction, gguf="exp_probs_b.bias", shape=shape)
            self.router_correction = param((number,), float32, (None,), Reshaped(added))
        if router.input_eps is not None:
            scale = Tensor(name=names.input_scale, gguf="ffn_gate_inp_norm.weight", shape=(hidden,))
            self.router_input_scale = param(
                (hidden,), float32, ("embed",), Whole(scale), init="ones"
            )
        if router.expert_scales:
            scale = Tensor(name=names.expert_scale, gguf="ffn_exps_scale.weight", shape=(number,))
            self.router_expert_scale = param((number,), float32, (None,), Whole(scale), init="ones")
        if experts.apart is not None:
            for norm, stored in _NORMS_APART.items():
                gguf = f"ffn_{norm}"
                params = experts.apart.params(norm, hidden, "embed", stored=stored, gguf=gguf)
                for name, value in params.items():
                    setattr(self, name, value)

        sides = {
            "gate": ("embed", hidden, "mlp", width),
            "up": ("embed", hidden, "mlp", width),
            "down": ("mlp", width, "embed", hidden),
        }
        if not experts.gated:
            del sides["gate"]
        for which, (inputs, num_inputs, outputs, num_outputs) in sides.items():
            matrices = param(
                (number, num_inputs, num_outputs),
                dtype,
                ("expert", inputs, outputs),
                _layout(names, which, number, "weight", num_outputs, num_inputs),
                num_inputs=1,
                num_stacked=1,
            )
            setattr(self, f"experts_{which}", matrices)
            if experts.bias:
                layout = _layout(names, which, number, "bias", num_outputs)
                axes = ("expert", outputs)
                vectors = param((number, num_outputs), dtype, axes, layout, init="zeros")
                setattr(self, f"experts_{which}_bias", vectors)
        shared = experts.shared
        if shared is None:
            return
        of_shared: Any = shared.parameters(
            hidden, dtype, prefix=names.shared, gguf="ffn_{name}_shexp"
        )
        if experts.gated:
            self.w_gate_up = of_shared.w_gate_up
        else:
            self.w_up = of_shared.w_up
        self.w_down = of_shared.w_down
        if experts.shared_gate:
            gate = Tensor(
                name=f"{names.shared}_gate.weight",
                gguf="ffn_gate_inp_shexp.weight",
                shape=(1, hidden),
            )
            self.shared_gate = param((hidden, 1), dtype, ("embed", None), Transposed(gate))


def _layout(names: _Names, which: str, number: int, kind: str, *shape: int) -> TensorLayout:
    """Of all experts' weights [out, in] as [X, in, out], or biases [out] as [X, out].

    Args:
        which: gate, up or down.
        number: of experts.
        kind: "weight" or "bias".
        shape: of one expert's.
    """
    gguf = f"ffn_{which}_exps.{kind}"
    if names.stacked is None:
        tensors = tuple(
            Tensor(
                name=f"{names.experts}.{expert}.{getattr(names, which)}.{kind}",
                gguf=gguf,
                shape=shape,
                expert=expert,
            )
            for expert in range(number)
        )
        return ExpertMatrices(tensors) if kind == "weight" else ExpertVectors(tensors)
    if names.stacked == "by rows":
        num_outputs, num_inputs = shape
        name = f"{names.experts}.{getattr(names, which)}.{kind}"
        num_rows = num_outputs if which == "down" else 2 * num_outputs
        rows = Tensor(name=name, gguf=gguf, shape=(number, num_rows, num_inputs))
        return ExpertRows(rows, num_outputs if which == "up" else 0)
    suffix = "_bias" if kind == "bias" else ""
    if which == "down":
        name = f"{names.experts}.{names.down}{suffix}"
        return Whole(Tensor(name=name, gguf=gguf, shape=(number, *shape[::-1])))
    *inputs, outputs = shape[::-1]
    name = f"{names.experts}.gate_up_proj{suffix}"
    both = Tensor(name=name, gguf=gguf, shape=(number, *inputs, 2 * outputs))
    number = ("gate", "up").index(which)
    if names.stacked == "end to end":
        return LastPart(both, number * outputs)
    return EverySecond(both, number)
