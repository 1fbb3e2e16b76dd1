"""What a model computes: its layers, and what they have in common. No JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.cache_groups import CacheLayout, cache_layout
from octavo.models.cache_spec import CacheSpec, PagedCache, RecurrentState, SharedCache
from octavo.models.checks import (
    MAX_EOS_TOKENS,
    MAX_LAYERS,
    check_flag,
    check_positive,
    check_size,
    is_integer,
)

if TYPE_CHECKING:
    from octavo.models.blocks.layer import LayerSpec
    from octavo.models.blocks.layer_inputs import LayerInputs
    from octavo.models.blocks.mixers import Attentions
    from octavo.models.blocks.norms import Norm

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. Immutable and hashable; checked on construction.

    Attributes:
        vocab_size, hidden_size: V and E.
        layers: what each layer is made of; see `octavo.models.blocks`.
        final_norm: of what the last layer returns.
        final_norm_stored: what its tensors are called on disk, without ".weight" and ".bias".
        tie_word_embeddings: whether logits come from the embedding itself.
        output_bias: whether the output layer adds one.
        embedding_scale: multiplies embeddings, rounded to their dtype first; None does not.
        logit_scale: multiplies the last logits; None does not.
        final_logit_softcap: c in c · tanh(logit / c) of the last logits; None does not cap.
        max_position_embeddings: positions the model was made for.
        bos_token_id: of the beginning of a text, if there is one.
        eos_token_ids: any of these ends a text.
        checkpoint_dtype: of most weights on disk.
        layer_inputs: what makes inputs that each layer takes for itself; None for none.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: Norm
    final_norm_stored: str = "model.norm"
    tie_word_embeddings: bool = False
    output_bias: bool = False
    embedding_scale: float | None = None
    logit_scale: float | None = None
    final_logit_softcap: float | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"
    layer_inputs: LayerInputs | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            check_size(name, getattr(self, name))
        check_size("num_layers", len(self.layers), MAX_LAYERS)
        check_flag("tie_word_embeddings", self.tie_word_embeddings)
        check_flag("lm_head_bias", self.output_bias)
        for name in ("final_logit_softcap", "logit_scale", "embedding_scale"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in ("checkpoint_dtype", "final_norm_stored"):
            if not isinstance(getattr(self, name), str):
                raise ModelLoadError(
                    f"{name} = {shorten(getattr(self, name))} is not allowed: text"
                )
        self._check_token_ids()
        self._check_shared_caches()
        self._check_layer_inputs()
        if not self.attentions():
            raise UnsupportedModelError(
                "layers = recurrent ones alone is not supported: at least one with attention"
            )

    def _check_token_ids(self) -> None:
        if len(self.eos_token_ids) > MAX_EOS_TOKENS:
            raise ModelLoadError(
                f"eos_token_id = {shorten(self.eos_token_ids)} is not allowed: "
                f"at most {MAX_EOS_TOKENS} token ids"
            )
        named = [("eos_token_id", token_id) for token_id in self.eos_token_ids]
        if self.bos_token_id is not None:
            named.append(("bos_token_id", self.bos_token_id))
        for name, token_id in named:
            if not is_integer(token_id, 0, self.vocab_size - 1):
                raise ModelLoadError(
                    f"{name} = {shorten(token_id)} is not allowed: 0 to {self.vocab_size - 1}, "
                    "by vocab_size"
                )

    def _check_shared_caches(self) -> None:
        for index, layer in enumerate(self.layers):
            owner = layer.cache_of
            if owner is None or layer.attention is None:
                continue
            wanted = layer.attention.cache()
            if owner >= index or wanted not in self.layers[owner].caches():
                raise ModelLoadError(
                    f"layer {index}: cache_of = {owner} is not allowed: an earlier layer that has "
                    f"a cache of its own, {wanted}"
                )

    def _check_layer_inputs(self) -> None:
        given = None if self.layer_inputs is None else self.layer_inputs.size
        for index, layer in enumerate(self.layers):
            taken = None if layer.tail is None else layer.tail.input_size
            if taken != given:
                raise ModelLoadError(
                    f"layer {index}: input_size = {taken} is not allowed: {given}, by layer_inputs"
                )

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    def caches(self) -> tuple[tuple[CacheSpec, ...], ...]:
        """What each layer keeps of its tokens; see `LayerSpec.caches`."""
        return tuple(layer.caches() for layer in self.layers)

    def attentions(self) -> tuple[Attentions, ...]:
        """What attends over pages, one a layer that does."""
        found = (layer.attention for layer in self.layers)
        return tuple(attention for attention in found if attention is not None)

    def own_caches(self) -> tuple[PagedCache | RecurrentState, ...]:
        """The caches that room is needed for, in the order of their layers."""
        return tuple(
            cache
            for caches in self.caches()
            for cache in caches
            if not isinstance(cache, SharedCache)
        )

    def cache_places(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, which of `own_caches` it uses, in the order of its `caches`."""
        places: list[tuple[int, ...]] = []
        num_own = 0
        for caches in self.caches():
            used = []
            for cache in caches:
                if isinstance(cache, SharedCache):
                    used.append(places[cache.layer][0])  # pages come first
                else:
                    used.append(num_own)
                    num_own += 1
            places.append(tuple(used))
        return tuple(places)

    def cache_layout(self) -> CacheLayout:
        """The arrays and groups of `own_caches`."""
        return cache_layout(self.own_caches())

    def common(self, of: Callable[[LayerSpec], T]) -> T | None:
        """What `of` says of every layer; None where layers differ."""
        values = {of(layer) for layer in dict.fromkeys(self.layers)}
        return values.pop() if len(values) == 1 else None

    def num_layer_weights(self) -> int:
        """Numbers that a token's products multiply with, in all layers and to make their inputs."""
        num_weights = sum(layer.num_weights(self.hidden_size) for layer in self.layers)
        if self.layer_inputs is None:
            return num_weights
        return num_weights + self.layer_inputs.num_weights(self.hidden_size, self.num_layers)

    def num_idle_layer_weights(self) -> int:
        """Numbers of the experts that a token does not go to, in all layers."""
        return sum(layer.num_idle_weights(self.hidden_size) for layer in self.layers)

    def with_tensor_parallel(self, tensor_parallel_size: int) -> ModelConfig:
        """The same model with KV heads copied so that they divide over devices.

        The copies of a layer are lcm(num_kv_heads, size) / num_kv_heads, if query heads divide over
        the result, also those of layers that read its cache. If not, nothing changes:
        `AxisRules.sharding` then keeps attention whole on every device, while MLP and vocabulary
        are still split.

        Raises:
            ModelLoadError: the size is below 1.
        """
        if tensor_parallel_size < 1:
            raise ModelLoadError(
                f"tensor_parallel_size = {tensor_parallel_size} is not allowed: at least 1"
            )
        return self._with_kv_heads(lambda heads: math.lcm(heads, tensor_parallel_size))

    def for_context(self, num_tokens: int) -> ModelConfig:
        """The same model, served with at most so many tokens; see `Rope.for_context`."""
        resolved = {layer: _for_context(layer, num_tokens) for layer in dict.fromkeys(self.layers)}
        if all(before is after for before, after in resolved.items()):
            return self
        layers = tuple(resolved[layer] for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    def without_kv_head_copies(self) -> ModelConfig:
        """The same model with the checkpoint's own KV heads."""
        return self._with_kv_heads(lambda heads: heads)

    def _with_kv_heads(self, wanted: Callable[[int], int]) -> ModelConfig:
        """So many KV heads of the checkpoint's, wherever query heads divide over them."""
        places = self.cache_places()
        users: dict[int, list[Attentions]] = {}
        for layer, used in zip(self.layers, places, strict=True):
            if layer.attention is not None:
                users.setdefault(used[0], []).append(layer.attention)

        def num_kv_heads(sharing: list[Attentions]) -> int:
            original = sharing[0].num_checkpoint_kv_heads
            heads = wanted(original)
            divides = all(attention.num_heads % heads == 0 for attention in sharing)
            return heads if divides else original

        heads = {place: num_kv_heads(sharing) for place, sharing in users.items()}
        layers = tuple(
            layer
            if layer.attention is None
            else layer.with_attention(layer.attention.with_kv_heads(heads[used[0]]))
            for layer, used in zip(self.layers, places, strict=True)
        )
        return dataclasses.replace(self, layers=layers)


def _for_context(layer: LayerSpec, num_tokens: int) -> LayerSpec:
    attention = layer.attention
    if attention is None or attention.rope is None:
        return layer
    rope = attention.rope.for_context(num_tokens)
    if rope is attention.rope:
        return layer
    return layer.with_attention(dataclasses.replace(attention, rope=rope))
