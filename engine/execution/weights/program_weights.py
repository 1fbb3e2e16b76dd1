"""The weights of one model in the variants that its programs read, made and kept.

`WeightVariants` says which program reads which. All are trees of `declare`, and share every array
that is not a linear layer's; Eigen's and native int8's are marked, and share these, too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from octavo.engine.execution.programs.compile_cache import CompileCache
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.execution.weights.put_away import put_away, put_back
from octavo.engine.execution.weights.weight_layout import abstract, lay_out, loop_compiler_options
from octavo.engine.execution.weights.weight_variants import VariantName, WeightVariants
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
from octavo.pallas_kernels.cpu.bounded_argmax import LogitBounds

Trees = dict[VariantName, Any]


class ProgramWeights:
    """The weights of one model, a tree for each variant.

    Args:
        weights: of the model on `mesh`, or their `jax.ShapeDtypeStruct`s, if `set` follows.
        mesh: the device mesh.
        variants: those to make.
        blocks: block-quantized linear layers, or their `jax.ShapeDtypeStruct`s, as `weights`; None
            where no shape reads them.
        has_panels: shapes of several rows read them, too: in panels, made here.
        cache: of what is compiled for making variants; None is JAX's own alone.
    """

    def __init__(
        self,
        weights: Any,
        mesh: Mesh,
        variants: WeightVariants,
        *,
        blocks: VariantTree | None = None,
        has_panels: bool = False,
        cache: CompileCache | None = None,
    ) -> None:
        self._cache = cache or CompileCache()
        self.variants = variants
        self._device_kind = mesh.devices.flat[0].device_kind
        plain = abstract(weights, variants.library)
        self.abstract: Trees = self._marked(plain)
        """`jax.ShapeDtypeStruct`s with shardings: what programs are compiled for."""
        if blocks is not None:
            self.abstract["block_quantized"] = with_variants(plain, blocks)
        if blocks is not None and has_panels:
            self.abstract["panels"] = with_variants(plain, abstract_in_panels(blocks, mesh))
        if variants.int8_split_tokens is not None:
            split = abstract_int8_split_weights(weights, mesh)
            self.abstract["int8_split"] = with_variants(plain, split)
        self.abstract_bounds: LogitBounds | None = None
        if variants.bounded_rows is not None:
            self.abstract_bounds = abstract_logit_bounds(weights, mesh)
        self._trees: dict[VariantName, Any | Future[Any]]
        self._bounds: Future[LogitBounds] | None = None
        self._kept: Any = None
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((weights, blocks))):
            self.set(weights, blocks)

    def set(self, weights: Any, blocks: VariantTree | None = None) -> None:
        """The weights on the mesh, which come to lie as `weight_layout` says; some are donated.

        Args:
            blocks: as was announced.
        """
        assert (blocks is None) == ("block_quantized" not in self.abstract), "blocks as announced"
        plain = lay_out(weights, self.variants.library)
        self._trees = self._marked(plain)
        if blocks is not None:
            self._trees["block_quantized"] = with_variants(plain, blocks)
        # In the background: the programs that read them come later.
        pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-variants")

        kept = self._cache.in_use()

        def begin(name: VariantName, make: Callable[[], VariantTree]) -> None:
            if name in self.abstract:
                self._trees[name] = pool.submit(lambda: with_variants(plain, kept(make)()))

        begin("panels", lambda: in_panels(blocks or {}))
        begin("int8_split", lambda: int8_split_weights(plain))
        if self.variants.bounded_rows is not None:
            self._bounds = pool.submit(kept(logit_bounds), plain)
        pool.shutdown(wait=False)

    def release(self, *, keep: bool) -> None:
        """Takes the weights from the devices: to the host's memory, until `restore`, or, without
        `keep`, away, until `set`. No program may be called meanwhile."""
        trees = {name: _made(tree) for name, tree in self._trees.items()}
        bounds = _made(self._bounds)
        self._trees, self._bounds = {}, None
        self._kept = put_away((trees, bounds)) if keep else None

    def restore(self) -> None:
        """Puts weights that were kept back on the devices."""
        self._trees, bounds = put_back(self._kept)
        self._kept = None
        if bounds is not None:
            self._bounds = Future()
            self._bounds.set_result(bounds)

    def _marked(self, plain: Any) -> Trees:
        """The plain tree, and those of the same arrays, multiplied in another way."""
        trees: Trees = {"plain": plain}
        if self.variants.library == "eigen":
            trees["eigen"] = with_variants(plain, eigen_weights(plain))
        if self.variants.native_int8:
            trees["native_int8"] = native_int8_weights(plain)
        return trees

    def of(self, shape: StepShape) -> Any:
        """What the shape's program is called with."""
        tree = self._trees[self.variants.of(shape)]
        if isinstance(tree, Future):
            tree = tree.result()
        if not self.variants.reads_bounds(shape):
            return tree
        assert self._bounds is not None
        return {**tree, LOGIT_BOUNDS: self._bounds.result()}

    def is_ready(self, shape: StepShape) -> bool:
        """Whether `of` has nothing to wait for."""
        wanted = [self._trees[self.variants.of(shape)]]
        wanted += [self._bounds] * self.variants.reads_bounds(shape)
        return all(each.done() for each in wanted if isinstance(each, Future))

    def abstract_of(self, shape: StepShape) -> Any:
        """What the shape's program is compiled for."""
        tree = self.abstract[self.variants.of(shape)]
        if not self.variants.reads_bounds(shape):
            return tree
        return {**tree, LOGIT_BOUNDS: self.abstract_bounds}

    def compiler_options(self, shape: StepShape) -> dict[str, str]:
        """What the products and weights of the shape's program want of the compiler."""
        options = self.variants.compiler_options(shape)
        return options | loop_compiler_options(shape, self._device_kind)


def _made(tree: Any) -> Any:
    """What is made in the background, once it is there."""
    return tree.result() if isinstance(tree, Future) else tree
