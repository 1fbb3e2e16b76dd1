"""What a shape's program reads: the model's weights as they are, packed, sliced, or marked.

All are trees of `declare`, and share every array that is not a linear layer's; marked ones share
these, too: as Eigen's (`eigen_linear`), for decode programs that find tokens with a screen, or, in
int8, for native products of few rows (`native_int8_linear`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from octavo.engine.execution.step_spec import StepShape
from octavo.engine.execution.weight_layout import abstract, lay_out, loop_compiler_options
from octavo.models.decoder import LOGIT_BOUNDS
from octavo.models.weight_variants.block_quantized import abstract_in_panels, in_panels
from octavo.models.weight_variants.eigen import eigen_weights
from octavo.models.weight_variants.int8_split import (
    abstract_int8_split_weights,
    int8_split_weights,
)
from octavo.models.weight_variants.logit_bounds import abstract_logit_bounds, logit_bounds
from octavo.models.weight_variants.native_int8 import native_int8_weights
from octavo.models.weight_variants.tree import VariantTree, with_variants
from octavo.pallas_kernels.compat import product_compiler_options
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    COMPILER_OPTIONS as BLOCK_QUANTIZED_OPTIONS,
)
from octavo.pallas_kernels.cpu.bounded_argmax import LogitBounds
from octavo.pallas_kernels.cpu.native_int8_linear import COMPILER_OPTIONS as NATIVE_OPTIONS
from octavo.pallas_kernels.cpu.native_int8_linear import NATIVE_ROWS
from octavo.pallas_kernels.cpu.product_library import ProductLibrary, choose_product_library
from octavo.pallas_kernels.tuning import Span


class _Forms(NamedTuple):
    """Something of each form of the weights; None of a form that there is not."""

    whole: Any
    packed: Any = None
    panels: Any = None
    sliced: Any = None
    eigen: Any = None
    native: Any = None


class ProgramWeights:
    """The weights of one model in the forms that its programs read.

    Args:
        weights: of the model on `mesh`, or their `jax.ShapeDtypeStruct`s, if `set` follows.
        mesh: the device mesh.
        kv_dtype: of the KV pools.
        packed: linear layers in packed form, or their `jax.ShapeDtypeStruct`s, as `weights`; None
            where no shape reads them.
        has_panels: shapes of several rows read them, too: in panels, made here.
        sliced: programs of between so many and so many tokens read sliced weights, which are made
            here; None is none.
        screened: programs of between so many and so many rows read a screen of the output layer,
            made here too, if they decode or YNNPACK computes their products; None is none.
    """

    def __init__(
        self,
        weights: Any,
        mesh: Mesh,
        *,
        kv_dtype: jnp.dtype,
        packed: VariantTree | None = None,
        has_panels: bool = False,
        sliced: Span | None = None,
        screened: Span | None = None,
    ) -> None:
        self.library = choose_product_library(weights, kv_dtype)
        self.sliced_tokens = sliced
        self.screened_rows = screened
        self._logit_bounds: Future[LogitBounds] | None = None
        self._device_kind = mesh.devices.flat[0].device_kind
        self._is_one_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
        whole = abstract(weights, self.library)
        self._forms: _Forms
        panels = split = None
        if sliced is not None:
            split = abstract_int8_split_weights(weights, mesh)
        if packed is not None and has_panels:
            panels = with_variants(whole, abstract_in_panels(packed, mesh))
        self.abstract = _Forms(
            whole,
            None if packed is None else with_variants(whole, packed),
            panels,
            split and with_variants(whole, split),
            *self._marked(whole),
        )
        """`jax.ShapeDtypeStruct`s with shardings: what programs are compiled for."""
        self.abstract_logit_bounds = (
            None if screened is None else abstract_logit_bounds(weights, mesh)
        )
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((weights, packed))):
            self.set(weights, packed)

    def set(self, weights: Any, packed: VariantTree | None = None) -> None:
        """The weights on the mesh, which come to lie as `weight_layout` says; some are donated.

        Args:
            packed: as was announced.
        """
        assert (packed is None) == (self.abstract.packed is None), "packed weights as announced"
        whole = lay_out(weights, self.library)
        slicing: Future[Any] | None = None
        laying: Future[Any] | None = None
        # Behind: the programs that read them come later.
        pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-forms")
        if packed is not None and self.abstract.panels is not None:
            laying = pool.submit(lambda: with_variants(whole, in_panels(packed)))
        if self.sliced_tokens is not None:
            slicing = pool.submit(lambda: with_variants(whole, int8_split_weights(whole)))
        if self.screened_rows is not None:
            self._logit_bounds = pool.submit(logit_bounds, whole)
        pool.shutdown(wait=False)
        self._forms = _Forms(
            whole,
            packed and with_variants(whole, packed),
            laying,
            slicing,
            *self._marked(whole),
        )

    def _marked(self, whole: Any) -> tuple[Any, Any]:
        """The forms that are marked: as Eigen's, and as native products'."""
        eigen = with_variants(whole, eigen_weights(whole)) if self.library == "eigen" else None
        return eigen, native_int8_weights(whole) if self._is_one_cpu else None

    def of(self, shape: StepShape) -> Any:
        """What the shape's program is called with."""
        form = getattr(self._forms, self._form(shape))
        if isinstance(form, Future):
            form = form.result()
        if not self.reads_bounds(shape):
            return form
        assert self._logit_bounds is not None
        return {**form, LOGIT_BOUNDS: self._logit_bounds.result()}

    def is_ready(self, shape: StepShape) -> bool:
        """Whether `of` has nothing to wait for."""
        wanted = [getattr(self._forms, self._form(shape))]
        wanted += [self._logit_bounds] * self.reads_bounds(shape)
        return all(each.done() for each in wanted if isinstance(each, Future))

    def abstract_of(self, shape: StepShape) -> Any:
        """What the shape's program is compiled for."""
        form = getattr(self.abstract, self._form(shape))
        if not self.reads_bounds(shape):
            return form
        return {**form, LOGIT_BOUNDS: self.abstract_logit_bounds}

    def _form(self, shape: StepShape) -> str:
        """The name of one of `_Forms`."""
        if shape.packed:
            return "packed" if self._is_packed_row(shape) else "panels"
        if self.reads_int8_split(shape):
            return "sliced"
        if self._is_native(shape):
            return "native"
        # One that reads a screen is YNNPACK's, but for its layers.
        is_eigens = self.library == "eigen" and self.reads_bounds(shape)
        return "eigen" if is_eigens else "whole"

    def _is_native(self, shape: StepShape) -> bool:
        # Quick programs are to compile soon.
        is_small = shape.is_decode and shape.num_rows <= NATIVE_ROWS and not shape.quick
        return is_small and self.abstract.native is not None

    def _is_packed_row(self, shape: StepShape) -> bool:
        return shape.packed and shape.num_rows == 1

    def reads_int8_split(self, shape: StepShape) -> bool:
        """Whether the shape's program multiplies with sliced weights."""
        if self.sliced_tokens is None or shape.packed:
            return False
        least, most = self.sliced_tokens
        return least <= shape.num_tokens <= most

    def reads_bounds(self, shape: StepShape) -> bool:
        """Whether the shape's program finds likeliest tokens with a screen."""
        # Quick programs are compiled before there is one; one row reads fewer bytes packed.
        if self.screened_rows is None or shape.quick or self._is_packed_row(shape):
            return False
        # A screen wants YNNPACK; turned for Eigen all the same, a prompt's products lose more.
        is_ynnpack = self.library == "ynnpack" or self.reads_int8_split(shape)
        least, most = self.screened_rows
        return (is_ynnpack or shape.is_decode) and least <= shape.num_rows <= most

    def _library(self, shape: StepShape) -> ProductLibrary:
        # Eigen has products of float32 alone.
        has_others = self.reads_int8_split(shape) or self.reads_bounds(shape)
        return "ynnpack" if has_others else self.library

    def compiler_options(self, shape: StepShape) -> dict[str, str]:
        """What the products and weights of the shape's program want of the compiler."""
        library = self._library(shape)
        options = dict(product_compiler_options(library) or {})
        options |= loop_compiler_options(shape, self._device_kind)
        if shape.packed:
            return options | BLOCK_QUANTIZED_OPTIONS
        return options | NATIVE_OPTIONS if self._is_native(shape) else options
