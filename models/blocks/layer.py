"""A layer: what mixes its tokens, its feed-forward, the norms around both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.attention import Attend
from octavo.models.blocks.experts import Experts, RunExperts
from octavo.models.blocks.layer_inputs import Tail
from octavo.models.blocks.mixers import (
    Attentions,
    Mixer,
    Recurrent,
    apply_mixer,
    attention_of,
    recurrent_of,
    with_attention,
)
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms
from octavo.models.blocks.state_rows import StateRows
from octavo.models.cache_spec import CacheSpec, SharedCache
from octavo.models.checks import MAX_LAYERS, is_integer
from octavo.models.layers import Rotary
from octavo.models.parameters import ParamSpec, flatten
from octavo.models.rope import Rope
from octavo.models.stored_names import COMMON, StoredNames
from octavo.models.tensor_layouts import Tensor, with_tensors

FeedForward = MLP | Experts
"""What computes each token by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of a decoder. Equal layers share one traced function.

    Attributes:
        mixer: what mixes its tokens; None for nothing.
        feed_forward: what computes each token by itself; None for nothing.
        norms: around both.
        cache_of: the earlier layer whose cache the mixer reads; None where it has its own.
        stored: what its tensors are called on disk.
        tail: what follows the feed-forward; None for nothing.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: Norms
    cache_of: int | None = None
    stored: StoredNames = COMMON
    tail: Tail | None = None

    def __post_init__(self) -> None:
        if self.cache_of is not None and not is_integer(self.cache_of, 0, MAX_LAYERS - 1):
            raise ModelLoadError(
                f"cache_of = {shorten(self.cache_of)} is not allowed: an earlier layer's number"
            )
        num_parts = (self.mixer is not None) + (self.feed_forward is not None)
        if num_parts == 0 or (num_parts == 1 and self.norms.parallel):
            raise ModelLoadError(
                f"a layer of {num_parts} is not allowed: a mixer, a feed-forward or both, and both "
                f"with parallel norms"
            )
        shares_cache = self.attention is not None and self.attention.shares_cache
        if shares_cache != (self.cache_of is not None):
            raise ModelLoadError(
                f"cache_of = {self.cache_of} is not allowed: a number if the mixer has "
                f"shares_cache, and none if not"
            )

    @property
    def attention(self) -> Attentions | None:
        """What of its mixer attends over pages; None for nothing."""
        return attention_of(self.mixer)

    @property
    def recurrent(self) -> Recurrent | None:
        """What of its mixer keeps a state; None for nothing."""
        return recurrent_of(self.mixer)

    def with_attention(self, attention: Attentions) -> LayerSpec:
        """The same layer with another attention in place of its own."""
        return dataclasses.replace(self, mixer=with_attention(self.mixer, attention))

    def caches(self) -> tuple[CacheSpec, ...]:
        """What the layer keeps of its tokens: of its attention, of its recurrent part."""
        kept: list[CacheSpec] = []
        if self.cache_of is not None:
            kept.append(SharedCache(self.cache_of))
        elif self.attention is not None:
            kept.append(self.attention.cache())
        if self.recurrent is not None:
            kept.append(self.recurrent.cache())
        return tuple(kept)

    @property
    def rotary(self) -> tuple[Rope, int] | None:
        """Rotary embedding of its attention, and the size of what it rotates; None for none."""
        return None if self.attention is None else self.attention.rotary

    @property
    def _parts(self) -> tuple[Attentions | Recurrent | FeedForward | Tail, ...]:
        parts = (self.attention, self.recurrent, self.feed_forward, self.tail)
        return tuple(part for part in parts if part is not None)

    def declare(self, hidden_size: int, dtype: jnp.dtype) -> dict[str, ParamSpec]:
        """The specs of its parameters by name."""
        norms = flatten(self.norms.parameters(hidden_size))
        absent = tuple(
            name for name, part in (("attn_norm", self.mixer), ("mlp_norm", self.feed_forward))
            if part is None
        )  # fmt: skip
        specs = {
            name: spec
            for name, spec in norms.items()
            if not name.removeprefix("post_").startswith(absent)
        }
        for part in self._parts:
            specs |= flatten(part.parameters(hidden_size, dtype))
        if self.stored == COMMON:
            return specs
        stored = self.stored.resolve(
            tensor for spec in specs.values() for tensor in spec.layout.tensors
        )

        def as_stored(tensor: Tensor) -> Tensor:
            # Parts of one tensor share its name, and stay as their block declares them.
            return tensor if tensor.stored_rows is not None else stored[tensor.name]

        return {
            name: dataclasses.replace(spec, layout=with_tensors(spec.layout, as_stored))
            for name, spec in specs.items()
        }

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token's products multiply with."""
        return sum(part.num_weights(hidden_size) for part in self._parts)

    def num_idle_weights(self, hidden_size: int) -> int:
        """Numbers that others' products multiply with: of the experts that a token passes by."""
        if not isinstance(self.feed_forward, Experts):
            return 0
        return self.feed_forward.num_idle_weights(hidden_size)

    @property
    def chosen_share(self) -> float:
        """Of its experts, those that a token goes to; 1 where there are none."""
        if not isinstance(self.feed_forward, Experts):
            return 1.0
        return self.feed_forward.router.num_chosen / self.feed_forward.router.num_experts


def apply_layer(
    mixer: Mixer | None,
    feed_forward: FeedForward | None,
    norms: Norms,
    weights: Mapping[str, Any],
    x: jax.Array,
    rotary: Rotary | None,
    caches: tuple[Any, ...],
    attend: tuple[Attend | StateRows, ...],
    run_experts: RunExperts | None = None,
    tail: Tail | None = None,
    layer_input: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """One layer of the residual stream.

    Args:
        mixer, feed_forward, norms, tail: of the layer's spec.
        weights: the layer's.
        x: [T, E].
        rotary: tables for the spec's.
        caches, attend: see `apply_mixer`, whose caches are the layer's own or those it reads; none
            without a mixer.
        run_experts: see `Experts.apply`; None where the feed-forward has no experts.
        layer_input: the layer's own [T, P]; None where its tail takes none.

    Returns:
        x [T, E], and the new caches.
    """
    normed, mixed = x, x
    if mixer is not None:
        with jax.named_scope("mixer"):
            normed = norms.enter(x, weights, "attn")
            out, caches = apply_mixer(mixer, weights, normed, rotary, caches, attend)
            mixed = x + norms.leave(out, weights, "attn")
    x = mixed
    if feed_forward is not None:
        with jax.named_scope("mlp"):
            if not norms.parallel:
                normed = norms.enter(mixed, weights, "mlp")
            if isinstance(feed_forward, Experts):
                out = feed_forward.apply(weights, normed, run_experts, mixed)
            else:
                out = feed_forward.apply(weights, normed)
            x = mixed + norms.leave(out, weights, "mlp")
    if tail is not None:
        with jax.named_scope("tail"):
            x = tail.apply(weights, x, layer_input)
    return x, caches
