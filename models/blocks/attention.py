"""Softmax attention over a cache of keys and values.

wqkv holds, for each KV head, the queries that read it, then its key, then its value; so a split
over KV heads splits all three.

Shape suffixes: T tokens, E hidden, Hq and Hkv heads, G query heads a KV head, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from octavo.engine.errors import ModelLoadError
from octavo.models.blocks.norms import Norm
from octavo.models.cache_spec import PagedKVCache
from octavo.models.checks import check_flag, check_positive, check_size
from octavo.models.layers import Rotary, apply_rotary, linear, rms_norm, row_major
from octavo.models.parameters import param
from octavo.models.rope import Rope
from octavo.models.tensor_layouts import (
    ByHead,
    FusedHeads,
    HeadColumns,
    HeadOrder,
    Tensor,
    Whole,
)

NUM_INPUTS = {"wqkv": 1, "wo": 3}
"""Linear layer -> leading dimensions of its weight that the product contracts."""
REGROUPED = ("wqkv", "bqkv", "wo", "sinks")
"""Parameters whose dimensions hold KV heads, of which there may be copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What a layer asks of attention; hashable, so that it can be a static argument.

    Attributes:
        scale: multiplies q · k.
        sliding_window: a token at position p sees positions > p - sliding_window; None sees all
            up to p.
        logit_softcap: c in c · tanh(logit / c), applied before the mask; None does not cap.
        has_sinks: each head has a logit of its own in the softmax's denominator.
        value_size: values are the first so many numbers of keys; None has them on their own.
        attention_chunk: positions are cut into chunks of so many, and a token sees those of its
            own, up to itself; None is no such cut.
    """

    scale: float
    sliding_window: int | None = None
    logit_softcap: float | None = None
    has_sinks: bool = False
    value_size: int | None = None
    attention_chunk: int | None = None


class Attend(Protocol):
    """Writes a layer's new keys and values into its cache and attends over the cache."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Any,
        attention: LayerAttention,
        sinks: jax.Array | None,
        /,
    ) -> tuple[jax.Array, Any]:
        """q [T, Hq, D], k and v [T, Hkv, D], sinks float32 [Hq] -> (out [T, Hq, D], new cache).

        If k and v are None, the cache is another layer's: it holds the step's tokens already and is
        only read. If v alone is None, values are the beginnings of keys, as wide as
        `attention.value_size` says, and so is out. `sinks` are None unless `attention.has_sinks`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention. Query head h reads KV head h // (num_heads / num_kv_heads).

    Attributes:
        num_heads, num_kv_heads, head_dim: Hq, Hkv and D.
        rope: rotary embedding of queries and keys; None rotates none.
        sliding_window, logit_softcap, attention_chunk: see `LayerAttention`.
        scale: multiplies q · k; 0 stands for 1 / sqrt(head_dim).
        qkv_bias, out_bias: which linear layers add a bias.
        qk_norm: normalizes each head's query and key before the rotary embedding; None does not.
        qk_norm_whole: it normalizes all heads' queries together, and so keys.
        qk_norm_last: it comes behind the rotary embedding.
        sinks: each query head has a learned logit in the softmax's denominator (an attention sink),
            whose value is zero.
        output_gate: what a head returns is multiplied by the sigmoid of a gate, which is as wide
            and lies behind the head's query on disk.
        shares_cache: the layer has no keys and values of its own and reads the cache of the layer
            that its `LayerSpec` names.
        kv_head_copies: adjacent KV heads that are copies of one head of the checkpoint, so that
            KV heads divide over devices; `num_kv_heads` counts the copies.
        value_norm_eps: each head's value is divided by its root mean square, this much added to the
            mean square; None does not.
        values_are_keys: values have no weights of their own: they are the keys, before these are
            normalized and rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    sliding_window: int | None = None
    logit_softcap: float | None = None
    scale: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    qk_norm_whole: bool = False
    sinks: bool = False
    output_gate: bool = False
    shares_cache: bool = False
    kv_head_copies: int = 1
    value_norm_eps: float | None = None
    values_are_keys: bool = False
    attention_chunk: int | None = None
    qk_norm_last: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "kv_head_copies"):
            check_size(name, getattr(self, name))
        for name in (
            "qkv_bias",
            "out_bias",
            "qk_norm_whole",
            "qk_norm_last",
            "sinks",
            "output_gate",
            "shares_cache",
            "values_are_keys",
        ):
            check_flag(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_kv_heads = {self.num_kv_heads} is not allowed: "
                f"a divisor of num_heads ({self.num_heads})"
            )
        if self.num_kv_heads % self.kv_head_copies:
            raise ModelLoadError(
                f"kv_head_copies = {self.kv_head_copies} is not allowed: "
                f"a divisor of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim = {self.head_dim} is not allowed: an even number")
        if self.rope is not None:
            self.rope.check_head_dim(self.head_dim)
        if self.qk_norm_last and (self.qk_norm is None or self.qk_norm_whole):
            raise ModelLoadError(
                "qk_norm_last = true is not allowed: false, without qk_norm or with qk_norm_whole"
            )
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        if self.attention_chunk is not None:
            check_size("attention_chunk_size", self.attention_chunk)
            if self.sliding_window is not None:
                raise ModelLoadError(
                    f"attention_chunk_size = {self.attention_chunk} is not allowed: none, with "
                    f"sliding_window"
                )
        if self.logit_softcap is not None:
            check_positive("attn_logit_softcap", self.logit_softcap)
        if self.value_norm_eps is not None:
            check_positive("value_norm_eps", self.value_norm_eps)
        if self.values_are_keys and self.stored_order is not None:
            raise ModelLoadError(
                "values_are_keys = true is not allowed: false, where keys lie otherwise on disk"
            )
        if self.scale == 0.0:
            object.__setattr__(self, "scale", 1.0 / math.sqrt(self.head_dim))
        check_positive("query_scale", self.scale)

    @property
    def num_queries_per_kv(self) -> int:
        """G, query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_query_rows(self) -> int:
        """Rows of D in wqkv, before the key, that one KV head has: queries, each with its gate."""
        return self.num_queries_per_kv * (2 if self.output_gate else 1)

    @property
    def num_kv_rows(self) -> int:
        """Rows of D in wqkv, behind the queries, that one KV head has: its key, and its value."""
        if self.shares_cache:
            return 0
        return 1 if self.values_are_keys else 2

    @property
    def num_checkpoint_kv_heads(self) -> int:
        """KV heads on disk, before copies are made."""
        return self.num_kv_heads // self.kv_head_copies

    @property
    def asked(self) -> LayerAttention:
        """What the layer asks of an attention backend."""
        return LayerAttention(
            scale=self.scale,
            sliding_window=self.sliding_window,
            logit_softcap=self.logit_softcap,
            has_sinks=self.sinks,
            attention_chunk=self.attention_chunk,
        )

    @property
    def rotary(self) -> tuple[Rope, int] | None:
        """Rotary embedding and size of what it rotates; None for none."""
        return None if self.rope is None else (self.rope, self.head_dim)

    @property
    def stored_order(self) -> HeadOrder | None:
        """Where the rows of queries and keys lie on disk; None if it is as in memory."""
        if self.rope is None or self.rope.proportional:
            return None
        num_rotated = self.rope.rotary_dim(self.head_dim)
        if num_rotated == self.head_dim and not self.rope.pairs:
            return None
        return HeadOrder(self.head_dim, num_rotated, self.rope.pairs)

    def cache(self) -> PagedKVCache:
        """What the layer keeps of its tokens; a shared one is kept once."""
        return PagedKVCache(
            num_kv_heads=self.num_kv_heads,
            key_size=self.head_dim,
            value_size=self.head_dim,
            window=self.sliding_window or self.attention_chunk,
        )

    def with_kv_heads(self, num_kv_heads: int) -> Attention:
        """The same attention with so many KV heads, copies counted."""
        copies = num_kv_heads // self.num_checkpoint_kv_heads
        return dataclasses.replace(self, num_kv_heads=num_kv_heads, kv_head_copies=copies)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        num_heads = (3 if self.output_gate else 2) * self.num_heads
        num_heads += self.num_kv_rows * self.num_kv_heads
        return hidden_size * self.head_dim * num_heads

    def parameters(self, hidden_size: int, dtype: jnp.dtype) -> nnx.Module:
        """wqkv [E, Hkv, G + 2, D] (G where the cache is shared, G + 1 where values are keys; gates,
        if any, each follow their query), wo [Hkv, G, D, E], and, if any, their biases bqkv and bo,
        the norms q_norm and k_norm [D] (or [Hq · D] and, copies not counted, [Hkv · D]), and sinks
        [Hkv, G]."""
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
            cache: the layer's, or the one it reads.
            attend: see `Attend`.

        Returns:
            [T, E], and the new cache.
        """
        num_tokens, group, rows = x.shape[0], self.num_queries_per_kv, self.num_query_rows
        qkv = row_major(linear(x, weights["wqkv"]))  # [T, Hkv, G + 2, D]
        if self.qkv_bias:
            qkv = qkv + weights["bqkv"][None]
        q = qkv[:, :, :rows].reshape(num_tokens, self.num_heads, -1, self.head_dim)
        q, gate = q[:, :, 0], q[:, :, -1]
        q = self._placed(q, weights, "q_norm", rotary)
        if rotary is not None and self.rope is not None and self.rope.temperature is not None:
            q = q * rotary[2].astype(q.dtype)[:, None, None]
        k = v = None
        if not self.shares_cache:
            k = self._placed(qkv[:, :, rows], weights, "k_norm", rotary)
            v = qkv[:, :, rows + self.num_kv_rows - 1]
            if self.value_norm_eps is not None:
                v = rms_norm(v, None, self.value_norm_eps)
        sinks = weights["sinks"].reshape(-1) if self.sinks else None
        out, cache = attend(q, k, v, cache, self.asked, sinks)
        if self.output_gate:
            out = out.astype(x.dtype) * jax.nn.sigmoid(gate)
        grouped = (num_tokens, self.num_kv_heads, group, self.head_dim)
        out = linear(out.astype(x.dtype).reshape(grouped), weights["wo"], num_inputs=3)
        if self.out_bias:
            out = out + weights["bo"][None]
        return out, cache

    def _placed(
        self,
        heads: jax.Array,
        weights: Mapping[str, Any],
        norm: str,
        rotary: Rotary | None,
    ) -> jax.Array:
        """Queries or keys [T, H, D], normalized and rotated by their positions."""
        if self.qk_norm is not None and self.qk_norm_whole:
            heads = self._normalized_whole(self.qk_norm, heads, weights, norm)
        elif self.qk_norm is not None and not self.qk_norm_last:
            heads = self.qk_norm(heads, weights, norm)
        if rotary is not None:
            heads = apply_rotary(heads, *rotary[:2])
        if self.qk_norm is not None and self.qk_norm_last:
            heads = self.qk_norm(heads, weights, norm)
        return heads

    def _normalized_whole(
        self, norm: Norm, heads: jax.Array, weights: Mapping[str, Any], name: str
    ) -> jax.Array:
        """All heads [T, H, D] as one vector a token. Copies of heads change no mean."""
        if name == "k_norm" and self.kv_head_copies > 1:
            by_head = weights[name].reshape(-1, self.head_dim)
            weights = {name: jnp.repeat(by_head, self.kv_head_copies, axis=0).reshape(-1)}
        return norm(heads.reshape(len(heads), -1), weights, name).reshape(heads.shape)


@partial(jax.jit, static_argnames=("old", "new"))
def regroup(
    parts: Mapping[str, jax.Array], *, old: Attention, new: Attention
) -> dict[str, jax.Array]:
    """The parameters of `REGROUPED` of `old`, for `new`, which differs in copies of KV heads alone.

    Args:
        parts: those that there are, by name.
    """
    new_group, rows, new_rows = new.num_queries_per_kv, old.num_query_rows, new.num_query_rows
    heads, head_dim = new.num_kv_heads, new.head_dim
    regrouped: dict[str, jax.Array] = {}
    for name, array in parts.items():
        if name == "wo":  # [Hkv, G, D, E]
            regrouped[name] = array.reshape(heads, new_group, head_dim, -1)
            continue
        if name == "sinks":  # [Hkv, G]
            regrouped[name] = array.reshape(heads, new_group)
            continue
        # [E, Hkv, G + 2, D], or [Hkv, G + 2, D] for a bias.
        lead = array.shape[:-3]
        q = array[..., :rows, :].reshape(*lead, heads, new_rows, head_dim)
        kv = array[..., :: old.kv_head_copies, rows:, :]
        kv = jnp.repeat(kv, new.kv_head_copies, axis=-3)
        regrouped[name] = jnp.concatenate([q, kv], axis=-2)
    return regrouped


class _Parameters(nnx.Module):
    def __init__(self, attention: Attention, hidden: int, dtype: jnp.dtype) -> None:
        a = attention
        kv_heads, group, dim = a.num_kv_heads, a.num_queries_per_kv, a.head_dim
        outputs = (kv_heads, a.num_query_rows + a.num_kv_rows, dim)
        axes = ("kv_heads", None, "head_dim")

        self.wqkv = param(
            (hidden, *outputs),
            dtype,
            ("embed", *axes),
            _fused(a, "weight", hidden),
            num_inputs=NUM_INPUTS["wqkv"],
        )
        if a.qkv_bias:
            self.bqkv = param(outputs, dtype, axes, _fused(a, "bias"), init="zeros")
        if a.qk_norm is not None:
            self._add_norm(a, a.qk_norm, "q", a.num_heads)
            if not a.shares_cache:
                self._add_norm(a, a.qk_norm, "k", a.num_checkpoint_kv_heads)
        self.wo = param(
            (kv_heads, group, dim, hidden),
            dtype,
            (*axes, "embed"),
            HeadColumns(
                tensor=_output("weight", hidden, a.num_heads * dim), num_queries=group, head_dim=dim
            ),
            num_inputs=NUM_INPUTS["wo"],
        )
        if a.sinks:
            sinks = Tensor(name="self_attn.sinks", gguf="attn_sinks.weight", shape=(a.num_heads,))
            self.sinks = param(
                (kv_heads, group),
                jnp.dtype(jnp.float32),
                ("kv_heads", None),
                ByHead(tensor=sinks, num_queries=group),
            )
        if a.out_bias:
            self.bo = param(
                (hidden,), dtype, ("embed",), Whole(_output("bias", hidden)), init="zeros"
            )

    def _add_norm(self, a: Attention, norm: Norm, which: str, num_heads: int) -> None:
        params = norm.params(
            f"{which}_norm",
            num_heads * a.head_dim if a.qk_norm_whole else a.head_dim,
            None if a.qk_norm_whole else "head_dim",
            stored=f"self_attn.{which}_norm",
            gguf=f"attn_{which}_norm",
            order=a.stored_order,
        )
        for name, value in params.items():
            setattr(self, name, value)


def _output(kind: str, *shape: int) -> Tensor:
    return Tensor(name=f"self_attn.o_proj.{kind}", gguf=f"attn_output.{kind}", shape=shape)


def _fused(a: Attention, kind: str, *inputs: int) -> FusedHeads:
    def tensor(name: str, num_heads: int) -> Tensor:
        order, rows = None if name == "v" else a.stored_order, a.head_dim
        if name == "q" and a.output_gate:
            order = None if order is None else dataclasses.replace(order, num_others=a.head_dim)
            rows *= 2
        return Tensor(
            name=f"self_attn.{name}_proj.{kind}",
            gguf=f"attn_{name}.{kind}",
            shape=(num_heads * rows, *inputs),
            rotary_dim=None if name == "v" else a.head_dim,
            order=order,
        )

    names = ("k", "v")[: a.num_kv_rows]
    return FusedHeads(
        q=tensor("q", a.num_heads),
        kv=tuple(tensor(name, a.num_checkpoint_kv_heads) for name in names),
        num_kv_heads=a.num_kv_heads,
        num_queries=a.num_query_rows,
        head_dim=a.head_dim,
        copies=a.kv_head_copies,
    )
