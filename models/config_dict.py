"""A model's configuration as plain numbers, strings, lists and dicts, fit for JSON, and back.

Equal layers are written once: `layers` holds their specs and, layer by layer, which it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.gated_delta import GatedDelta
from octavo.models.blocks.latent_attention import LatentAttention
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.layer_inputs import LayerInputs, Tail
from octavo.models.blocks.mamba2 import Mamba2
from octavo.models.blocks.mixers import ParallelMixers
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import LayerNorm, Norm, Norms, RMSNorm
from octavo.models.blocks.router import Router
from octavo.models.blocks.short_conv import ShortConv
from octavo.models.checks import MAX_LAYERS, is_integer
from octavo.models.config import ModelConfig
from octavo.models.rope import Rope, RopeScaling, Temperature
from octavo.models.stored_names import Fused, StoredNames

MIXERS: dict[str, type[Any]] = {
    "attention": Attention,
    "latent_attention": LatentAttention,
    "short_conv": ShortConv,
    "gated_delta": GatedDelta,
    "mamba2": Mamba2,
    "parallel": ParallelMixers,
}
FEED_FORWARDS: dict[str, type[Any]] = {"mlp": MLP, "experts": Experts}
"""Name on disk of each block that a layer may be made of -> its class."""

NORMS: dict[str, type[Any]] = {"rms": RMSNorm, "layer": LayerNorm}
"""Name on disk of each kind of norm; files without one mean the first."""

_Build = Callable[[Any], Any]


def config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """The configuration, as `config_from_dict` reads it."""
    specs = list(dict.fromkeys(config.layers))
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("layers", "final_norm", "layer_inputs")
    }
    inputs = config.layer_inputs
    return fields | {
        "eos_token_ids": list(config.eos_token_ids),
        "final_norm": _norm_to_dict(config.final_norm),
        "layer_inputs": None if inputs is None else _with_norm(inputs),
        "layer_specs": [_layer_to_dict(spec) for spec in specs],
        "layers": [specs.index(layer) for layer in config.layers],
    }


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `config_to_dict`.

    Raises:
        ModelLoadError: a field that is missing, unknown or malformed.
    """
    fields = dict(values)
    try:
        specs = [_layer(spec) for spec in _listed("layer_specs", fields.pop("layer_specs"))]
        order = _listed("layers", fields.pop("layers"))
        if len(order) > MAX_LAYERS or not all(
            is_integer(index, 0, len(specs) - 1) for index in order
        ):
            raise ModelLoadError(
                f"layers = {shorten(order)} is not allowed: at most {MAX_LAYERS} numbers from 0 to "
                f"{len(specs) - 1}, by layer_specs"
            )
        return ModelConfig(
            **fields
            | {
                "layers": tuple(specs[index] for index in order),
                "final_norm": _norm(fields.pop("final_norm")),
                "layer_inputs": _optional(_layer_inputs)(fields.pop("layer_inputs", None)),
                "eos_token_ids": tuple(fields.pop("eos_token_ids", ())),
            }
        )
    except ModelLoadError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise malformed(error) from error


def malformed(error: Exception) -> ModelLoadError:
    """What is said of a stored configuration that something else than a check refuses."""
    why = shorten(str(error), limit=200)
    return ModelLoadError(f"the stored model configuration is malformed: {why}")


def rope_from_dict(values: Any) -> Rope:
    """The inverse of `dataclasses.asdict`."""
    temperature = _optional(lambda found: _built(Temperature, found))
    return _built(Rope, values, scaling=_optional(_scaling), temperature=temperature)


def _layer_to_dict(spec: LayerSpec) -> dict[str, Any]:
    values = dataclasses.asdict(spec) | {
        "mixer": _block_to_dict(spec.mixer),
        "feed_forward": _block_to_dict(spec.feed_forward),
        "tail": None if spec.tail is None else _with_norm(spec.tail),
    }
    values["norms"]["norm"] = _norm_to_dict(spec.norms.norm)
    return values


def _block_to_dict(block: Any) -> dict[str, Any] | None:
    """A block's fields and what kind it is, and so of the norm and the blocks that it has."""
    if block is None:
        return None
    names = {kind: name for name, kind in (MIXERS | FEED_FORWARDS).items()}
    values = {"kind": names[type(block)], **dataclasses.asdict(block)}
    for name in ("qk_norm", "apart"):
        norm = getattr(block, name, None)
        if norm is not None:
            values[name] = _norm_to_dict(norm)
    if isinstance(block, ParallelMixers):
        for name in ("attention", "recurrent"):
            values[name] = _block_to_dict(getattr(block, name))
    return values


def _with_norm(block: Any) -> dict[str, Any]:
    """A block's fields, that of its norm with what kind it is."""
    return dataclasses.asdict(block) | {"norm": _norm_to_dict(block.norm)}


def _layer_inputs(values: Any) -> LayerInputs:
    made: LayerInputs = _built(LayerInputs, values, norm=_norm)
    return made


def _tail(values: Any) -> Tail:
    made: Tail = _built(Tail, values, norm=_norm)
    return made


def _norm_to_dict(norm: Norm) -> dict[str, Any]:
    names = {kind: name for name, kind in NORMS.items()}
    return {"kind": names[type(norm)], **dataclasses.asdict(norm)}


def _norm(values: Any) -> Any:
    fields = dict(values)
    kind = fields.pop("kind", "rms")
    if not isinstance(kind, str) or kind not in NORMS:
        raise ModelLoadError(f"kind of norm = {shorten(kind)} is not allowed: {' or '.join(NORMS)}")
    return _built(NORMS[kind], fields)


def _stored_names(values: Any) -> StoredNames:
    fused = lambda listed: tuple(_built(Fused, one, parts=tuple) for one in listed)  # noqa: E731
    return _built(StoredNames, values, renamed=lambda pairs: tuple(map(tuple, pairs)), fused=fused)


def _layer(values: Any) -> LayerSpec:
    return _built(
        LayerSpec,
        values,
        mixer=_optional(partial(_block, MIXERS)),
        feed_forward=_optional(partial(_block, FEED_FORWARDS)),
        norms=lambda found: _built(Norms, found, norm=_norm),
        stored=_stored_names,
        tail=_optional(_tail),
    )


def _block(kinds: Mapping[str, type[Any]], values: Any) -> Any:
    fields = dict(values)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ModelLoadError(f"kind = {shorten(kind)} is not allowed: {' or '.join(kinds)}")
    norm, mixer = _optional(_norm), partial(_block, MIXERS)
    return _built(
        kinds[kind],
        fields,
        rope=_optional(rope_from_dict),
        qk_norm=norm,
        apart=norm,
        router=partial(_built, Router),
        scales=tuple,
        attention=mixer,
        recurrent=mixer,
    )


def _scaling(values: Any) -> RopeScaling:
    return _built(RopeScaling, values, factors=tuple, long_factors=tuple)


def _built(kind: type[Any], values: Any, **builders: _Build) -> Any:
    """An instance of a dataclass, of its fields; some are built by what `builders` says."""
    if not isinstance(values, Mapping):
        raise ModelLoadError(f"{kind.__name__} = {shorten(values)} is not allowed: an object")
    fields = dict(values)
    made = {name: build(fields[name]) for name, build in builders.items() if name in fields}
    return kind(**fields | made)


def _optional(build: _Build) -> _Build:
    return lambda value: None if value is None else build(value)


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ModelLoadError(f"{name} = {shorten(value)} is not allowed: a list")
    return value
