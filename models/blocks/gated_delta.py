"""A gated delta net: linear attention whose state forgets by a gate and corrects what keys recall.

With state S [Dk, Dv] of a value head, a token's decay g ≤ 0, rate beta, query q, key k, value v:

    S = exp(g) · S;    S = S + k (beta · (v - kᵀ S))ᵀ;    out = qᵀ S

Shape suffixes: T tokens, S rows, L slots, C tokens of a chunk, E hidden, K key heads, G value heads
a key head, Dk and Dv their sizes, W the convolution's width.

Source: Yang et al., Gated Delta Networks, 2024; the products of a chunk (its WY form) as in Yang et
al., Parallelizing Linear Transformers with the Delta Rule, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from octavo.engine.errors import ModelLoadError
from octavo.models.blocks.norms import RMSNorm
from octavo.models.blocks.short_conv import check_width
from octavo.models.blocks.state_rows import (
    StateRows,
    Tokens,
    causal_conv,
    decay_between,
    recur,
)
from octavo.models.cache_spec import RecurrentState, StateArray
from octavo.models.checks import check_flag, check_positive, check_size
from octavo.models.layers import Rotary, linear
from octavo.models.parameters import param
from octavo.models.tensor_layouts import ByHead, HeadColumns, HeadRows, Tensor

NUM_INPUTS = {"delta_in": 1, "delta_rates": 1, "delta_out": 3}
"""Linear layer -> leading dimensions of its weight that the product contracts."""
CHUNK = 64
"""Tokens of a chunk: its products grow with the square, the steps between chunks shrink."""
NORM_EPS = 1e-6
"""Of the lengths that queries and keys are divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Value head h reads key head h // (num_value_heads / num_key_heads).

    Attributes:
        num_key_heads, num_value_heads: K and K · G.
        key_size, value_size: Dk and Dv.
        width: W, tokens that the convolution of queries, keys and values sees.
        eps: of the norm of a head's output.
        by_key_head: on disk, the linear layers' rows are sorted by key head (Qwen3-Next); if not,
            each kind of them is by itself (Qwen 3.5).
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    width: int
    eps: float
    by_key_head: bool

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_size", "value_size"):
            check_size(f"linear {name}", getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise ModelLoadError(
                f"linear_num_key_heads = {self.num_key_heads} is not allowed: "
                f"a divisor of linear_num_value_heads ({self.num_value_heads})"
            )
        check_width("linear_conv_kernel_dim", self.width)
        check_positive("rms_norm_eps", self.eps)
        check_flag("by_key_head", self.by_key_head)

    @property
    def group(self) -> int:
        """G, value heads a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_size(self) -> int:
        """Channels of a key head that are convolved: query, key and values."""
        return 2 * self.key_size + self.group * self.value_size

    def cache(self) -> RecurrentState:
        """The inputs of the convolution that the next token sees, and the state."""
        heads = self.num_key_heads
        window = StateArray((self.width - 1, heads, self.conv_size), split=1)
        state = StateArray((heads, self.group, self.key_size, self.value_size), split=0)
        return RecurrentState((window, state), chunk_tokens=CHUNK)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        numbers = 2 * self.key_size + self.group * (3 * self.value_size + 2)
        return hidden_size * self.num_key_heads * numbers

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """delta_in [E, K, 2 · Dk + 2 · G · Dv], of queries, keys, values and gates of outputs;
        delta_rates [E, K, 2 · G], of beta and the decay; delta_taps [K, 2 · Dk + G · Dv, W];
        delta_decay and delta_step float32 [K, G]; delta_norm float32 [Dv]; delta_out
        [K, G, Dv, E]."""
        return _Parameters(self, hidden_size, dtype)

    def apply(
        self,
        weights: Mapping[str, Any],
        x: jax.Array,
        rotary: Rotary | None,
        cache: tuple[jax.Array, ...],
        rows: StateRows,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Linear attention of x's tokens.

        Args:
            weights: the layer's.
            x: [T, E], normalized.
            rotary: none.
            cache: the window float32 [L, W - 1, K, ...], and the state float32
                [L, K, G, Dk, Dv].
            rows: whose tokens these are.

        Returns:
            [T, E], and the new cache.
        """
        del rotary
        window, states = cache
        num_tokens, heads, group = x.shape[0], self.num_key_heads, self.group
        value_shape = (num_tokens, heads, group, self.value_size)
        mixed = linear(x, weights["delta_in"])
        rates = linear(x, weights["delta_rates"]).astype(jnp.float32)
        with jax.named_scope("convolution"):
            convolved, window = causal_conv(
                mixed[..., : self.conv_size], weights["delta_taps"], None, window, rows
            )
            # Rounded as transformers does, whose convolution has the activations' dtype.
            convolved = jax.nn.silu(convolved.astype(x.dtype)).astype(jnp.float32)
        q, k = convolved[..., : self.key_size], convolved[..., self.key_size : 2 * self.key_size]
        q = _unit(q) * jnp.float32(1.0 / math.sqrt(self.key_size))
        v = convolved[..., 2 * self.key_size :].reshape(value_shape)
        beta = jax.nn.sigmoid(rates[..., :group])
        step = jax.nn.softplus(rates[..., group:] + weights["delta_step"][None])
        decay = -jnp.exp(weights["delta_decay"])[None] * step
        with jax.named_scope("delta_rule"):
            out, states = recur(
                (q, _unit(k), v, decay, beta),
                states,
                rows,
                chunk_size=CHUNK,
                one_token=delta_token,
                one_chunk=delta_chunk,
            )
        gate = mixed[..., self.conv_size :].reshape(value_shape)
        normed = RMSNorm(eps=self.eps)(out.astype(x.dtype), weights, "delta_norm")
        gated = normed.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        return linear(gated.astype(x.dtype), weights["delta_out"], num_inputs=3), (window, states)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + jnp.float32(NORM_EPS))


def _sum(equation: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *operands, precision=lax.Precision.HIGHEST)


def delta_token(inputs: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each row, by definition.

    Args:
        inputs: q and k [S, K, Dk], v [S, K, G, Dv], decay and beta [S, K, G], all float32.
        state: [S, K, G, Dk, Dv].

    Returns:
        [S, K, G, Dv], and the state.
    """
    q, k, v, decay, beta = inputs
    state = state * jnp.exp(decay)[..., None, None]
    delta = (v - _sum("skd,skgdv->skgv", k, state)) * beta[..., None]
    state = state + k[:, :, None, :, None] * delta[:, :, :, None, :]
    return _sum("skd,skgdv->skgv", q, state), state


def delta_chunk(inputs: Tokens, counts: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A chunk of one row, by products of matrices.

    What each token writes depends on what the ones before it wrote: a triangular system, solved for
    all of them at once. (Its inverse as a product of powers would be cheaper, and loses all digits
    where keys repeat.)

    Args:
        inputs: as for `delta_token`, of C tokens.
        counts: bool[C], which of them count.
        state: [K, G, Dk, Dv].

    Returns:
        [C, K, G, Dv], and the state.
    """
    q, k, v, decay, beta = inputs
    is_kept = counts[:, None, None]
    k = jnp.where(is_kept, k, 0)
    v = jnp.where(is_kept[..., None], v, 0)
    decay, beta = jnp.where(is_kept, decay, 0), jnp.where(is_kept, beta, 0)
    since = jnp.exp(jnp.cumsum(decay, axis=0))  # [C, K, G], what is left of the state before
    between = decay_between(jnp.moveaxis(decay, 0, -1))  # [K, G, C, C]
    recalled = _sum("ikd,jkd->kij", k, k)[:, None] * between * jnp.moveaxis(beta, 0, -1)[..., None]
    # [K, G, C, Dv + Dk]: what tokens write of their values, and of the state before.
    asked = jnp.concatenate(
        [
            v * beta[..., None],
            jnp.broadcast_to(k[:, :, None], (*since.shape, k.shape[-1]))
            * (beta * since)[..., None],
        ],
        axis=-1,
    )
    solved = lax.linalg.triangular_solve(
        recalled, jnp.moveaxis(asked, 0, 2), left_side=True, lower=True, unit_diagonal=True
    )
    value_size = v.shape[-1]
    written = solved[..., :value_size] - _sum("kgcd,kgdv->kgcv", solved[..., value_size:], state)
    seen = _sum("ikd,jkd->kij", q, k)[:, None] * between
    out = _sum("ckd,ckg,kgdv->ckgv", q, since, state)
    out = out + _sum("kgij,kgjv->ikgv", seen, written)
    left = between[..., -1, :]  # [K, G, C]
    state = state * since[-1][..., None, None]
    return out, state + _sum("ckd,kgc,kgcv->kgdv", k, left, written)


class _Parameters(nnx.Module):
    def __init__(self, net: GatedDelta, hidden: int, dtype: jnp.dtype) -> None:
        heads, group, float32 = net.num_key_heads, net.group, jnp.dtype(jnp.float32)
        keys, values = heads * net.key_size, net.num_value_heads * net.value_size
        convolved = 2 * keys + values

        def tensor(name: str, *shape: int, first_row: int = 0, of: int | None = None) -> Tensor:
            return Tensor(
                name=f"linear_attn.{name}",
                gguf=f"linear_attn.{name}",  # none is read
                shape=shape,
                first_row=first_row,
                stored_rows=of,
            )

        def qkv(name: str, *inputs: int) -> tuple[Tensor, ...]:
            """Queries, keys and values of a tensor that has all of each in turn."""
            return tuple(
                tensor(name, size, *inputs, first_row=first, of=convolved)
                for size, first in ((keys, 0), (keys, keys), (values, 2 * keys))
            )

        if net.by_key_head:
            parts: tuple[Tensor, ...] = (tensor("in_proj_qkvz.weight", convolved + values, hidden),)
            rates: tuple[Tensor, ...] = (
                tensor("in_proj_ba.weight", 2 * net.num_value_heads, hidden),
            )
        else:
            gate = tensor("in_proj_z.weight", values, hidden)
            parts = (*qkv("in_proj_qkv.weight", hidden), gate)
            rates = tuple(
                tensor(f"in_proj_{which}.weight", net.num_value_heads, hidden) for which in "ba"
            )
        axes = ("kv_heads", None)
        self.delta_in = param(
            (hidden, heads, net.conv_size + group * net.value_size),
            dtype,
            ("embed", *axes),
            HeadRows(parts, heads),
            num_inputs=NUM_INPUTS["delta_in"],
        )
        self.delta_rates = param(
            (hidden, heads, 2 * group),
            dtype,
            ("embed", *axes),
            HeadRows(rates, heads),
            num_inputs=NUM_INPUTS["delta_rates"],
        )
        self.delta_taps = param(
            (heads, net.conv_size, net.width),
            dtype,
            (*axes, None),
            HeadRows(qkv("conv1d.weight", 1, net.width), heads),
        )
        for name, stored in (("delta_decay", "A_log"), ("delta_step", "dt_bias")):
            layout = ByHead(tensor=tensor(stored, net.num_value_heads), num_queries=group)
            setattr(self, name, param((heads, group), float32, axes, layout))
        norm = RMSNorm(eps=net.eps).params(
            "delta_norm", net.value_size, None, stored="linear_attn.norm", gguf="linear_attn.norm"
        )
        self.delta_norm = norm["delta_norm"]
        self.delta_out = param(
            (heads, group, net.value_size, hidden),
            dtype,
            (*axes, None, "embed"),
            HeadColumns(
                tensor=tensor("out_proj.weight", hidden, values),
                num_queries=group,
                head_dim=net.value_size,
            ),
            num_inputs=NUM_INPUTS["delta_out"],
        )
