"""Which parameters are quantized, and the weights with them quantized.

Every linear layer is, and the output layer: it is a fifth of SmolLM2-135M and two thirds of Gemma 3
270M, read whole for every token. A tied embedding table is the output layer, and is looked up in
its eight bits; one of its own is not quantized, because a step reads a few rows of it. Norms and
biases are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding

from octavo.engine.errors import InvalidConfigError
from octavo.models.blocks import (
    attention,
    gated_delta,
    latent_attention,
    layer_inputs,
    mamba2,
    mlp,
    short_conv,
)
from octavo.models.config import ModelConfig
from octavo.models.parameters import ParamSpec, declare, is_spec
from octavo.pallas_kernels.quantized_linear import (
    QUANTIZATIONS,
    Quantization,
    QuantizedWeight,
    quantize_weight,
)
from octavo.sharding.rules import DEFAULT_RULES

RECURRENT = short_conv.NUM_INPUTS | gated_delta.NUM_INPUTS | mamba2.NUM_INPUTS
ATTENTION = attention.NUM_INPUTS | latent_attention.NUM_INPUTS
NUM_INPUTS = ATTENTION | RECURRENT | mlp.NUM_INPUTS | layer_inputs.NUM_INPUTS | {"lm_head": 1}
"""Linear layer -> its leading dimensions that a product contracts, as its block declares it. Stacks
of experts are not among them: variants that know one weight alone leave them as they are."""
EXPERTS = ("experts_gate", "experts_up", "experts_down")
"""Stacks of linear layers, whose first dimension is the expert."""


WeightForm = Quantization | Literal["stored"]
"""What linear layers are held in, if not in the activations' dtype: rounded to eight bits, or in
the blocks of small codes in which their checkpoint stores them (`loading/packed.py`)."""
WEIGHT_FORMS: tuple[WeightForm, ...] = (*QUANTIZATIONS, "stored")


def check_quantization(name: str | None) -> WeightForm | None:
    """The quantization that a name means; None and "none" are none.

    Raises:
        InvalidConfigError: another name.
    """
    if name is None or name == "none":
        return None
    for known in WEIGHT_FORMS:
        if name == known:
            return known
    raise InvalidConfigError("quantization", name, f"none, {' or '.join(WEIGHT_FORMS)}")


def rounded_form(form: WeightForm | None, kind: str) -> Quantization | None:
    """The form, of weights that no blocks are read of.

    Raises:
        InvalidConfigError: "stored".
    """
    if form == "stored":
        raise InvalidConfigError(
            "quantization", form, f"none, {' or '.join(QUANTIZATIONS)}, for {kind}"
        )
    return form


def is_quantized(path: tuple[str | int, ...], config: ModelConfig) -> bool:
    """Whether the parameter at `path`, such as ("layers", 3, "wqkv"), is among the quantized."""
    name = str(path[-1])
    return name in NUM_INPUTS or name in EXPERTS or (name == "embed" and config.tie_word_embeddings)


def quantize_parameter(
    path: tuple[str | int, ...],
    spec: ParamSpec,
    array: jax.Array,
    quantization: Quantization,
    mesh: Mesh,
) -> QuantizedWeight:
    """One parameter, rounded on its devices; scales are split as its outputs are.

    Args:
        path: one for which `is_quantized`.
        spec: of the parameter.
        array: its values on `mesh`. Not donated.
    """
    program, _ = _quantizer(spec, quantization, mesh)
    quantized: QuantizedWeight = program(array)
    return quantized


def quantized_weights(
    weights: Mapping[str, Any], config: ModelConfig, quantization: Quantization, mesh: Mesh
) -> dict[str, Any]:
    """The tree of weights with every parameter that is to be quantized as a `QuantizedWeight`.

    Args:
        weights: of `declare(config, dtype)`, on `mesh`. Not donated.
    """
    specs = declare(config, weights["embed"].dtype)

    def one(path: Any, spec: ParamSpec, array: jax.Array) -> Any:
        keys = path_keys(path)
        if not is_quantized(keys, config):
            return array
        return quantize_parameter(keys, spec, array, quantization, mesh)

    tree: dict[str, Any] = jax.tree.map_with_path(one, specs, dict(weights), is_leaf=is_spec)
    return tree


def abstract_quantized_weights(
    weights: Mapping[str, Any], config: ModelConfig, quantization: Quantization, mesh: Mesh
) -> dict[str, Any]:
    """What `quantized_weights` makes, as `jax.ShapeDtypeStruct`s with shardings.

    Args:
        weights: of `abstract_weights(config, dtype, mesh)`.
    """
    specs = declare(config, weights["embed"].dtype)

    def one(path: Any, spec: ParamSpec, plain: Any) -> Any:
        keys = path_keys(path)
        if not is_quantized(keys, config):
            return plain
        program, shardings = _quantizer(spec, quantization, mesh)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(program, plain),
            shardings,
        )

    tree: dict[str, Any] = jax.tree.map_with_path(one, specs, dict(weights), is_leaf=is_spec)
    return tree


def path_keys(path: Any) -> tuple[str | int, ...]:
    """A path of `jax.tree` as plain names and numbers."""
    return tuple(key.key if isinstance(key, jax.tree_util.DictKey) else key.idx for key in path)


@lru_cache(maxsize=64)
def _quantizer(
    spec: ParamSpec, quantization: Quantization, mesh: Mesh
) -> tuple[Any, QuantizedWeight]:
    """A compiled array -> `QuantizedWeight`, and its shardings; one for all that are alike."""
    stacked = range(spec.num_stacked)
    axes, shape = spec.logical_axes, spec.shape
    first = spec.num_stacked  # of one weight's dimensions
    if spec.num_inputs is None:  # an embedding table: outputs first, already
        outputs, inputs = range(1), range(1, len(shape))
    else:
        inputs = range(first, first + spec.num_inputs)
        outputs = range(first + spec.num_inputs, len(shape))

    def sharding(dims: tuple[int, ...]) -> NamedSharding:
        return DEFAULT_RULES.sharding(mesh, [axes[i] for i in dims], [shape[i] for i in dims])

    shardings = QuantizedWeight(
        values=sharding((*stacked, *outputs, *inputs)),  # type: ignore[arg-type]
        scale=sharding((*stacked, *outputs)),  # type: ignore[arg-type]
        dtype=spec.dtype,
    )
    quantize = partial(
        quantize_weight,
        quantization=quantization,
        num_inputs=len(inputs),
        inputs_first=spec.num_inputs is not None,
    )
    for _ in stacked:
        quantize = jax.vmap(quantize)
    return jax.jit(quantize, out_shardings=shardings), shardings
