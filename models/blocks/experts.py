"""Routed experts: of many gated MLPs, a router chooses a few for each token.

Shape suffixes: T tokens, E hidden, X experts, K chosen ones, F an expert's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.blocks.mlp import MLP
from octavo.models.checks import check_flag, check_positive, check_size, is_integer
from octavo.models.layers import Activation, activate, linear
from octavo.models.parameters import param
from octavo.models.tensor_layouts import (
    EverySecond,
    ExpertMatrices,
    ExpertVectors,
    Reshaped,
    Tensor,
    TensorLayout,
    Transposed,
    Whole,
)
from octavo.pallas_kernels.routed_experts.ragged import ragged_experts
from octavo.pallas_kernels.routed_experts.weights import ExpertWeights

Scores = Literal["softmax", "sigmoid"]
MAX_EXPERTS = 4096
"""Most experts of a layer: far above any that exists, and few enough to name each in vain."""
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
class Router:
    """Which experts a token goes to, and with which shares; all of it in float32.

    Attributes:
        num_experts, num_chosen: X and K.
        scores: what becomes of logits: over all experts, or each by itself.
        normalizes: shares are divided by their sum.
        corrects: experts are chosen by their scores plus a stored number, which shares leave out.
        bias: logits add one.
        num_groups: of experts.
        num_chosen_groups: experts are chosen from so many groups, of the best scores.
        num_group_scores: a group's score is the sum of so many of its largest.
        scale: multiplies shares in the end.
    """

    num_experts: int
    num_chosen: int
    scores: Scores = "softmax"
    normalizes: bool = True
    corrects: bool = False
    bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 2
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts, MAX_EXPERTS)
        for name, high, of in (
            ("num_chosen", self.num_experts, "num_experts"),
            ("num_groups", self.num_experts, "num_experts"),
            ("num_chosen_groups", self.num_groups, "num_groups"),
        ):
            if not is_integer(getattr(self, name), 1, high):
                raise ModelLoadError(
                    f"{name} = {shorten(getattr(self, name))} is not allowed: "
                    f"an integer from 1 to {of} ({high})"
                )
        if self.num_experts % self.num_groups:
            raise ModelLoadError(
                f"num_groups = {self.num_groups} is not allowed: "
                f"a divisor of num_experts ({self.num_experts})"
            )
        group = self.num_experts // self.num_groups
        check_size("num_group_scores", self.num_group_scores)
        if self.num_groups > 1 and group < self.num_group_scores:
            raise ModelLoadError(
                f"num_groups = {self.num_groups} is not allowed: {self.num_group_scores} experts a "
                f"group, of num_experts ({self.num_experts})"
            )
        if self.num_chosen > group * self.num_chosen_groups:
            raise ModelLoadError(
                f"num_chosen = {self.num_chosen} is not allowed: at most "
                f"{group * self.num_chosen_groups}, in num_chosen_groups ({self.num_chosen_groups})"
            )
        if self.scores not in get_args(Scores):
            raise UnsupportedModelError(
                f"scores = {shorten(self.scores)} is not supported: {' or '.join(get_args(Scores))}"
            )
        for name in ("normalizes", "corrects", "bias"):
            check_flag(name, getattr(self, name))
        check_positive("routed scale", self.scale)

    def choose(self, weights: Mapping[str, Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts int32 [T, K] and shares float32 [T, K] of x's tokens [T, E]."""
        logits = linear(x.astype(jnp.float32), weights["router"])
        if self.bias:
            logits = logits + weights["router_bias"][None]
        scores = jax.nn.softmax(logits) if self.scores == "softmax" else jax.nn.sigmoid(logits)
        ranked = scores + weights["router_correction"][None] if self.corrects else scores
        if self.num_groups > 1:
            ranked = self._of_chosen_groups(ranked)
        _, chosen = jax.lax.top_k(ranked, self.num_chosen)
        share = jnp.take_along_axis(scores, chosen, axis=1)
        if self.normalizes:
            share = share / jnp.maximum(share.sum(1, keepdims=True), jnp.float32(1e-20))
        return chosen, share if self.scale == 1.0 else share * jnp.float32(self.scale)

    def _of_chosen_groups(self, ranked: jax.Array) -> jax.Array:
        """Scores [T, X], those of other groups -inf."""
        by_group = ranked.reshape(len(ranked), self.num_groups, -1)
        group_scores = jax.lax.top_k(by_group, self.num_group_scores)[0].sum(-1)
        _, groups = jax.lax.top_k(group_scores, self.num_chosen_groups)
        numbers = jnp.arange(self.num_groups, dtype=groups.dtype)
        is_chosen = (groups[:, :, None] == numbers[None, None]).any(1)
        return jnp.where(is_chosen[:, :, None], by_group, -jnp.inf).reshape(ranked.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What checkpoints of some families call a layer's tensors.

    Attributes:
        router, correction: of the router.
        experts: how the names of experts' tensors begin, before their numbers.
        gate, up, down: of an expert, after its number.
        shared: how the names of the shared expert's tensors begin.
        in_turn: a layer's experts are one tensor, inputs before outputs, of which gates and ups
            come in turn.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    in_turn: bool = False


_NAMES = {
    "glm": _Names(),
    "qwen": _Names(shared="mlp.shared_expert"),
    "ernie": _Names(correction="mlp.moe_statics.e_score_correction_bias"),
    "mixtral": _Names(
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
    ),
    "gpt_oss": _Names(router="mlp.router", in_turn=True),
    "lfm2": _Names(
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        experts="feed_forward.experts",
        gate="w1",
        up="w3",
        down="w2",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts with their router, and one that all tokens go to beside them.

    Attributes:
        router: which choose.
        intermediate_size: F.
        activation: of the gates.
        gate_limit: gates are at most so much, ups at most so far from zero; gates go through
            gate · sigmoid(1.702 · gate), and 1 is added to ups. None is a plain gated MLP.
        bias: experts' linear layers add one.
        shared_size: the shared expert's width; None is none.
        shared_gate: what the shared expert returns is multiplied by a gate of its own.
        names: of tensors, as a family's checkpoints have them; the key of a table.
    """

    router: Router
    intermediate_size: int
    activation: Activation = "silu"
    gate_limit: float | None = None
    bias: bool = False
    shared_size: int | None = None
    shared_gate: bool = False
    names: str = "qwen"

    def __post_init__(self) -> None:
        MLP(intermediate_size=self.intermediate_size, activation=self.activation, bias=self.bias)
        if self.gate_limit is not None:
            check_positive("gate_limit", self.gate_limit)
        if self.shared_size is not None:
            check_size("shared_size", self.shared_size)
        check_flag("shared_gate", self.shared_gate)
        if self.shared_gate and self.shared_size is None:
            raise ModelLoadError("shared_gate = true is not allowed: false, without shared_size")
        if not isinstance(self.names, str) or self.names not in _NAMES:
            raise ModelLoadError(
                f"names = {shorten(self.names)} is not allowed: {' or '.join(_NAMES)}"
            )

    @property
    def shared(self) -> MLP | None:
        """The shared expert."""
        if self.shared_size is None:
            return None
        return MLP(intermediate_size=self.shared_size, activation=self.activation)

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """router float32 [E, X], experts_gate and experts_up [X, E, F], experts_down [X, F, E].

        And, if any, router_bias and router_correction float32 [X], experts_gate_bias and
        experts_up_bias [X, F], experts_down_bias [X, E], the shared expert's w_gate_up [E, 2, S]
        and w_down [S, E], and its gate shared_gate [E, 1].
        """
        return _Parameters(self, hidden_size, dtype)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with: of the experts, the chosen ones."""
        router = self.router
        num_weights = hidden_size * router.num_experts
        num_weights += 3 * hidden_size * self.intermediate_size * router.num_chosen
        shared = self.shared
        return num_weights + (0 if shared is None else shared.num_weights(hidden_size))

    def num_idle_weights(self, hidden_size: int) -> int:
        """Numbers of the experts that a token does not go to."""
        num_idle = self.router.num_experts - self.router.num_chosen
        return 3 * hidden_size * self.intermediate_size * num_idle

    def apply(
        self, weights: Mapping[str, Any], x: jax.Array, run_experts: RunExperts | None = None
    ) -> jax.Array:
        """x [T, E] -> [T, E].

        Args:
            weights: the layer's.
            x: [T, E], normalized.
            run_experts: None is `ragged_experts`, and lets every token count.
        """
        with jax.named_scope("router"):
            chosen, share = self.router.choose(weights, x)
        biases = ("gate_bias", "up_bias", "down_bias") if self.bias else ()
        experts = ExpertWeights(
            **{name: weights[f"experts_{name}"] for name in ("gate", "up", "down", *biases)}
        )
        gate = Gate(self.activation, self.gate_limit)
        with jax.named_scope("experts"):
            run = ragged_experts if run_experts is None else run_experts
            out = run(x, chosen, share, experts, gate)
        shared = self.shared
        if shared is None:
            return out
        with jax.named_scope("shared_expert"):
            also = shared.apply(weights, x)
            if self.shared_gate:
                also = also * jax.nn.sigmoid(linear(x, weights["shared_gate"]))
            return out + also


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

        sides = {
            "gate": ("embed", hidden, "mlp", width),
            "up": ("embed", hidden, "mlp", width),
            "down": ("mlp", width, "embed", hidden),
        }
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
        self.w_gate_up, self.w_down = of_shared.w_gate_up, of_shared.w_down
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
    if not names.in_turn:
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
    suffix = "_bias" if kind == "bias" else ""
    if which == "down":
        name = f"{names.experts}.{names.down}{suffix}"
        return Whole(Tensor(name=name, gguf=gguf, shape=(number, *shape[::-1])))
    *inputs, outputs = shape[::-1]
    name = f"{names.experts}.gate_up_proj{suffix}"
    both = Tensor(name=name, gguf=gguf, shape=(number, *inputs, 2 * outputs))
    return EverySecond(both, ("gate", "up").index(which))
