"""Root mean square norms, and where a layer has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError
from octavo.models.checks import MAX_NUMBER, check_flag, check_number, check_positive
from octavo.models.layers import rms_norm
from octavo.models.parameters import param
from octavo.models.tensor_layouts import NormWeight, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm:
    """x / rms(x) · weight, in float32.

    Attributes:
        eps: added to the mean square.
        offset: what the architecture adds to the stored weight (1 for Gemma). Weights in memory
            already include it.
    """

    eps: float = 1e-6
    offset: float = 0.0

    def __post_init__(self) -> None:
        check_positive("rms_norm_eps", self.eps)
        check_number("norm_offset", self.offset, -MAX_NUMBER, MAX_NUMBER, "a finite number")

    def param(self, size: int, axis: str, *, name: str, gguf: str) -> nnx.Param[Any]:
        """A multiplier of `size` numbers: float32 always, because 1 + w loses w in bfloat16."""
        tensor = Tensor(name=name, gguf=gguf, shape=(size,))
        layout = NormWeight(tensor, self.offset)
        return param((size,), jnp.dtype(jnp.float32), (axis,), layout, init="ones")

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x [..., E] normalized over its last dimension, times weight [E]."""
        return rms_norm(x, weight, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The norms around a layer's mixer and around its feed-forward.

    Attributes:
        norm: all of them.
        before: what mixer and feed-forward take is normalized.
        after: what they return is normalized, before the residual sum.
    """

    norm: RMSNorm
    before: bool = True
    after: bool = False

    def __post_init__(self) -> None:
        check_flag("norms before", self.before)
        check_flag("norms after", self.after)
        if not self.before and not self.after:
            raise ModelLoadError("norms = none is not allowed: before, after or both")

    def parameters(self, hidden_size: int) -> nnx.Module:
        """Multipliers of the norms that there are."""
        return _Parameters(self, hidden_size)

    def enter(self, x: jax.Array, weights: Mapping[str, Any], name: str) -> jax.Array:
        """What a part takes, of the residual stream x [T, E]; `name` is "attn" or "mlp"."""
        return self.norm(x, weights[f"{name}_norm"]) if self.before else x

    def leave(self, out: jax.Array, weights: Mapping[str, Any], name: str) -> jax.Array:
        """What is added to the residual stream, of what a part returned [T, E]."""
        return self.norm(out, weights[f"post_{name}_norm"]) if self.after else out


class _Parameters(nnx.Module):
    """Names on disk depend on which norms a layer has."""

    def __init__(self, norms: Norms, hidden_size: int) -> None:
        def norm(name: str, gguf: str) -> nnx.Param[Any]:
            return norms.norm.param(
                hidden_size, "embed", name=f"{name}_layernorm.weight", gguf=f"{gguf}.weight"
            )

        if norms.before:
            self.attn_norm = norm("input", "attn_norm")
            self.mlp_norm = norm("pre_feedforward" if norms.after else "post_attention", "ffn_norm")
        if norms.after:
            self.post_attn_norm = norm("post_attention", "post_attention_norm")
            self.post_mlp_norm = norm("post_feedforward", "post_ffw_norm")
