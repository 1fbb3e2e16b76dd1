"""Which variant of the weights each program reads: decided here, once, and nowhere else.

Device, checkpoint, settings, tuning table and memory say which variants an engine has
(`choose_weight_variants`); from then on a program's shape alone says which of them it reads.
`WeightVariants` is plain data: the lattice of shapes is made by it, `ProgramWeights` makes what it
names, and a process that compiles is told it. Weights on other devices than one CPU, and float32
weights on a machine that nobody has measured, have no variant but a GGUF's own blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform.kv_memory import has_room_for, requested_kv_dtype
from octavo.engine.execution.platform.traits import traits_of, traits_of_device
from octavo.engine.execution.step_spec import StepShape
from octavo.models.loading.load import OpenedModel
from octavo.models.parameters import num_bytes
from octavo.models.weight_variants.int8_split import abstract_int8_split_weights
from octavo.models.weight_variants.logit_bounds import abstract_logit_bounds, can_bound_logits
from octavo.models.weight_variants.native_int8 import has_int8, int8_shapes
from octavo.models.weight_variants.tree import VariantTree
from octavo.pallas_kernels.compat import product_compiler_options
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    COMPILER_OPTIONS as BLOCK_QUANTIZED_OPTIONS,
)
from octavo.pallas_kernels.cpu.native_int8_linear import COMPILER_OPTIONS as NATIVE_OPTIONS
from octavo.pallas_kernels.cpu.native_int8_linear import NATIVE_ROWS
from octavo.pallas_kernels.cpu.product_library import (
    ProductLibrary,
    choose_block_quantized_rows,
    choose_bounded_argmax,
    choose_int8_split,
    choose_product_library,
)
from octavo.pallas_kernels.tuning import Span

VariantName = Literal["plain", "block_quantized", "panels", "int8_split", "eigen", "native_int8"]
"""A tree of weights that programs read; docs/quantization.md says what each is."""


PACKED_ROWS = 32
"""Rows of decode steps that read blocks at the least where other steps dequantize weights first:
half as many again take as long either way (two cores of a Xeon, 4,096 x 1,024 of four bits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVariants:
    """The variants that an engine has, and which shapes read them.

    Attributes:
        library: that computes the products of float32 in programs that leave the choice open.
        block_quantized_rows: the most rows of decode programs that read a GGUF's own blocks; 0
            where there are none.
        int8_split_tokens: the least and the most tokens of programs that read int8-split weights;
            None is none.
        bounded_rows: the least and the most rows of programs that find greedy tokens by bounds of
            logits, if they decode or YNNPACK computes their products; None is none.
        native_int8: decode programs of few rows multiply int8 by a native function.
    """

    library: ProductLibrary = "ynnpack"
    block_quantized_rows: int = 0
    int8_split_tokens: Span | None = None
    bounded_rows: Span | None = None
    native_int8: bool = False

    def of(self, shape: StepShape) -> VariantName:
        """What the shape's program reads."""
        if shape.block_quantized:
            return "block_quantized" if shape.num_tokens == 1 else "panels"
        if _is_within(shape.num_tokens, self.int8_split_tokens):
            return "int8_split"
        # Quick programs are to compile soon.
        is_small = shape.is_decode and shape.num_rows <= NATIVE_ROWS and not shape.quick
        if self.native_int8 and is_small:
            return "native_int8"
        # A program with bounds is YNNPACK's, but for its layers.
        return "eigen" if self.library == "eigen" and self.reads_bounds(shape) else "plain"

    def reads_bounds(self, shape: StepShape) -> bool:
        """Whether the shape's program finds greedy tokens by bounds of logits."""
        # Quick programs are compiled before there are any; one row reads fewer bytes in blocks.
        is_one_row = shape.block_quantized and shape.num_tokens == 1
        if shape.quick or is_one_row or not _is_within(shape.num_rows, self.bounded_rows):
            return False
        # Bounds want YNNPACK; turned for Eigen all the same, a prompt's products lose more.
        return shape.is_decode or self.library == "ynnpack" or self._is_int8_split(shape)

    def compiler_options(self, shape: StepShape) -> dict[str, str]:
        """What the products of the shape's program want of the compiler."""
        # Eigen has products of float32 alone.
        is_ynnpacks = self._is_int8_split(shape) or self.reads_bounds(shape)
        library: ProductLibrary = "ynnpack" if is_ynnpacks else self.library
        options = dict(product_compiler_options(library) or {})
        if shape.block_quantized:
            options |= BLOCK_QUANTIZED_OPTIONS
        return options | NATIVE_OPTIONS if self.of(shape) == "native_int8" else options

    def _is_int8_split(self, shape: StepShape) -> bool:
        return not shape.block_quantized and _is_within(shape.num_tokens, self.int8_split_tokens)


class ChosenVariants(NamedTuple):
    """What `choose_weight_variants` found: the variants, the linear layers in blocks as
    `jax.ShapeDtypeStruct`s (None where no program reads them), and the bytes of all weights."""

    variants: WeightVariants
    blocks: VariantTree | None
    num_bytes: int


def choose_weight_variants(
    config: EngineConfig, model: OpenedModel, host_memory_bytes: int | None = None
) -> ChosenVariants:
    """Decides which variants an engine has.

    Int8-split weights and bounds of logits are left out where they would leave less than a whole KV
    pool, and everything but the plain weights where an engine is to be ready soon.

    Args:
        host_memory_bytes: of the host's memory; None takes what is available.

    Raises:
        InvalidConfigError: a tuning table cannot be read; weights are int8, and the device's int8
            products are wrong.
    """
    weights, mesh = model.abstract_weights(), model.mesh
    if traits_of(mesh).checks_int8_products:
        _check_int8_products(weights)
    variants = plain_variants(weights, requested_kv_dtype(config, model.dtype))
    total = num_bytes(weights)
    if config.warm_up == "coarse":
        return ChosenVariants(variants, None, total)
    blocks: VariantTree | None = None
    if config.packed_weights and model.block_quantized is not None:
        blocks = model.block_quantized.abstract()
        if jax.tree.leaves(blocks):
            rows = choose_block_quantized_rows(weights)
            if model.packed is not None:
                rows = max(rows, PACKED_ROWS)
            variants = replace(variants, block_quantized_rows=rows)
            total += 2 * num_bytes(blocks)  # for one row, and in panels for several
        else:  # no tensor of the checkpoint is made of blocks
            blocks = None
    tokens = choose_int8_split(weights) if config.sliced_weights else None
    if tokens is not None:
        with_split = total + num_bytes(abstract_int8_split_weights(weights, mesh))
        if has_room_for(with_split, host_memory_bytes):
            variants, total = replace(variants, int8_split_tokens=tokens), with_split
    can_bound = config.screened_argmax and can_bound_logits(model.config)
    bounded = choose_bounded_argmax(weights) if can_bound else None
    if bounded is not None:
        with_bounds = total + num_bytes(abstract_logit_bounds(weights, mesh))
        if has_room_for(with_bounds, host_memory_bytes):
            variants, total = replace(variants, bounded_rows=bounded), with_bounds
    return ChosenVariants(variants, blocks, total)


def plain_variants(weights: Any, kv_dtype: jnp.dtype) -> WeightVariants:
    """The variants that take no memory of their own: the same arrays, multiplied in another way.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.
        kv_dtype: of the KV pools.

    Raises:
        InvalidConfigError: a tuning table cannot be read.
    """
    devices = jax.tree.leaves(weights)[0].sharding.device_set
    has_native = len(devices) == 1 and traits_of_device(next(iter(devices))).has_native_functions
    return WeightVariants(
        library=choose_product_library(weights, kv_dtype),
        native_int8=has_native and has_int8(weights),
    )


def _check_int8_products(weights: Any) -> None:
    """Raises InvalidConfigError if a product in one of the weights' shapes is wrong."""
    shapes = int8_shapes(weights)
    if not shapes:
        return
    # Imported here: a CPU never needs it.
    from octavo.pallas_kernels.quantized_linear.self_check import wrong_int8_product

    wrong = wrong_int8_product(shapes)
    if wrong is not None:
        raise InvalidConfigError(
            "quantization",
            "int8",
            f"fp8 or none: here XLA's int8 product of {wrong} is wrong "
            "(with --xla_gpu_autotune_level=0 in XLA_FLAGS it is known to be)",
        )


def _is_within(number: int, span: Span | None) -> bool:
    return span is not None and span[0] <= number <= span[1]
