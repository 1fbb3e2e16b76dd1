"""Rotary embedding fields of a config.json, in the words of transformers 4 and of 5.

Version 4 writes `rope_theta` and `rope_scaling`; version 5 writes both into `rope_parameters`,
one for each kind of layer where kinds differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import check_positive
from octavo.models.families.config_fields import ConfigFields
from octavo.models.rope import Rope, RopeScaling, Temperature

DEFAULT_THETA = 10000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")
_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


def read_rope(
    fields: ConfigFields,
    default_theta: float = DEFAULT_THETA,
    *,
    default: Mapping[str, Any] | None = None,
    fraction: float | None = None,
    pairs: bool = False,
    has_temperature: bool = False,
    renamed: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    has_mscales: bool = False,
) -> Rope:
    """The rotary embedding of a model whose layers share one.

    Args:
        default_theta: what an absent `rope_theta` means.
        default: what is said where neither `rope_parameters` nor `rope_scaling` are there.
        fraction: what an absent `partial_rotary_factor` means; None if it must be 1.
        pairs: of `Rope`.
        has_temperature: whether the family's attention has one, by position.
        renamed: what the family calls a kind of scaling -> what others do.
        ignored: fields that do not matter to a text.
        has_mscales: whether longrope's two sets of factors each have an amplitude.

    Raises:
        UnsupportedModelError: a kind of scaling, or a field of it, that is not supported.
        ModelLoadError: a malformed field.
    """
    parameters = fields.raw("rope_parameters")
    theta = fields.number("rope_theta", default=default_theta)
    scaling = fields.raw("rope_scaling")
    if fraction is None:
        fields.only("partial_rotary_factor", 1.0)
    else:
        fraction = fields.number("partial_rotary_factor", default=fraction)
    reader = _Reader(fields, theta, fraction, pairs, has_temperature, renamed or {}, ignored)
    reader.has_mscales = has_mscales
    said = parameters if parameters is not None else scaling
    return reader.read(default if said is None else said)


def read_rope_by_kind(
    fields: ConfigFields, default_theta: float, default_local_theta: float | None = DEFAULT_THETA
) -> tuple[Rope, Rope]:
    """The rotary embeddings of global and of sliding layers, each with its own base. What stretches
    the context stretches that of global layers.

    Args:
        default_theta: what an absent `rope_theta` means.
        default_local_theta: what an absent `rope_local_base_freq` means; None is `rope_theta`.

    Raises:
        As for `read_rope`.
    """
    parameters = fields.raw("rope_parameters")
    if default_local_theta is None:
        local_theta = fields.number("rope_theta", default=default_theta)
    else:
        local_theta = fields.number("rope_local_base_freq", default=default_local_theta)
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
            _Reader(fields, default_theta).read(parameters.get("full_attention")),
            _Reader(fields, local_theta).read(parameters.get("sliding_attention")),
        )
    return read_rope(fields, default_theta), Rope(theta=local_theta)


class _Reader:
    """Reads `rope_parameters` or `rope_scaling`, which may name their own base.

    Args:
        fields: of the model.
        theta, fraction: where they name none.
        pairs, has_temperature, renamed, ignored: see `read_rope`.
    """

    def __init__(
        self,
        fields: ConfigFields,
        theta: float,
        fraction: float | None = None,
        pairs: bool = False,
        has_temperature: bool = False,
        renamed: Mapping[str, str] | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self.model = fields
        self.theta = theta
        self.fraction = fraction
        self.pairs = pairs
        self.has_temperature = has_temperature
        self.renamed = renamed or {}
        self.ignored = ignored
        self.has_mscales = False

    def read(self, values: Any) -> Rope:
        if values is None:
            fraction = 1.0 if self.fraction is None else self.fraction
            return Rope(theta=self.theta, fraction=fraction, pairs=self.pairs)
        if not isinstance(values, Mapping):
            raise ModelLoadError(
                f"config.json: rope scaling = {shorten(values)} is not allowed: an object"
            )
        fields = ConfigFields(values, where="config.json: rope scaling")
        theta = fields.number("rope_theta", default=self.theta)
        kind = fields.text("rope_type", default=None) or fields.text("type", default="default")
        kind = self.renamed.get(kind, kind)
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"config.json: rope_type = {shorten(kind)} is not supported: {', '.join(_KINDS)}"
            )
        for name in ("type", *self.ignored):
            fields.ignore(name)
        scaling, amplitude = self._scaling(fields, kind)
        long_amplitude = None
        if kind == "longrope" and self.has_mscales:
            amplitude = fields.number("short_mscale")
            long_amplitude = fields.number("long_mscale")
        fraction = 1.0
        if kind == "proportional":
            fraction = fields.number("partial_rotary_factor", default=1.0)
        elif self.fraction is None:
            fields.only("partial_rotary_factor", 1.0)
        else:
            fraction = fields.number("partial_rotary_factor", default=self.fraction)
        rope = Rope(
            theta=theta,
            scaling=scaling,
            fraction=fraction,
            amplitude=amplitude,
            temperature=self._temperature(fields) if self.has_temperature else None,
            pairs=self.pairs,
            proportional=kind == "proportional",
            long_amplitude=long_amplitude,
        )
        fields.refuse_unread()
        return rope

    def _scaling(self, fields: ConfigFields, kind: str) -> tuple[RopeScaling | None, float]:
        """How frequencies are stretched, and what multiplies cosines and sines."""
        if kind == "linear":
            fields.ignore("original_max_position_embeddings")
            return RopeScaling(kind="linear", factor=fields.number("factor")), 1.0
        if kind == "proportional":
            factor = fields.number("factor", default=1.0)
            return (None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)), 1.0
        if kind == "llama3":
            scaling = RopeScaling(
                kind="llama3",
                factor=fields.number("factor"),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_max_position=fields.size("original_max_position_embeddings"),
            )
            return scaling, 1.0
        if kind == "yarn":
            return self._yarn(fields)
        if kind == "longrope":
            return self._longrope(fields)
        return None, 1.0

    def _yarn(self, fields: ConfigFields) -> tuple[RopeScaling, float]:
        original, factor = self._stretched(fields)
        amplitude = fields.number("attention_factor", default=None)
        mscale = fields.number("mscale", default=None)
        mscale_all_dim = fields.number("mscale_all_dim", default=None)
        if amplitude is None:
            amplitude = yarn_amplitude(factor)
            if mscale and mscale_all_dim:
                check_positive("mscale", mscale)
                check_positive("mscale_all_dim", mscale_all_dim)
                amplitude = yarn_amplitude(factor, mscale) / yarn_amplitude(factor, mscale_all_dim)
        scaling = RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=fields.number("beta_fast", default=32.0),
            beta_slow=fields.number("beta_slow", default=1.0),
            truncate=fields.boolean("truncate", default=True),
        )
        return scaling, amplitude

    def _longrope(self, fields: ConfigFields) -> tuple[RopeScaling, float]:
        original, factor = self._stretched(fields)
        amplitude = fields.number("attention_factor", default=None)
        if amplitude is None and factor <= 1.0:
            amplitude = 1.0
        elif amplitude is None and original == 1:
            raise ModelLoadError("original_max_position_embeddings = 1 is not allowed: at least 2")
        elif amplitude is None:
            amplitude = math.sqrt(1.0 + math.log(factor) / math.log(original))
        scaling = RopeScaling(
            kind="longrope",
            original_max_position=original,
            factors=fields.numbers("short_factor"),
            long_factors=fields.numbers("long_factor"),
        )
        return scaling, amplitude

    def _stretched(self, fields: ConfigFields) -> tuple[int, float]:
        """The context before it was stretched, which the model's own field says first, and by how
        much it was."""
        longest = self.model.size("max_position_embeddings")
        original = fields.size("original_max_position_embeddings", default=longest)
        original = self.model.size("original_max_position_embeddings", default=original)
        return original, fields.number("factor", default=longest / original)

    def _temperature(self, fields: ConfigFields) -> Temperature | None:
        fields.ignore("max_position_embeddings")
        beta = fields.number("llama_4_scaling_beta", default=0.0)
        if beta == 0.0:
            return None
        return Temperature(beta=beta, span=fields.size("original_max_position_embeddings"))


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """What multiplies cosines and sines, where a context was made `factor` times as long.

    Args:
        factor: of the contexts.
        scale: a file's mscale or mscale_all_dim.
    """
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0
