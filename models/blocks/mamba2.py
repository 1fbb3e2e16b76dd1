"""Mamba-2: a state space whose decay is one number a head and token.

With state S [N, P] of a head, a token's step size dt > 0, input x [P], input and output weights
b, c [N], and a head's numbers A < 0 and D:

    S = exp(dt · A) · S + dt · b xᵀ;    out = cᵀ S + D · x

Shape suffixes: T tokens, S rows, L slots, C tokens of a chunk, E hidden, G groups, H heads a group,
P a head's size, N the state's, W the convolution's width.

Source: Dao and Gu, Transformers are SSMs, 2024: a chunk's products are its structured masked
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.short_conv import check_width
from octavo.models.blocks.state_rows import (
    StateRows,
    Tokens,
    causal_conv,
    decay_between,
    recur,
)
from octavo.models.cache_spec import RecurrentState, StateArray
from octavo.models.checks import (
    MAX_NUMBER,
    check_flag,
    check_number,
    check_positive,
    check_size,
)
from octavo.models.layers import Rotary, linear
from octavo.models.parameters import param
from octavo.models.tensor_layouts import ByHead, HeadColumns, HeadRows, Tensor

NUM_INPUTS = {"mamba_in": 1, "mamba_out": 3}
"""Linear layer -> leading dimensions of its weight that the product contracts."""
CHUNK = 64
"""Tokens of a chunk: its products grow with the square, the steps between chunks shrink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Head h reads the input and output weights of group h // (num_heads / num_groups).

    Attributes:
        num_heads, num_groups: G · H and G.
        head_size, state_size: P and N.
        width: W, tokens that the convolution of inputs and their weights sees.
        eps: of the norm of outputs, over a group's.
        conv_bias: the convolution adds one.
        stored: how the names of its tensors begin.
        min_step: step sizes are at least so large.
        norm: where outputs are normalized, before or behind their product with gates; None is
            nowhere.
        scales: multiply gates, inputs, input weights, output weights and step sizes, before these
            are convolved; none are ones.
    """

    num_heads: int
    num_groups: int
    head_size: int
    state_size: int
    width: int
    eps: float
    conv_bias: bool = True
    stored: str = "mamba"
    min_step: float = 0.0
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_groups", "head_size", "state_size"):
            check_size(f"mamba {name}", getattr(self, name))
        if self.num_heads % self.num_groups:
            raise ModelLoadError(
                f"mamba num_groups = {self.num_groups} is not allowed: "
                f"a divisor of num_heads ({self.num_heads})"
            )
        check_width("mamba_d_conv", self.width)
        check_positive("rms_norm_eps", self.eps)
        check_flag("mamba_conv_bias", self.conv_bias)
        check_number("time_step_min", self.min_step, 0.0, MAX_NUMBER, "a number from 0 on")
        if self.norm not in (None, "after_gate", "before_gate"):
            raise ModelLoadError(
                f"mamba norm = {shorten(self.norm)} is not allowed: after_gate, before_gate or none"
            )
        if len(self.scales) not in (0, 5):
            raise ModelLoadError(
                f"ssm_multipliers = {len(self.scales)} numbers is not allowed: 5, or none"
            )
        for scale in self.scales:
            check_positive("ssm_multipliers", scale)
        if not isinstance(self.stored, str):
            raise ModelLoadError("stored = no text is not allowed: how tensors' names begin")

    @property
    def heads(self) -> int:
        """H, heads a group."""
        return self.num_heads // self.num_groups

    @property
    def group_size(self) -> int:
        """Numbers of a group's inputs."""
        return self.heads * self.head_size

    @property
    def conv_size(self) -> int:
        """Channels of a group that are convolved: inputs, input weights and output weights."""
        return self.group_size + 2 * self.state_size

    def cache(self) -> RecurrentState:
        """The inputs of the convolution that the next token sees, and the state."""
        # One group is the rule, whose heads devices share; its window they all have.
        window = StateArray((self.width - 1, self.num_groups, self.conv_size), split=1)
        shape = (self.num_groups, self.heads, self.state_size, self.head_size)
        state = StateArray(shape, split=1 if self.num_groups == 1 else 0)
        return RecurrentState((window, state), chunk_tokens=CHUNK)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        group = 3 * self.group_size + 2 * self.state_size + self.heads
        return hidden_size * self.num_groups * group

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """mamba_in [E, G, 2 · H · P + 2 · N + H], of gates, inputs, input weights, output weights
        and step sizes; mamba_taps [G, H · P + 2 · N, W] and mamba_bias [G, H · P + 2 · N] if any;
        mamba_decay, mamba_step and mamba_skip float32 [G, H]; mamba_norm float32 [G, H · P]
        if any; mamba_out [G, H, P, E]."""
        return _Parameters(self, hidden_size, dtype)

    def apply(
        self,
        weights: Mapping[str, Any],
        x: jax.Array,
        rotary: Rotary | None,
        cache: tuple[jax.Array, ...],
        rows: StateRows,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The state space over x's tokens.

        Args:
            weights: the layer's.
            x: [T, E], normalized.
            rotary: none.
            cache: the window float32 [L, W - 1, G, ...], and the state float32 [L, G, H, N, P].
            rows: whose tokens these are.

        Returns:
            [T, E], and the new cache.
        """
        del rotary
        window, states = cache
        shape = (x.shape[0], self.num_groups, self.heads, self.head_size)
        size, end = self.group_size, self.group_size + self.conv_size
        mixed = self._scaled(linear(x, weights["mamba_in"]))  # [T, G, ...]
        with jax.named_scope("convolution"):
            bias = weights["mamba_bias"] if self.conv_bias else None
            taps = weights["mamba_taps"]
            convolved, window = causal_conv(mixed[..., size:end], taps, bias, window, rows)
            # Rounded as transformers does, whose convolution has the activations' dtype.
            convolved = jax.nn.silu(convolved.astype(x.dtype)).astype(jnp.float32)
        inputs = convolved[..., :size].reshape(shape)
        b, c = jnp.split(convolved[..., size:], 2, axis=-1)
        step = jax.nn.softplus(mixed[..., end:].astype(jnp.float32) + weights["mamba_step"][None])
        if self.min_step > 0.0:
            step = jnp.maximum(step, jnp.float32(self.min_step))
        decay = -jnp.exp(weights["mamba_decay"])[None] * step
        with jax.named_scope("state_space"):
            out, states = recur(
                (c, b, inputs * step[..., None], decay),
                states,
                rows,
                chunk_size=CHUNK,
                one_token=space_token,
                one_chunk=space_chunk,
            )
        out = out + inputs * weights["mamba_skip"][None, ..., None]
        gate = mixed[..., :size].astype(jnp.float32)
        out, gate = out.reshape(gate.shape).astype(x.dtype), jax.nn.silu(gate)
        norm = weights["mamba_norm"][None] if self.norm is not None else None
        if self.norm == "before_gate":
            out = _normalized(out.astype(jnp.float32), norm, self.eps) * gate
        else:
            out = _normalized(out.astype(jnp.float32) * gate, norm, self.eps)
        out = out.astype(x.dtype).reshape(shape)
        out = linear(out, weights["mamba_out"], num_inputs=3)
        return out, (window, states)

    def _scaled(self, mixed: jax.Array) -> jax.Array:
        """What `mamba_in` makes of tokens [T, G, ...], each part times its scale."""
        if not self.scales:
            return mixed
        sizes = (self.group_size,) * 2 + (self.state_size,) * 2 + (self.heads,)
        scales = jnp.asarray(np.repeat(np.asarray(self.scales, np.float32), sizes))
        return (mixed.astype(jnp.float32) * scales[None, None]).astype(mixed.dtype)


def _normalized(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x [T, G, ...] float32 over the root mean square of its last dimension, times weight; x itself
    without one."""
    if weight is None:
        return x
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + jnp.float32(eps)) * weight


def _sum(equation: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *operands, precision=lax.Precision.HIGHEST)


def space_token(inputs: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each row, by definition, but for D.

    Args:
        inputs: c and b [S, G, N], dt · x [S, G, H, P], dt · A [S, G, H], all float32.
        state: [S, G, H, N, P].

    Returns:
        [S, G, H, P], and the state.
    """
    c, b, x, decay = inputs
    state = state * jnp.exp(decay)[..., None, None] + b[:, :, None, :, None] * x[:, :, :, None, :]
    return _sum("sgn,sghnp->sghp", c, state), state


def space_chunk(inputs: Tokens, counts: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk of one row, by products of matrices.

    Args:
        inputs: as for `space_token`, of C tokens.
        counts: bool[C], which of them count.
        state: [G, H, N, P].

    Returns:
        [C, G, H, P], and the state.
    """
    c, b, x, decay = inputs
    is_kept = counts[:, None, None]
    b, decay = jnp.where(is_kept, b, 0), jnp.where(is_kept, decay, 0)
    since = jnp.exp(jnp.cumsum(decay, axis=0))  # [C, G, H], what is left of the state before
    between = decay_between(jnp.moveaxis(decay, 0, -1))  # [G, H, C, C]
    seen = _sum("ign,jgn->gij", c, b)[:, None] * between
    out = _sum("ghij,jghp->ighp", seen, x)
    out = out + _sum("cgn,ghnp->cghp", c, state) * since[..., None]
    left = jnp.moveaxis(between[..., -1, :], -1, 0)  # [C, G, H]
    state = state * since[-1][..., None, None]
    return out, state + _sum("cgn,cghp->ghnp", b, x * left[..., None])


class _Parameters(nnx.Module):
    def __init__(self, space: Mamba2, hidden: int, dtype: jnp.dtype) -> None:
        groups, heads, float32 = space.num_groups, space.heads, jnp.dtype(jnp.float32)
        inner, states = groups * space.group_size, groups * space.state_size

        def parts(name: str, *sizes: int, tail: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
            """Stretches of rows of one tensor."""
            made, first = [], 0
            for size in sizes:
                made.append(
                    Tensor(
                        name=f"{space.stored}.{name}",
                        gguf=f"{space.stored}.{name}",  # none is read
                        shape=(size, *tail),
                        first_row=first,
                        stored_rows=sum(sizes),
                    )
                )
                first += size
            return tuple(made)

        def whole(name: str, *shape: int) -> Tensor:
            return Tensor(name=f"{space.stored}.{name}", gguf=f"{space.stored}.{name}", shape=shape)

        sizes = (inner, inner, states, states, space.num_heads)
        self.mamba_in = param(
            (hidden, groups, space.group_size + space.conv_size + heads),
            dtype,
            ("embed", "kv_heads", None),
            HeadRows(parts("in_proj.weight", *sizes, tail=(hidden,)), groups),
            num_inputs=NUM_INPUTS["mamba_in"],
        )
        axes, of_conv = ("kv_heads", None), (inner, states, states)
        by_head = ("kv_heads", "kv_heads")  # groups are split, or else a group's heads
        self.mamba_taps = param(
            (groups, space.conv_size, space.width),
            dtype,
            (*axes, None),
            HeadRows(parts("conv1d.weight", *of_conv, tail=(1, space.width)), groups),
        )
        if space.conv_bias:
            self.mamba_bias = param(
                (groups, space.conv_size),
                dtype,
                axes,
                HeadRows(parts("conv1d.bias", *of_conv), groups),
                init="zeros",
            )
        for name, stored in (("decay", "A_log"), ("step", "dt_bias"), ("skip", "D")):
            layout = ByHead(tensor=whole(stored, space.num_heads), num_queries=heads)
            setattr(self, f"mamba_{name}", param((groups, heads), float32, by_head, layout))
        if space.norm is not None:
            norm = ByHead(tensor=whole("norm.weight", inner), num_queries=space.group_size)
            self.mamba_norm = param((groups, space.group_size), float32, axes, norm, init="ones")
        self.mamba_out = param(
            (groups, heads, space.head_size, hidden),
            dtype,
            (*by_head, None, "embed"),
            HeadColumns(
                tensor=whole("out_proj.weight", hidden, inner),
                num_queries=heads,
                head_dim=space.head_size,
            ),
            num_inputs=NUM_INPUTS["mamba_out"],
        )
