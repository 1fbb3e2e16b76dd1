"""A GGUF file's metadata -> `ModelConfig`.

Metadata are put into the words of a config.json, each key checked, and read by the same family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import MAX_LAYERS, MAX_SIZE, is_integer
from octavo.models.config import ModelConfig
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.table import GGUF_ARCHITECTURES
from octavo.models.rope import RopeScaling

_COMMON_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "vocab_size",
    }
)

_YARN_KEYS = frozenset(
    {
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
    }
)


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    where: str,
    vocab_rows: int,
    tied: bool,
    rope_factors: tuple[float, ...] = (),
    longrope: tuple[tuple[float, ...], tuple[float, ...]] = ((), ()),
    checkpoint_dtype: str = "bfloat16",
) -> ModelConfig:
    """The model that a GGUF file describes.

    Args:
        metadata: the file's key-value section.
        where: the file, for messages.
        vocab_rows: rows of its embedding.
        tied: whether it has no output matrix of its own.
        rope_factors: its divisors of rotary frequencies, if it has them.
        longrope: those of short and of long contexts, if it has them.
        checkpoint_dtype: see `ModelConfig`.

    Raises:
        UnsupportedModelError: an architecture or a key that is not supported, by name.
        ModelLoadError: a key that is missing or malformed.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: general.architecture = {shorten(architecture)} is not supported: "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    family = GGUF_ARCHITECTURES[architecture]
    keys = Metadata(metadata, architecture, where)
    of_yarn = _YARN_KEYS if keys.raw("rope.scaling.type") == "yarn" else frozenset()
    keys.refuse_unknown(_COMMON_KEYS | family.gguf_keys | of_yarn)
    common = _common(keys, has_partial_rotation="rope.dimension_count" in family.gguf_keys) | {
        "vocab_size": vocab_rows,
        "tie_word_embeddings": tied,
        "bos_token_id": _token_id(metadata, "tokenizer.ggml.bos_token_id", where),
        "eos_token_id": list(_eos_token_ids(metadata, where)),
        "dtype": checkpoint_dtype,
    }
    if not rope_factors:  # which say the whole scaling
        common["rope_scaling"] = _rope_scaling(keys, longrope)
    fields = ConfigFields(common | family.gguf_fields(keys, common), where=where)
    config = family.read(fields)
    fields.refuse_unread()
    return _with_factors(config, common["rope_theta"], rope_factors) if rope_factors else config


def _common(keys: Metadata, has_partial_rotation: bool) -> dict[str, Any]:
    """What every architecture says in the same keys, as fields of a config.json."""
    epsilon = keys.decimal("attention.layer_norm_epsilon")
    if epsilon is None:
        keys.need("attention.layer_norm_rms_epsilon", float)
    hidden, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", max(hidden // num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count")[: 2 - has_partial_rotation]:
        if keys.get(key, int, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{keys.where}: {keys.architecture}.{key} = {keys.get(key, int)} is not supported: "
                f"{head_dim}, as wide as keys"
            )
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count", high=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.decimal("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": epsilon,
        "max_position_embeddings": keys.size("context_length"),
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
    }


def _rope_scaling(
    keys: Metadata, longrope: tuple[tuple[float, ...], tuple[float, ...]]
) -> dict[str, Any] | None:
    """A `rope_scaling` of a config.json; None where there is none."""
    kind = keys.get("rope.scaling.type", str, "none")
    factor = keys.decimal("rope.scaling.factor") or keys.decimal("rope.scale_linear")
    original = {"original_max_position_embeddings": "rope.scaling.original_context_length"}
    if any(longrope):
        return {
            "rope_type": "longrope",
            "short_factor": list(longrope[0]),
            "long_factor": list(longrope[1]),
            "attention_factor": keys.decimal("rope.scaling.attn_factor"),
        } | {field: keys.size(key) for field, key in original.items()}
    if kind == "linear" or (kind == "none" and factor not in (None, 1.0)):
        return {"rope_type": "linear", "factor": factor or 1.0}
    if kind == "yarn":
        # A scale of all dimensions stands beside one of rotated ones, which is 1.
        of_all = keys.decimal("rope.scaling.yarn_log_multiplier")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": keys.decimal("rope.scaling.yarn_attn_factor"),
            "beta_fast": keys.decimal("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.decimal("rope.scaling.yarn_beta_slow"),
            "mscale": 1.0 if of_all else None,
            "mscale_all_dim": of_all,
        } | {field: keys.size(key) for field, key in original.items()}
    if kind not in ("none", "longrope"):
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.rope.scaling.type = {shorten(kind)} "
            "is not supported: none, linear, yarn or longrope"
        )
    return None


def _with_factors(config: ModelConfig, theta: float, factors: tuple[float, ...]) -> ModelConfig:
    """The model with one divisor a rotary frequency, which no config.json has, in its layers of
    the base that the file's common key says."""
    scaling = RopeScaling(kind="factors", factors=factors)
    layers = []
    for layer in config.layers:
        attention = layer.attention
        rope = None if attention is None else attention.rope
        if attention is not None and rope is not None and rope.theta == theta:
            rope = dataclasses.replace(rope, scaling=scaling)
            layer = layer.with_attention(dataclasses.replace(attention, rope=rope))
        layers.append(layer)
    return dataclasses.replace(config, layers=tuple(layers))


def _token_id(metadata: Mapping[str, Any], key: str, where: str) -> int | None:
    value = metadata.get(key)
    if value is not None and not is_integer(value, 0, MAX_SIZE):
        raise ModelLoadError(f"{where}: {key} = {shorten(value)} is not allowed: one token id")
    return value


def _eos_token_ids(metadata: Mapping[str, Any], where: str) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = (_token_id(metadata, key, where) for key in keys)
    return tuple(dict.fromkeys(token for token in found if token is not None))
