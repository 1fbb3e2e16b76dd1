"""What mixes a layer's tokens: attention over pages, a recurrence over a row's state, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax

from octavo.engine.errors import ModelLoadError
from octavo.models.blocks.attention import Attend, Attention
from octavo.models.blocks.gated_delta import GatedDelta
from octavo.models.blocks.latent_attention import LatentAttention
from octavo.models.blocks.mamba2 import Mamba2
from octavo.models.blocks.short_conv import ShortConv
from octavo.models.blocks.state_rows import StateRows
from octavo.models.checks import check_positive
from octavo.models.layers import Rotary, scaled

Recurrent = ShortConv | GatedDelta | Mamba2
"""Mixers that keep a state of fixed size, see `StateRows`."""
Attentions = Attention | LatentAttention
"""Mixers that attend over pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMixers:
    """Attention and a recurrence over the same tokens, each with a cache of its own; what they
    return is added.

    Attributes:
        attention, recurrent: the two.
        attention_scale, recurrent_scale: multiply what each returns.
    """

    attention: Attentions
    recurrent: Recurrent
    attention_scale: float = 1.0
    recurrent_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, kinds in (("attention", Attentions), ("recurrent", Recurrent)):
            if not isinstance(getattr(self, name), get_args(kinds)):
                raise ModelLoadError(
                    f"{name} = {type(getattr(self, name)).__name__} is not allowed: "
                    f"{' or '.join(kind.__name__ for kind in get_args(kinds))}"
                )
            check_positive(f"{name}_scale", getattr(self, f"{name}_scale"))


Mixer = Attentions | Recurrent | ParallelMixers


def attention_of(mixer: Mixer | None) -> Attentions | None:
    """The part that attends over pages; None if there is none."""
    if isinstance(mixer, ParallelMixers):
        return mixer.attention
    return mixer if isinstance(mixer, Attentions) else None


def recurrent_of(mixer: Mixer | None) -> Recurrent | None:
    """The part that keeps a state; None if there is none."""
    if isinstance(mixer, ParallelMixers):
        return mixer.recurrent
    return mixer if isinstance(mixer, Recurrent) else None


def with_attention(mixer: Mixer | None, attention: Attentions) -> Mixer:
    """The mixer with another attention in place of its own."""
    if isinstance(mixer, ParallelMixers):
        return dataclasses.replace(mixer, attention=attention)
    return attention


def apply_mixer(
    mixer: Mixer,
    weights: Mapping[str, Any],
    x: jax.Array,
    rotary: Rotary | None,
    caches: tuple[Any, ...],
    attend: tuple[Attend | StateRows, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
    """What a mixer makes of x's tokens.

    Args:
        mixer: the layer's.
        weights: the layer's.
        x: [T, E], normalized.
        rotary: tables for its attention.
        caches: of its attention, of its recurrent part.
        attend: for each of them, what `Attend` says, and whose tokens these are.

    Returns:
        [T, E], and the new caches.
    """
    if not isinstance(mixer, ParallelMixers):
        out, cache = _apply(mixer, weights, x, rotary, *caches, *attend)
        return out, (cache,)
    attended, pages = _apply(mixer.attention, weights, x, rotary, caches[0], attend[0])
    recurred, state = _apply(mixer.recurrent, weights, x, None, caches[1], attend[1])
    out = scaled(attended, mixer.attention_scale) + scaled(recurred, mixer.recurrent_scale)
    return out, (pages, state)


def _apply(
    mixer: Attentions | Recurrent,
    weights: Mapping[str, Any],
    x: jax.Array,
    rotary: Rotary | None,
    cache: Any,
    attend: Attend | StateRows,
) -> tuple[jax.Array, Any]:
    with jax.named_scope("attention" if isinstance(mixer, Attentions) else "recurrence"):
        if isinstance(mixer, Attentions):
            assert not isinstance(attend, StateRows)
            return mixer.apply(weights, x, rotary, cache, attend)
        assert isinstance(attend, StateRows)
        return mixer.apply(weights, x, rotary, cache, attend)
