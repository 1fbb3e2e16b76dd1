"""Checkpoints of a text model and encoders of images and sounds, of which the text model is served.

Their config.json keeps the text model's fields in `text_config`, which may leave out what its
family has by default. Of their tensors those of the text model are read, under the names that they
have by themselves; those of encoders are known by how their names begin, and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.families.config_fields import ConfigFields

WRAPPED = {
    "gemma3_text": ("Gemma3ForConditionalGeneration",),
    "gemma4_text": ("Gemma4ForConditionalGeneration",),
    "gemma4_unified_text": ("Gemma4UnifiedForConditionalGeneration",),
    "llama4_text": ("Llama4ForConditionalGeneration",),
    "llama": ("LlavaForConditionalGeneration",),
    "mistral": ("Mistral3ForConditionalGeneration",),
    "ministral3": ("Mistral3ForConditionalGeneration",),
    "mistral4": ("Mistral3ForConditionalGeneration",),
    "qwen3_5_text": ("Qwen3_5ForConditionalGeneration",),
    "qwen3_5_moe_text": ("Qwen3_5MoeForConditionalGeneration",),
    "qwen3_vl_text": ("Qwen3VLForConditionalGeneration",),
}
"""`model_type` of a text model -> the composite checkpoints that it is usually found in."""
COMPOSITES = tuple(dict.fromkeys(name for names in WRAPPED.values() for name in names))
"""Entries of `architectures` that stand for composite checkpoints."""

_INHERITED = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
"""Fields that the whole model's file may say for its text model."""
_OF_OTHERS = (
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_seq_length",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_start_token_id",
)
"""Fields that matter to images and sounds alone."""

IGNORED_TENSORS = (
    "vision_model.",
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "visual.",
    "model.visual.",
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "vision_embedder.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.vision_model.",
)
"""How the names of an encoder's tensors begin."""
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""How a text model's tensors begin in a composite checkpoint -> how they do by themselves."""


def is_composite(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a composite checkpoint."""
    named = values.get("architectures")
    return isinstance(named, list) and len(named) == 1 and named[0] in COMPOSITES


def text_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's fields, with those that the whole file says for it.

    Args:
        values: a composite checkpoint's config.json.

    Raises:
        UnsupportedModelError: a field of the whole file that is not known, by name.
        ModelLoadError: there is no text_config.
    """
    fields = ConfigFields(values)
    text = fields.raw("text_config")
    if not isinstance(text, Mapping):
        raise ModelLoadError(
            f"config.json: text_config = {shorten(text)} is not allowed: an object"
        )
    for name in (*_OF_OTHERS, *_INHERITED):
        fields.ignore(name)
    fields.refuse_unread()
    inherited = {name: values[name] for name in _INHERITED if values.get(name) is not None}
    return {**inherited, **{name: value for name, value in text.items() if value is not None}}


def text_tensor(name: str) -> str | None:
    """What a composite checkpoint's tensor is called in its text model; None if it has no part."""
    if name.startswith(IGNORED_TENSORS):
        return None
    for prefix, alone in _PREFIXES.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name
