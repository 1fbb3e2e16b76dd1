"""A GGUF file's metadata -> `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.config import (
    MAX_LAYERS,
    MAX_SIZE,
    LayerKind,
    ModelConfig,
    Rope,
    RopeScaling,
    is_integer,
)

_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62
_GEMMA3_GLOBAL_EVERY = 6
_GEMMA3_LOCAL_THETA = 10000.0

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
_WINDOW_KEYS = frozenset({"attention.sliding_window"})
_SOFTCAP_KEYS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_GEMMA3_KEYS = frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"})


class _Metadata:
    """The keys of one architecture, each checked for its type."""

    def __init__(self, values: Mapping[str, Any], architecture: str, where: str) -> None:
        self.values = values
        self.architecture = architecture
        self.where = where

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelLoadError(
                f"{self.where}: {name} = {shorten(value)} is not allowed: one {kind.__name__}"
            )
        return value

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ModelLoadError(f"{self.where} lacks the key {self.architecture}.{key}")
        return value

    def size(self, key: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        """An integer from 1 to `high`, which things may be built by."""
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if value is None:
            raise ModelLoadError(f"{self.where} lacks the key {name}")
        if not is_integer(value, 1, high):
            raise ModelLoadError(
                f"{self.where}: {name} = {shorten(value)} is not allowed: "
                f"an integer from 1 to {high}"
            )
        return int(value)

    def refuse_unknown(self, known: frozenset[str]) -> None:
        prefix = self.architecture + "."
        for name, value in self.values.items():
            if name.startswith(prefix) and name[len(prefix) :] not in known and value:
                raise UnsupportedModelError(
                    f"{self.where}: the key {name} = {shorten(value)} is not supported"
                )


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    where: str,
    vocab_rows: int,
    tied: bool,
    rope_factors: tuple[float, ...] = (),
    checkpoint_dtype: str = "bfloat16",
) -> ModelConfig:
    """The model that a GGUF file describes.

    Args:
        metadata: the file's key-value section.
        where: the file, for messages.
        vocab_rows: rows of its embedding.
        tied: whether it has no output matrix of its own.
        rope_factors: its divisors of rotary frequencies, if it has them.
        checkpoint_dtype: see `ModelConfig`.

    Raises:
        UnsupportedModelError: an architecture or a key that is not supported, by name.
        ModelLoadError: a key that is missing or malformed.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: general.architecture = {shorten(architecture)} is not supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    known, specifics = _ARCHITECTURES[architecture]
    fields = _Metadata(metadata, architecture, where)
    fields.refuse_unknown(_COMMON_KEYS | known)
    hidden, num_heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", max(hidden // num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, int, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{where}: {architecture}.{key} = {fields.get(key, int)} is not supported: "
                f"{head_dim}, as wide as keys"
            )
    common: dict[str, Any] = {
        "vocab_size": vocab_rows,
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_layers": fields.size("block_count", high=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": fields.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(fields.need("attention.layer_norm_rms_epsilon", float)),
        "tie_word_embeddings": tied,
        "max_position_embeddings": fields.size("context_length"),
        "rope": Rope(
            theta=fields.get("rope.freq_base", float, 10000.0),
            scaling=_rope_scaling(fields, rope_factors),
        ),
        "bos_token_id": _token_id(metadata, "tokenizer.ggml.bos_token_id", where),
        "eos_token_ids": _eos_token_ids(metadata, where),
        "checkpoint_dtype": checkpoint_dtype,
    }
    return ModelConfig(**(common | specifics(fields, common)))


def _rope_scaling(fields: _Metadata, factors: tuple[float, ...]) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", str, "none")
    factor = fields.get("rope.scaling.factor", float) or fields.get("rope.scale_linear", float)
    if factors:
        return RopeScaling(kind="factors", factors=factors)
    if kind == "linear" or (kind == "none" and factor not in (None, 1.0)):
        return RopeScaling(kind="linear", factor=factor or 1.0)
    if kind != "none":
        raise UnsupportedModelError(
            f"{fields.where}: {fields.architecture}.rope.scaling.type = {shorten(kind)} "
            "is not supported: none or linear"
        )
    return None


def _decimal(value: float) -> float:
    """A float32 read as the short decimal it was written from: 1e-5, not 9.99999974738e-06."""
    return float(f"{value:.7g}")


def _token_id(metadata: Mapping[str, Any], key: str, where: str) -> int | None:
    value = metadata.get(key)
    if value is not None and not is_integer(value, 0, MAX_SIZE):
        raise ModelLoadError(f"{where}: {key} = {shorten(value)} is not allowed: one token id")
    return value


def _eos_token_ids(metadata: Mapping[str, Any], where: str) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = (_token_id(metadata, key, where) for key in keys)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _llama(fields: _Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _qwen2(fields: _Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(fields: _Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True}


def _gemma(fields: _Metadata, common: Mapping[str, Any], num_layers_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. The largest of each scales queries by hidden_size / num_heads."""
    largest = common["num_layers"] == num_layers_27b
    width = common["hidden_size"] / common["num_heads"] if largest else common["head_dim"]
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(common["hidden_size"]),
        "query_scale": 1.0 / math.sqrt(width),
    }


def _gemma2(fields: _Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    kinds: list[LayerKind] = ["sliding", "global"]
    return _gemma(fields, common, _GEMMA2_27B_LAYERS) | {
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "layer_kinds": tuple(kinds[layer % 2] for layer in range(common["num_layers"])),
        "attn_logit_softcap": fields.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcap": fields.get("final_logit_softcapping", float, 30.0),
    }


def _gemma3(fields: _Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma(fields, common, _GEMMA3_27B_LAYERS) | {
        "qk_norm": True,
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_kinds": _gemma3_layer_kinds(fields, common["num_layers"]),
        "local_rope": Rope(theta=fields.get("rope.freq_base_swa", float, _GEMMA3_LOCAL_THETA)),
        "final_logit_softcap": fields.get("final_logit_softcapping", float),
        "attn_logit_softcap": fields.get("attn_logit_softcapping", float),
    }


def _gemma3_layer_kinds(fields: _Metadata, num_layers: int) -> tuple[LayerKind, ...]:
    """Every sixth layer is global, unless a key says how often or, layer by layer, which."""
    key = "gemma3.attention.sliding_window_pattern"
    pattern = fields.values.get(key, _GEMMA3_GLOBAL_EVERY)
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return tuple("sliding" if slides else "global" for slides in pattern)
    if not is_integer(pattern, 1, MAX_SIZE):
        raise ModelLoadError(
            f"{fields.where}: {key} = {shorten(pattern)} is not allowed: an integer of at least 1, "
            f"or {num_layers} flags"
        )
    return tuple("sliding" if (layer + 1) % pattern else "global" for layer in range(num_layers))


_Specifics = Callable[[_Metadata, Mapping[str, Any]], dict[str, Any]]
_ARCHITECTURES: dict[str, tuple[frozenset[str], _Specifics]] = {
    "llama": (frozenset(), _llama),
    "qwen2": (frozenset(), _qwen2),
    "qwen3": (frozenset(), _qwen3),
    "gemma2": (_WINDOW_KEYS | _SOFTCAP_KEYS, _gemma2),
    "gemma3": (_WINDOW_KEYS | _SOFTCAP_KEYS | _GEMMA3_KEYS, _gemma3),
}
"""GGUF architecture -> its keys beyond the common ones, and what they mean."""
