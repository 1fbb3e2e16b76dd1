"""The families that are served, and from a configuration file to the one it belongs to.

Each field of a config.json must be read, known to be harmless, or be off: any other is refused by
name, because ignoring it would change the mathematics without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.config import ModelConfig
from octavo.models.families.cohere import COHERE, COHERE2
from octavo.models.families.composite import COMPOSITES, text_fields
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, YOUTU
from octavo.models.families.ernie import ERNIE4_5_MOE
from octavo.models.families.ernie4_5 import ERNIE4_5
from octavo.models.families.exaone import EXAONE4
from octavo.models.families.falcon_h1 import FALCON_H1
from octavo.models.families.family import Family
from octavo.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from octavo.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from octavo.models.families.glm import GLM, GLM4
from octavo.models.families.glm_moe import GLM4_MOE, GLM4_MOE_LITE
from octavo.models.families.gpt_oss import GPT_OSS
from octavo.models.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from octavo.models.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from octavo.models.families.lfm2 import LFM2, LFM2_MOE
from octavo.models.families.llama import LLAMA
from octavo.models.families.llama4 import LLAMA4
from octavo.models.families.minicpm import MINICPM3
from octavo.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL4
from octavo.models.families.mixtral import MINIMAX_M2, MIXTRAL
from octavo.models.families.nemotron_h import NEMOTRON_H
from octavo.models.families.olmo import OLMO2, OLMO3, OLMOE
from octavo.models.families.phi import PHI3
from octavo.models.families.phi_moe import PHI_MOE
from octavo.models.families.qwen import QWEN2, QWEN3, QWEN3_VL
from octavo.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from octavo.models.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from octavo.models.families.seed_oss import SEED_OSS
from octavo.models.families.smollm3 import SMOLLM3
from octavo.models.families.starcoder2 import STARCODER2

FAMILIES: tuple[Family, ...] = (
    *(LLAMA, LLAMA4, SMOLLM3, MISTRAL, MINISTRAL, MINISTRAL3),
    *(QWEN2, QWEN3, QWEN3_VL),
    *(GEMMA, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED),
    *(PHI3, SEED_OSS, OLMO2, OLMO3, GLM, GLM4, EXAONE4, GRANITE, GRANITE_HYBRID, ERNIE4_5),
    *(COHERE, COHERE2, STARCODER2, LFM2, LFM2_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE),
    *(QWEN3_MOE, QWEN2_MOE, MIXTRAL, PHI_MOE, MINIMAX_M2, OLMOE, GLM4_MOE, ERNIE4_5_MOE, GPT_OSS),
    *(HUNYUAN_DENSE, HUNYUAN_MOE, GRANITE_MOE, NEMOTRON_H, FALCON_H1),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4, YOUTU, MINICPM3),
)

ARCHITECTURES = {
    name: family for family in FAMILIES for name in (family.architecture, *family.aliases)
}
"""The entry of `architectures` in a config.json -> its family."""
_CLASSIFIERS = {
    family.architecture.replace("ForCausalLM", "ForSequenceClassification"): family.architecture
    for family in FAMILIES
    if family.architecture.endswith("ForCausalLM")
}
"""Architectures with a classification head in place of an output layer -> those with one."""
_BASES = _CLASSIFIERS | {
    family.architecture.replace("ForCausalLM", "Model"): family.architecture for family in FAMILIES
}
"""Architectures without an output layer, as embedding models are often saved, too."""
_MODEL_TYPES = {name: family for family in FAMILIES for name in (family.model_type, *family.also)}
GGUF_ARCHITECTURES = {family.gguf: family for family in FAMILIES if family.gguf is not None}
"""`general.architecture` of a GGUF file -> its family (of two that share it, the one for both)."""


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes; of a composite one, its text model.

    Args:
        values: the parsed file, as transformers 4 or 5 writes it.

    Raises:
        UnsupportedModelError: another architecture, remote code, or a field that is not supported,
            each by name.
        ModelLoadError: a field that is missing or malformed.
    """
    if values.get("auto_map") and not _names_own_code(values):
        raise UnsupportedModelError(
            "config.json: auto_map is not supported: Octavo never runs a checkpoint's code"
        )
    named = _named(values)
    if is_base(values):
        # Tied, so that no output layer is looked for. Nothing is generated.
        values = {**values, "architectures": [_BASES[str(named)]], "tie_word_embeddings": True}
    if named in COMPOSITES:
        text = text_fields(values)
        family = _family(text)
        fields = ConfigFields({**family.defaults, **text}, where="config.json: text_config")
    else:
        family, fields = _family(values), ConfigFields(values)
    if family.names_own_code:
        fields.ignore("auto_map")
    config = family.read(fields)
    fields.refuse_unread()
    return config


def _names_own_code(values: Mapping[str, Any]) -> bool:
    family = ARCHITECTURES.get(str(_named(values)))
    return family is not None and family.names_own_code


def is_base(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model without an output layer, which cannot generate."""
    return _named(values) in _BASES


def is_classifier(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model with a classification head."""
    return _named(values) in _CLASSIFIERS


def _named(values: Mapping[str, Any]) -> str | None:
    """The one architecture that a file names; None where it names none or several."""
    named = values.get("architectures")
    if isinstance(named, (list, tuple)) and len(named) == 1 and isinstance(named[0], str):
        return named[0]
    return None


def _family(values: Mapping[str, Any]) -> Family:
    named = values.get("architectures")
    if isinstance(named, (list, tuple)) and named:
        architecture = _named(values)
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
        known = ", ".join((*ARCHITECTURES, *COMPOSITES))
        raise UnsupportedModelError(
            f"config.json: architectures = {shorten(named)} is not supported: one of {known}"
        )
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"config.json: model_type = {shorten(model_type)} is not supported: one of "
            f"{', '.join(_MODEL_TYPES)}"
        )
    return _MODEL_TYPES[model_type]
