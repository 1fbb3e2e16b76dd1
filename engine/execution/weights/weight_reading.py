"""Reads a model's weights, beside what else a start does where that can be."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from octavo.engine.execution.platform.traits import traits_of
from octavo.engine.execution.programs.compile_cache import CompileCache
from octavo.models.loading.load import OpenedModel
from octavo.models.weight_variants.tree import VariantTree


class WeightReading:
    """The weights of a model, as they are read.

    Those of devices with memory of their own are read at once: what is left of it is best asked
    when they are there. Those in the host's memory are read in a thread, from `begin` on.

    Args:
        model: whose they are.
        with_blocks: whether to read its block-quantized linear layers, too.
        cache: of programs that are compiled for reading.
    """

    def __init__(self, model: OpenedModel, *, with_blocks: bool, cache: CompileCache) -> None:
        self._model = model
        self._with_blocks = with_blocks
        self._cache = cache
        self._weights: Future[dict[str, Any]] | None = None
        self._blocks: Future[VariantTree] | None = None
        self.is_late = traits_of(model.mesh).in_host_memory
        """Whether they take their memory from `begin` on."""
        if not self.is_late:
            self.begin()
            self.result()

    def begin(self) -> None:
        """Begins to read, if nothing has yet."""
        if self._weights is not None:
            return
        pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-weights")
        kept = self._cache.in_use()
        self._weights = pool.submit(kept(self._model.read_weights))
        if self._with_blocks and self._model.block_quantized is not None:
            self._blocks = pool.submit(kept(self._model.block_quantized.read))
        pool.shutdown(wait=False)

    def result(self) -> tuple[dict[str, Any], VariantTree | None]:
        """The weights on the mesh, and the linear layers in blocks; waits for them.

        Raises: whatever reading them raised.
        """
        assert self._weights is not None, "begin comes first"
        return self._weights.result(), None if self._blocks is None else self._blocks.result()
