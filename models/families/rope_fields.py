"""Rotary embedding fields of a config.json, in the words of transformers 4 and of 5.

Version 4 writes `rope_theta` and `rope_scaling`; version 5 writes both into `rope_parameters`,
one for each kind of layer where kinds differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.families.config_fields import ConfigFields
from octavo.models.rope import Rope, RopeScaling

DEFAULT_THETA = 10000.0
GEMMA3_GLOBAL_THETA = 1_000_000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(fields: ConfigFields, default_theta: float = DEFAULT_THETA) -> Rope:
    """The rotary embedding of a model whose layers share one.

    Raises:
        UnsupportedModelError: a kind of scaling, or a field of it, that is not supported.
        ModelLoadError: a malformed field.
    """
    parameters = fields.raw("rope_parameters")
    theta = fields.number("rope_theta", default=default_theta)
    scaling = fields.raw("rope_scaling")
    partial = fields.number("partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor = {partial} is not supported: 1"
        )
    return _rope(parameters if parameters is not None else scaling, theta)


def read_rope_by_kind(fields: ConfigFields) -> tuple[Rope, Rope]:
    """The rotary embeddings of global and of sliding layers, each with its own base.

    Raises:
        As for `read_rope`.
    """
    parameters = fields.raw("rope_parameters")
    local_theta = fields.number("rope_local_base_freq", default=DEFAULT_THETA)
    if isinstance(parameters, Mapping) and set(parameters) & set(_LAYER_TYPES):
        unknown = set(parameters) - set(_LAYER_TYPES)
        if unknown:
            raise UnsupportedModelError(
                f"config.json: rope_parameters of {shorten(sorted(unknown))} is not supported: "
                f"{' and '.join(_LAYER_TYPES)}"
            )
        fields.ignore("rope_theta")
        fields.ignore("rope_scaling")
        return (
            _rope(parameters.get("full_attention"), GEMMA3_GLOBAL_THETA),
            _rope(parameters.get("sliding_attention"), local_theta),
        )
    return read_rope(fields, GEMMA3_GLOBAL_THETA), Rope(theta=local_theta)


def _rope(values: Any, theta: float) -> Rope:
    """A `rope_parameters` or `rope_scaling` entry, which may name its own base."""
    if values is None:
        return Rope(theta=theta)
    if not isinstance(values, Mapping):
        raise ModelLoadError(
            f"config.json: rope scaling = {shorten(values)} is not allowed: an object"
        )
    fields = ConfigFields(values, where="config.json: rope scaling")
    theta = fields.number("rope_theta", default=theta)
    kind = fields.text("rope_type", default=None) or fields.text("type", default="default")
    fields.ignore("type")
    if fields.number("partial_rotary_factor", default=1.0) != 1.0:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor = {shorten(values['partial_rotary_factor'])} "
            "is not supported: 1"
        )
    scaling = _scaling(fields, kind)
    fields.refuse_unread()
    return Rope(theta=theta, scaling=scaling)


def _scaling(fields: ConfigFields, kind: str) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        fields.ignore("original_max_position_embeddings")
        return RopeScaling(kind="linear", factor=fields.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_max_position=fields.size("original_max_position_embeddings"),
        )
    raise UnsupportedModelError(
        f"config.json: rope_type = {shorten(kind)} is not supported: default, linear or llama3"
    )
