"""Norms, and where a layer has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError
from octavo.models.checks import MAX_NUMBER, check_flag, check_number, check_positive
from octavo.models.layers import layer_norm, rms_norm
from octavo.models.parameters import param
from octavo.models.tensor_layouts import HeadOrder, NormWeight, Tensor, Whole


class _Norm:
    """What all kinds of norms share."""

    __slots__ = ()
    offset: float
    weighted: bool
    bias: bool

    def params(
        self,
        name: str,
        size: int,
        axis: str | None,
        *,
        stored: str,
        gguf: str,
        order: HeadOrder | None = None,
    ) -> dict[str, nnx.Param[Any]]:
        """The parameters of a norm of `size` numbers: float32 always, because 1 + w loses w in
        bfloat16.

        Args:
            name: of the multiplier; that of a bias ends in "_bias".
            axis: logical.
            stored, gguf: names on disk, without ".weight" and ".bias".
            order: of the `Tensor`.
        """
        if not self.weighted:
            return {}

        def tensor(kind: str) -> Tensor:
            return Tensor(name=stored + kind, gguf=gguf + kind, shape=(size,), order=order)

        float32 = jnp.dtype(jnp.float32)
        weight = NormWeight(tensor(".weight"), self.offset)
        params = {name: param((size,), float32, (axis,), weight, init="ones")}
        if self.bias:
            bias = Whole(tensor(".bias"))
            params[name + "_bias"] = param((size,), float32, (axis,), bias, init="zeros")
        return params


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm(_Norm):
    """x / rms(x) · weight, in float32.

    Attributes:
        eps: added to the mean square.
        offset: what the architecture adds to the stored weight (1 for Gemma). Weights in memory
            already include it.
        weighted: whether there is a weight.
    """

    eps: float = 1e-6
    offset: float = 0.0
    weighted: bool = True
    bias = False

    def __post_init__(self) -> None:
        check_positive("rms_norm_eps", self.eps)
        check_number("norm_offset", self.offset, -MAX_NUMBER, MAX_NUMBER, "a finite number")
        check_flag("norm weighted", self.weighted)

    def __call__(self, x: jax.Array, weights: Mapping[str, Any], name: str) -> jax.Array:
        """x [..., E] normalized over its last dimension, times weights[name] [E] if there are."""
        return rms_norm(x, weights[name] if self.weighted else None, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(_Norm):
    """(x - mean(x)) / std(x) · weight, plus a bias if there is one, in float32.

    Attributes:
        eps: added to the variance.
        bias: whether there is one.
    """

    eps: float = 1e-5
    bias: bool = False
    offset = 0.0
    weighted = True

    def __post_init__(self) -> None:
        check_positive("layer_norm_eps", self.eps)
        check_flag("layer norm bias", self.bias)

    def __call__(self, x: jax.Array, weights: Mapping[str, Any], name: str) -> jax.Array:
        """As `RMSNorm` does; the bias is weights[name + "_bias"] [E]."""
        bias = weights[name + "_bias"] if self.bias else None
        return layer_norm(x, weights[name], bias, self.eps)


Norm = RMSNorm | LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The norms around a layer's mixer and around its feed-forward, and what becomes of both.

    Attributes:
        norm: all of them.
        before: what mixer and feed-forward take is normalized.
        after: what they return is normalized, before the residual sum.
        parallel: the feed-forward takes what the mixer takes, and not what comes of it.
        residual_scale: multiplies what either adds to the residual stream.
    """

    norm: Norm
    before: bool = True
    after: bool = False
    parallel: bool = False
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("before", "after", "parallel"):
            check_flag(f"norms {name}", getattr(self, name))
        check_positive("residual_scale", self.residual_scale)
        if not self.before and not self.after:
            raise ModelLoadError("norms = none is not allowed: before, after or both")

    def parameters(self, hidden_size: int) -> nnx.Module:
        """Multipliers of the norms that there are."""
        return _Parameters(self, hidden_size)

    def enter(self, x: jax.Array, weights: Mapping[str, Any], name: str) -> jax.Array:
        """What a part takes, of the residual stream x [T, E]; `name` is "attn" or "mlp"."""
        return self.norm(x, weights, f"{name}_norm") if self.before else x

    def leave(self, out: jax.Array, weights: Mapping[str, Any], name: str) -> jax.Array:
        """What is added to the residual stream, of what a part returned [T, E]."""
        if self.after:
            out = self.norm(out, weights, f"post_{name}_norm")
        if self.residual_scale == 1.0:
            return out
        return out * jnp.asarray(self.residual_scale, out.dtype)


class _Parameters(nnx.Module):
    """Names on disk depend on which norms a layer has."""

    def __init__(self, norms: Norms, hidden_size: int) -> None:
        def declare(name: str, stored: str, gguf: str) -> None:
            params = norms.norm.params(
                name, hidden_size, "embed", stored=stored + "_layernorm", gguf=gguf
            )
            for each, value in params.items():
                setattr(self, each, value)

        if norms.before:
            declare("attn_norm", "input", "attn_norm")
        if norms.before and not norms.parallel:
            second = "pre_feedforward" if norms.after else "post_attention"
            declare("mlp_norm", second, "ffn_norm")
        if norms.after:
            declare("post_attn_norm", "post_attention", "post_attention_norm")
            declare("post_mlp_norm", "post_feedforward", "post_ffw_norm")
