"""Attention whose keys and values are made of one small latent a token (MLA), in absorbed form.

A latent c of a token, beside one rotated key r that all heads share, is all that the cache keeps.
Head h's key is [W_uk[h] c, r], its value W_uv[h] c. Neither is ever made: since
q · (W_uk c) = (W_uk^T q) · c, queries are brought into the latent's space instead, attend over
[c, r] as one key that all heads read, and what they find of c goes through W_uv.

Shape suffixes: T tokens, E hidden, H heads, L latent, N and R numbers of a head's query that are
not and that are rotated, V of its value.

Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError
from octavo.models.blocks.attention import NUM_INPUTS as ATTENTION_INPUTS
from octavo.models.blocks.attention import Attend, LayerAttention
from octavo.models.blocks.norms import RMSNorm
from octavo.models.cache_spec import LatentCache
from octavo.models.checks import check_positive, check_size
from octavo.models.layers import Rotary, apply_rotary, linear
from octavo.models.parameters import param
from octavo.models.rope import Rope
from octavo.models.tensor_layouts import (
    FusedHeads,
    HeadColumns,
    HeadMatrices,
    HeadOrder,
    Tensor,
    Transposed,
)

NUM_INPUTS = {"w_query": 1, "w_query_down": 1, "w_latent": 1}
"""Linear layer -> leading dimensions of its weight that the product contracts. wo is as that of
other attention. The products of each head, w_uk and w_uv, are never quantized."""
NORM = RMSNorm(eps=1e-6)
"""Of latents, and of what queries are made of; its epsilon is not the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention over latents.

    Attributes:
        num_heads: H.
        latent_size: L.
        nope_size, rope_size: N and R, numbers of a head's query and key that are not and that are
            rotated.
        value_size: V.
        query_size: of what queries are made of, normalized in between; None makes them of the
            hidden state.
        rope: rotary embedding of the R numbers.
        scale: multiplies q · k; 0 stands for 1 / sqrt(N + R).
    """

    num_heads: int
    latent_size: int
    nope_size: int
    rope_size: int
    value_size: int
    rope: Rope
    query_size: int | None = None
    scale: float = 0.0
    shares_cache = False
    num_kv_heads = 1
    num_checkpoint_kv_heads = 1

    def __post_init__(self) -> None:
        for name in ("num_heads", "latent_size", "nope_size", "rope_size", "value_size"):
            check_size(name, getattr(self, name))
        if self.query_size is not None:
            check_size("query_size", self.query_size)
        if self.rope.rotary_dim(self.rope_size) != self.rope_size:
            raise ModelLoadError(
                f"partial_rotary_factor = {self.rope.fraction} is not allowed: 1, of rope_size"
            )
        self.rope.check_head_dim(self.rope_size)
        if self.scale == 0.0:
            object.__setattr__(self, "scale", 1.0 / math.sqrt(self.nope_size + self.rope_size))
        check_positive("query_scale", self.scale)

    @property
    def head_dim(self) -> int:
        """Numbers of a key as the cache holds it, and of a query that meets it: L + R."""
        return self.latent_size + self.rope_size

    @property
    def asked(self) -> LayerAttention:
        """What the layer asks of an attention backend."""
        return LayerAttention(scale=self.scale, value_size=self.latent_size)

    @property
    def rotary(self) -> tuple[Rope, int]:
        """Rotary embedding and size of what it rotates."""
        return self.rope, self.rope_size

    def cache(self) -> LatentCache:
        """What the layer keeps of its tokens."""
        return LatentCache(key_size=self.head_dim, value_size=self.latent_size)

    def with_kv_heads(self, num_kv_heads: int) -> LatentAttention:
        """The same attention: every device has the latents, whose copies would help nobody."""
        del num_kv_heads
        return self

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        inner = hidden_size if self.query_size is None else self.query_size
        query = inner * self.num_heads * (self.nope_size + self.rope_size)
        down = 0 if self.query_size is None else hidden_size * self.query_size
        latent = hidden_size * self.head_dim
        heads = self.num_heads * self.latent_size * (self.nope_size + self.value_size)
        return query + down + latent + heads + hidden_size * self.num_heads * self.value_size

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """w_query [E, H, 1, N + R], w_latent [E, L + R], latent_norm [L], w_uk [H, N, L],
        w_uv [H, L, V], wo [H, 1, V, E]. With a `query_size` Q also w_query_down [E, Q] and
        query_norm [Q], and w_query is [Q, H, 1, N + R]."""
        return _Parameters(self, hidden_size, dtype)

    def apply(
        self,
        weights: Mapping[str, Any],
        x: jax.Array,
        rotary: Rotary | None,
        cache: Any,
        attend: Attend,
    ) -> tuple[jax.Array, Any]:
        """Attention of x's tokens.

        Args:
            weights: the layer's.
            x: [T, E], normalized.
            rotary: tables of `rope` for their positions.
            cache: the layer's.
            attend: see `Attend`; it is given latents as keys [T, 1, L + R], and no values.

        Returns:
            [T, E], and the new cache.
        """
        assert rotary is not None
        latent, rotated = jnp.split(linear(x, weights["w_latent"]), [self.latent_size], axis=-1)
        rotated = apply_rotary(rotated[:, None], *rotary[:2])
        latent = NORM(latent, weights, "latent_norm")[:, None]
        keys = jnp.concatenate([latent, rotated], axis=-1)  # [T, 1, L + R]

        inner = x
        if self.query_size is not None:
            inner = NORM(linear(x, weights["w_query_down"]), weights, "query_norm")
        q = linear(inner, weights["w_query"])[:, :, 0]  # [T, H, N + R]
        nope, rotated = jnp.split(q, [self.nope_size], axis=-1)
        rotated = apply_rotary(rotated, *rotary[:2])
        q = jnp.concatenate([_by_head(nope, weights["w_uk"]), rotated], axis=-1)
        if self.rope.temperature is not None:
            q = q * rotary[2].astype(q.dtype)[:, None, None]

        out, cache = attend(q, keys, None, cache, self.asked, None)  # [T, H, L]
        out = _by_head(out.astype(x.dtype), weights["w_uv"])[:, :, None]
        return linear(out, weights["wo"], num_inputs=3), cache


def _by_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Each head's numbers by a matrix of its own: [T, H, in] · [H, in, out] -> [T, H, out]."""
    is_float32 = x.dtype == jnp.float32
    out = jax.lax.dot_general(
        x,
        weight,
        dimension_numbers=(((2,), (1,)), ((1,), (0,))),
        precision=jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=x.dtype,
    )
    return out.swapaxes(0, 1)


class _Parameters(nnx.Module):
    def __init__(self, attention: LatentAttention, hidden: int, dtype: jnp.dtype) -> None:
        a = attention
        query_rows, key_rows = a.nope_size + a.rope_size, a.nope_size + a.value_size

        def tensor(name: str, gguf: str, *shape: int, before: int | None = None) -> Tensor:
            order = None
            if before is not None and a.rope.pairs:
                order = HeadOrder(a.rope_size, a.rope_size, pairs=True, num_before=before)
            return Tensor(
                name=f"self_attn.{name}.weight", gguf=f"{gguf}.weight", shape=shape, order=order
            )

        inner, name, gguf = hidden, "q_proj", "attn_q"
        if a.query_size is not None:
            inner, name, gguf = a.query_size, "q_b_proj", "attn_q_b"
            down = tensor("q_a_proj", "attn_q_a", a.query_size, hidden)
            self.w_query_down = param(
                (hidden, a.query_size),
                dtype,
                ("embed", None),
                Transposed(down),
                num_inputs=NUM_INPUTS["w_query_down"],
            )
            self._add_norm("query_norm", a.query_size, "q_a_layernorm", "attn_q_a_norm")
        query = tensor(name, gguf, a.num_heads * query_rows, inner, before=a.nope_size)
        self.w_query = param(
            (inner, a.num_heads, 1, query_rows),
            dtype,
            ("embed" if a.query_size is None else None, "heads", None, "head_dim"),
            FusedHeads(
                q=query,
                kv=(),
                num_kv_heads=a.num_heads,
                num_queries=1,
                head_dim=query_rows,
                copies=1,
            ),
            num_inputs=NUM_INPUTS["w_query"],
        )

        latent = tensor(
            "kv_a_proj_with_mqa", "attn_kv_a_mqa", a.head_dim, hidden, before=a.latent_size
        )
        self.w_latent = param(
            (hidden, a.head_dim),
            dtype,
            ("embed", None),
            Transposed(latent),
            num_inputs=NUM_INPUTS["w_latent"],
        )
        self._add_norm("latent_norm", a.latent_size, "kv_a_layernorm", "attn_kv_a_norm")

        both = tensor("kv_b_proj", "attn_kv_b", a.num_heads * key_rows, a.latent_size)
        self.w_uk = param(
            (a.num_heads, a.nope_size, a.latent_size),
            dtype,
            ("heads", "head_dim", None),
            HeadMatrices(
                tensor=both, head_rows=key_rows, first=0, num_rows=a.nope_size, transposed=False
            ),
        )
        self.w_uv = param(
            (a.num_heads, a.latent_size, a.value_size),
            dtype,
            ("heads", None, "head_dim"),
            HeadMatrices(
                tensor=both,
                head_rows=key_rows,
                first=a.nope_size,
                num_rows=a.value_size,
                transposed=True,
            ),
        )
        out = tensor("o_proj", "attn_output", hidden, a.num_heads * a.value_size)
        self.wo = param(
            (a.num_heads, 1, a.value_size, hidden),
            dtype,
            ("heads", None, "head_dim", "embed"),
            HeadColumns(tensor=out, num_queries=1, head_dim=a.value_size),
            num_inputs=ATTENTION_INPUTS["wo"],
        )

    def _add_norm(self, name: str, size: int, stored: str, gguf: str) -> None:
        params = NORM.params(name, size, None, stored=f"self_attn.{stored}", gguf=gguf)
        for each, value in params.items():
            setattr(self, each, value)
