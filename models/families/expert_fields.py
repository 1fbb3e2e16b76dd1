"""Fields of a config.json that say which layers have routed experts, and how many."""

from __future__ import annotations

from typing import Any

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.router import MAX_EXPERTS, Router
from octavo.models.checks import is_integer
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields

OF_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Fields of routers that matter to training alone."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "experts_per_token", "top_k_experts")
_KINDS = ("dense", "sparse")
NEXT_TOKENS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_transformer_layers",
    "use_mtp",
)
"""Fields of layers behind the last that guess tokens beyond the next one."""


def router(fields: ConfigFields, **others: Any) -> Router:
    """A router between as many experts as the file says.

    Args:
        others: of its attributes.

    Raises:
        ModelLoadError: a count is missing or malformed, or two names of it disagree.
    """
    for name in OF_TRAINING:
        fields.ignore(name)
    return Router(
        num_experts=_one_of(fields, _COUNTS), num_chosen=_one_of(fields, _CHOSEN), **others
    )


def sparse_layers(fields: ConfigFields) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th but those of `mlp_only_layers`.

    Raises:
        ModelLoadError: a field that is malformed.
    """
    number = family.num_layers(fields)
    step = fields.size("decoder_sparse_step", default=1)
    dense: Any = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(is_integer(one, 0, number - 1) for one in dense):
        raise ModelLoadError(
            f"{fields.where}: mlp_only_layers = {shorten(dense)} is not allowed: a list of layers "
            f"from 0 to {number - 1}"
        )
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(number)]


def num_dense_layers(fields: ConfigFields, default: int = 1) -> int:
    """How many layers have no experts, before the others.

    Args:
        default: what an absent field means.

    Raises:
        ModelLoadError: no number of layers.
    """
    number: int = fields.integer("first_k_dense_replace", default=default)
    if not is_integer(number, 0, family.num_layers(fields)):
        raise ModelLoadError(
            f"{fields.where}: first_k_dense_replace = {number} is not allowed: "
            f"0 to {family.num_layers(fields)}, by num_hidden_layers"
        )
    return number


def after_dense_layers(fields: ConfigFields, default: int = 1) -> list[bool]:
    """Which layers have experts: those behind the first dense ones, as `mlp_layer_types` may say
    layer by layer.

    Raises:
        ModelLoadError: no number of layers, or not one type a layer.
    """
    number = family.num_layers(fields)
    types: Any = fields.raw("mlp_layer_types")
    if types is None:
        num_dense = num_dense_layers(fields, default)
        return [layer >= num_dense for layer in range(number)]
    fields.ignore("first_k_dense_replace")
    if (
        not isinstance(types, list)
        or len(types) != number
        or any(each not in _KINDS for each in types)
    ):
        raise ModelLoadError(
            f"{fields.where}: mlp_layer_types = {shorten(types)} is not allowed: a list of "
            f"{number}, {' or '.join(_KINDS)}"
        )
    return [each == "sparse" for each in types]


def ignore_next_tokens(fields: ConfigFields) -> None:
    """Layers that guess tokens beyond the next one are not served, nor are they read."""
    for name in NEXT_TOKENS:
        fields.ignore(name)


def _one_of(fields: ConfigFields, names: tuple[str, ...]) -> int:
    """A count that goes by several names."""
    found = {name: fields.size(name, default=None, high=MAX_EXPERTS) for name in names}
    values = set(found.values()) - {None}
    if not values:
        raise ModelLoadError(f"{fields.where} lacks {names[0]}")
    if len(values) > 1:
        named = " and ".join(f"{name} = {value}" for name, value in found.items() if value)
        raise ModelLoadError(f"{fields.where}: {named} is not allowed: one number")
    return int(values.pop())
