"""What a family of models is, and what all families read alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.blocks.layer import FeedForward, LayerSpec
from octavo.models.blocks.layer_inputs import LayerInputs
from octavo.models.blocks.mixers import Attentions
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms
from octavo.models.checks import MAX_LAYERS, check_positive
from octavo.models.config import ModelConfig
from octavo.models.families.config_fields import ConfigFields
from octavo.models.layers import Activation
from octavo.models.stored_names import COMMON, StoredNames

if TYPE_CHECKING:
    from octavo.models.families.gguf_metadata import Metadata

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_SLIDES = {"full_attention": False, "sliding_attention": True}


def _no_more_fields(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    del metadata, fields
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        architecture: the entry of `architectures` in a config.json.
        model_type: its `model_type`, for files that name no architecture.
        also: further `model_type`s that mean the same.
        aliases: further entries of `architectures` that do.
        read: its fields -> the model. Fields that it leaves unread are refused by name.
        models: what people know its models as.
        real: a checkpoint of it that was served, and in which format; empty if none was.
        defaults: fields that a composite checkpoint's `text_config` may leave out.
        names_own_code: its files often name code of theirs (`auto_map`), which computes what the
            architecture's name stands for. It is never run; of other families it is refused.
        gguf: `general.architecture` of its GGUF files; None where none are read.
        gguf_pairs: such files store queries and keys for rotary embeddings of adjacent pairs.
        gguf_keys: keys of such files beyond the common ones, without the architecture's prefix.
        gguf_fields: from a GGUF's metadata, and the config.json fields that follow from the common
            keys, to the further ones that `read` reads.
    """

    architecture: str
    model_type: str
    read: Callable[[ConfigFields], ModelConfig]
    also: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    models: str = ""
    real: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names_own_code: bool = False
    gguf: str | None = None
    gguf_pairs: bool = False
    gguf_keys: frozenset[str] = frozenset()
    gguf_fields: Callable[[Metadata, Mapping[str, Any]], dict[str, Any]] = _no_more_fields


def num_layers(fields: ConfigFields) -> int:
    """How many layers there are."""
    number: int = fields.size("num_hidden_layers", high=MAX_LAYERS)
    return number


def heads(fields: ConfigFields) -> dict[str, Any]:
    """Head counts and the head size, as `Attention` takes them."""
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", default=None)
    return {
        "num_heads": num_heads,
        "num_kv_heads": fields.size("num_key_value_heads", default=num_heads),
        "head_dim": head_dim or fields.size("hidden_size") // num_heads,
    }


def activation(
    fields: ConfigFields, default: Activation = "silu", more: Mapping[str, Activation] | None = None
) -> Activation:
    """The nonlinearity of the MLP's gate.

    Args:
        default: what an absent field means.
        more: further names that the family has.

    Raises:
        UnsupportedModelError: another one, by name.
    """
    name = fields.text("hidden_activation", default=None)
    name = fields.text("hidden_act", default=None) if name is None else name
    if name is None:
        return default
    known = _ACTIVATIONS | dict(more or {})
    if name not in known:
        raise UnsupportedModelError(
            f"{fields.where}: hidden_act = {shorten(name)} is not supported: {', '.join(known)}"
        )
    return known[name]


def epsilon(fields: ConfigFields, default: float = 1e-6) -> float:
    """Of the norms."""
    value: float = fields.number("rms_norm_eps", default=default)
    return value


def multiplier(fields: ConfigFields, name: str) -> float:
    """A number above 0, 1 where the file does not say.

    Raises:
        ModelLoadError: another number.
    """
    value: float = fields.number(name, default=1.0)
    check_positive(name, value)
    return value


def layer_types(fields: ConfigFields, known: Sequence[str]) -> list[str] | None:
    """What `layer_types` calls each layer; None where the file does not say.

    Args:
        known: what it may call them.

    Raises:
        UnsupportedModelError: another type of layer, by name.
        ModelLoadError: not one entry a layer.
    """
    number, named = num_layers(fields), fields.raw("layer_types")
    if named is None:
        return None
    if not isinstance(named, (list, tuple)) or any(name not in known for name in named):
        raise UnsupportedModelError(
            f"{fields.where}: layer_types = {shorten(named)} is not supported: a list of "
            f"{' and '.join(known)}"
        )
    if len(named) != number:
        raise ModelLoadError(
            f"{fields.where}: layer_types = {len(named)} entries is not allowed: "
            f"{number}, by num_hidden_layers"
        )
    return list(named)


def slides(fields: ConfigFields, default: Callable[[int], bool]) -> list[bool]:
    """Which layers have a sliding window: as `layer_types` says, or else `default` of its number.

    Raises: as `layer_types`.
    """
    named = layer_types(fields, list(_SLIDES))
    if named is None:
        return [default(layer) for layer in range(num_layers(fields))]
    return [_SLIDES[name] for name in named]


def need_head_dim(fields: ConfigFields) -> None:
    """Refuse a file of a family whose head size does not follow from other fields.

    Raises:
        ModelLoadError: head_dim is missing.
    """
    if fields.integer("head_dim", default=None) is None:
        raise ModelLoadError(f"{fields.where} lacks head_dim")


def layer(
    attention: Attentions, feed_forward: FeedForward, norms: Norms, stored: StoredNames = COMMON
) -> LayerSpec:
    """A layer of attention and a feed-forward."""
    return LayerSpec(mixer=attention, feed_forward=feed_forward, norms=norms, stored=stored)


def gated_mlp(fields: ConfigFields) -> MLP:
    """The MLP of most families."""
    return MLP(
        intermediate_size=fields.size("intermediate_size"),
        activation=activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
    )


def model(
    fields: ConfigFields,
    layers: list[LayerSpec],
    norms: Norms,
    *,
    tied: bool = False,
    embedding_scale: float | None = None,
    logit_scale: float | None = None,
    final_logit_softcap: float | None = None,
    final_norm_stored: str = "model.norm",
    layer_inputs: LayerInputs | None = None,
    output_bias: bool = False,
) -> ModelConfig:
    """The model of these layers, and of what every family says in the same words.

    Args:
        norms: of the layers; the final norm is like them.
        tied: what an absent `tie_word_embeddings` means.
        embedding_scale, logit_scale, final_logit_softcap, final_norm_stored, layer_inputs,
            output_bias: of `ModelConfig`.
    """
    # Both are read, as a file that was written again may have the old name beside the new one.
    dtype, old_name = (fields.text(name, default=None) for name in ("dtype", "torch_dtype"))
    dtype = dtype or old_name
    return ModelConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        layers=tuple(layers),
        final_norm=norms.norm,
        final_norm_stored=final_norm_stored,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=tied),
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        final_logit_softcap=final_logit_softcap,
        max_position_embeddings=fields.size("max_position_embeddings"),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        checkpoint_dtype=dtype or "float32",
        layer_inputs=layer_inputs,
        output_bias=output_bias,
    )
