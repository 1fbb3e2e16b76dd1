"""Runs plans on the devices: owns the weights, the device state and the compiled programs.

`dispatch` returns as soon as the step is queued; `result` waits for it. State is donated from step
to step, so the device runs dispatches in order and a freed page may be given away before the step
that last read it has finished. It is one class, and long, because all of it guards that one state.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from octavo.engine.config import FEW_TOKENS, WarmUp
from octavo.engine.execution.dispatched_step import DispatchedStep
from octavo.engine.execution.host_memory import give_back_after_compiling, give_back_zeros
from octavo.engine.execution.packing import (
    NO_SLOT,
    decode_order,
    is_plain_greedy,
    pack,
    row_flags,
)
from octavo.engine.execution.page_copies import PageCopier
from octavo.engine.execution.platform.available_memory import has_room_for_programs
from octavo.engine.execution.platform.buckets import waste
from octavo.engine.execution.platform.engine_setup import EngineSetup
from octavo.engine.execution.programs.compile_cache import CompileCache
from octavo.engine.execution.programs.compile_manager import (
    COMPILE_THREADS,
    MAX_COMPILE_THREADS,
    CompileManager,
)
from octavo.engine.execution.programs.program_maker import ProgramMaker
from octavo.engine.execution.programs.program_store import open_program_store
from octavo.engine.execution.row_inputs import RowInputs, row_inputs
from octavo.engine.execution.sampling.logits import HAS_MASK, logits_row, set_masks, set_row
from octavo.engine.execution.state import (
    DeviceState,
    StateLayout,
    pool_layouts,
    state_shardings,
)
from octavo.engine.execution.step import make_step
from octavo.engine.execution.step_spec import StepShape, StepSpec, Variant, step_spec
from octavo.engine.execution.weights.program_weights import ProgramWeights
from octavo.engine.executor import TransferDone
from octavo.engine.scheduler.step_plan import (
    DecodeRows,
    PageCopy,
    StepPlan,
    StepResult,
)
from octavo.engine.structured.grammar import Mask
from octavo.engine.structured.masks import TokenMasks
from octavo.models.weight_variants.tree import VariantTree
from octavo.pallas_kernels.compat import graph_compiler_options
from octavo.pallas_kernels.cpu.native_attention import (
    compiler_options as attention_compiler_options,
)

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1e-4
"""Pause between looks at page copies when there is no step to wait for."""

MASK_EDGES = (4, 32)
"""Masks that are handed over together: so many, or one for each row."""
LAYERS_APART = 8
"""Layers from which on a CPU's programs are compiled in a process of their own: what compiling
leaves in this one grows with them, and such a process costs three seconds of a core."""
PAGES_TIMED = 64
"""Pages of the copy that is timed at start-up."""


@dataclass(slots=True)
class ExecutorStats:
    """Counters since start.

    Attributes:
        num_steps: dispatches.
        num_tokens, num_padded_tokens: tokens computed for requests, and slots of programs in all.
        busy_s, idle_s: time with a step queued or running, and time without one between two steps
            of which the second was already wanted.
        steps_by_tokens: dispatches by the bit length of their number of tokens.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * 24)


class DeviceExecutor:
    """The real executor.

    Args:
        setup: what the engine is on its devices.
        weights: on the mesh, or their `jax.ShapeDtypeStruct`s, if `weights.set` follows.
        blocks: block-quantized linear layers, for the shapes that say so, or their
            `jax.ShapeDtypeStruct`s, as `weights`; None where no shape does.
        masks: what the next tokens of gated requests may be.
        cache: where programs are kept between starts; None is JAX's own alone.
        fail_on_compile: refuse to compile after `warm_up`.

    `warm_up` comes before the first `dispatch`; `begin_warm_up` may come before it, so that what
    it waits for is on its way while weights are read.
    """

    def __init__(
        self,
        setup: EngineSetup,
        weights: Any,
        *,
        blocks: VariantTree | None = None,
        masks: TokenMasks | None = None,
        cache: CompileCache | None = None,
        fail_on_compile: bool = False,
    ) -> None:
        self._setup = setup
        self.limits, self.lattice = setup.limits, setup.lattice
        self.stats = ExecutorStats()
        self._config, self._mesh, self._kernels = setup.model, setup.mesh, setup.kernels
        self._num_slots = setup.num_slots
        self._cache = cache or CompileCache()
        variants = setup.variants
        self.weights = ProgramWeights(
            weights,
            setup.mesh,
            variants,
            blocks=blocks,
            has_panels=any(variants.of(shape) == "panels" for shape in setup.lattice.shapes),
            cache=self._cache,
        )
        self._whole = NamedSharding(setup.mesh, P())
        limits = setup.limits
        self._layout = StateLayout(
            config=setup.model,
            mesh=setup.mesh,
            num_slots=setup.num_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            table_pages=limits.max_pages_per_seq,
            dtype=setup.kv_dtype,
            pools=pool_layouts(setup.model, setup.kernels.attention, limits.page_size),
            num_snapshots=limits.num_snapshots,
        )
        self._abstract_state = self._layout.abstract()
        self._make_state = self._layout.maker()
        self._state: DeviceState
        self._copier = (
            PageCopier(self._layout, limits.num_host_pages) if limits.num_host_pages else None
        )
        self.store = open_program_store(
            self._cache.folder,
            setup.mesh,
            (setup.model, setup.kernels, limits.max_pages_per_seq, limits.page_size, variants),
            (self.weights.abstract, self._abstract_state),
        )
        maker = None
        is_large = setup.model.num_layers >= LAYERS_APART
        if self.store is not None and setup.traits.compiles_apart and is_large:
            weights, blocks = jax.tree.map(_abstract, (weights, blocks))
            arguments = {
                "setup": replace(setup, limits=replace(limits, num_host_pages=0)),
                "weights": weights,
                "blocks": blocks,
                "cache": self._cache,
            }
            maker = ProgramMaker(arguments, self.store.identity)
        self.programs = CompileManager(
            self._lower,
            store=self.store,
            maker=maker,
            cache=self._cache,
            compiler_options=self._compiler_options,
            has_room=has_room_for_programs,
            max_threads=COMPILE_THREADS if setup.traits.in_host_memory else MAX_COMPILE_THREADS,
            tidy=give_back_after_compiling,
            fail_after_ready=fail_on_compile,
        )
        self._fresh: Future[DeviceState] | None = None
        self._few: tuple[StepShape, ...] | None = None
        self._masks = masks
        self._mask_edges = [edge for edge in MASK_EDGES if edge < self._num_slots]
        self._mask_edges.append(self._num_slots)
        self._last_done_s: float | None = None
        self._called_s = 0.0  # when the newest step was handed to the device
        self._in_flight: deque[DispatchedStep] = deque()
        self._has_computed = False
        self._has_put_weights_away = False
        self.page_copy_s: float | None = None
        """Seconds a page takes to or from the host tier, if there is one, as timed at warm-up."""

    def begin_warm_up(self, mode: WarmUp = "full") -> None:
        """Begins to load programs that an earlier start left, and to make the device's state."""
        self.programs.begin(self.awaited(mode)[0])
        # Zeroing gigabytes of host memory takes as long as loading a program: do both at once.
        pool = ThreadPoolExecutor(1, thread_name_prefix="octavo-state")
        self._fresh = pool.submit(self._cache.in_use()(self._make_state))
        # Hosts that share a mesh have to call its programs in one order.
        pool.shutdown(wait=jax.process_count() > 1)

    def warm_up(
        self, mode: WarmUp = "full", on_compiled: Callable[[StepShape], None] | None = None
    ) -> None:
        """Compiles what `mode` says; after it, a step never waits for the compiler."""
        if self._fresh is None:
            self.begin_warm_up(mode)
        assert self._fresh is not None
        shapes, behind = self.awaited(mode)
        self.programs.warm_up(shapes, on_compiled, behind=behind)
        if self._copier is not None:
            self._copier.compile()
        self._state = self._fresh_state(self._fresh.result())
        self._fresh = None
        if self._copier is not None:
            most = min(PAGES_TIMED, self.limits.num_pages - 1, self.limits.num_host_pages)
            self.page_copy_s = self.time_page_copies(most) / most
        for edge in self._mask_edges if self._masks is not None else ():
            self.write_masks(*self._masks_of([], [], edge))

    def awaited(self, mode: WarmUp) -> tuple[tuple[StepShape, ...], tuple[StepShape, ...]]:
        """Shapes that are there before the engine is ready, and those compiled behind."""
        if mode == "full":
            return self.lattice.full, ()
        if mode == "few" and self.limits.max_num_batched_tokens <= FEW_TOKENS:
            if self._few is None:  # of what others leave meanwhile, nothing is looked for
                self._few = self.lattice.few(self.programs.is_left)
            return self._few, ()
        return self.lattice.coarse, self.lattice.fine if mode == "early" else ()

    def _fresh_state(self, state: DeviceState) -> DeviceState:
        """The zeroed state with the row that padding rows use."""
        jax.block_until_ready(state)
        if self._setup.traits.in_host_memory:
            give_back_zeros(jax.tree.leaves(state.kv))
        row = logits_row(self._config.vocab_size)
        logits = set_row(state.logits, np.int32(self._num_slots), row)
        return jax.block_until_ready(replace(state, logits=logits))

    def _try_device(self) -> None:
        """Runs a step without rows, to its end."""
        nothing = StepPlan(
            step_id=-1, decode_rows=DecodeRows.of(()), prefill_rows=(), num_steps=1, page_updates=()
        )
        variant: Variant = "general" if self.lattice.variants else "pooled"
        shape = self.lattice.choose(nothing, variant, self.programs.has)
        order = np.empty(0, np.intp)
        vector = pack(nothing, self._spec(shape), order, trash_slot=self._num_slots)
        jax.block_until_ready((self.run_step(shape, vector), self._state))

    def dispatch(self, plan: StepPlan) -> DispatchedStep:
        """Queues one step. Touches the device only to hand it one vector (and, for new rows that
        bias or penalize tokens, their vocabulary-sized rows)."""
        if self._copier is not None:
            for copy in plan.copy_outs:
                self.begin_copy(copy, is_in=False)
            for copy in plan.copy_ins:
                self.begin_copy(copy, is_in=True)
        if not plan.num_rows:
            return DispatchedStep(plan, None, np.empty(0, np.intp), None, time.perf_counter())
        shape = self._choose(plan)
        spec = self._spec(shape)
        order = decode_order(plan)
        vector = pack(plan, spec, order, trash_slot=self._num_slots)
        for row in plan.prefill_rows:
            if row.is_new and row_flags(row.request) & ~HAS_MASK:
                self.write_row(row.slot, row_inputs(row.request))
        if self._masks is not None and self._masks.num_live:
            self._put_masks(plan, self._masks)
        output = self.run_step(shape, vector)
        now_s, done_s = time.perf_counter(), None
        if output.tokens.is_ready():  # a CPU that has nothing else to do computes within the call
            now_s, done_s = self._called_s, now_s
            for earlier in self._in_flight:  # which this one had to wait for
                earlier.done_s = earlier.done_s or now_s
        if not self._in_flight and self._last_done_s is not None:
            self.stats.idle_s += now_s - self._last_done_s
        self.stats.num_steps += 1
        self.stats.num_tokens += plan.num_tokens
        self.stats.steps_by_tokens[plan.num_tokens.bit_length()] += 1
        self.stats.num_padded_tokens += shape.num_tokens
        step = DispatchedStep(plan, shape, order, output, now_s, done_s)
        self._in_flight.append(step)
        return step

    def _choose(self, plan: StepPlan) -> StepShape:
        """The best shape that has a program and what that reads; a better program's absence is told
        to the compiler."""
        variant = self._variant(plan)
        shape = self.lattice.choose(plan, variant, self._can_run)
        if not self._can_run(shape):
            shape = self.lattice.choose(plan, variant, self.programs.has)
        if not self.programs.is_complete:
            best = self.lattice.choose(plan, variant, lambda each: True)
            if not self.programs.has(best):
                self.programs.miss(best, waste(shape, best) * plan.num_steps)
        return shape

    def _can_run(self, shape: StepShape) -> bool:
        """Whether a step of the shape would wait for nothing that is made behind."""
        return self.programs.has(shape) and self.weights.is_ready(shape)

    def result(self, handle: DispatchedStep) -> StepResult:
        """Waits for the step and reads its tokens."""
        if handle.output is None:
            return StepResult(rows=())
        tokens = handle.read()
        done_s = handle.done_s or time.perf_counter()
        begun_s = min(done_s, max(handle.dispatched_s, self._last_done_s or 0.0))
        self._last_done_s = done_s
        self._in_flight.popleft()
        self._has_computed = True
        self.stats.busy_s += done_s - begun_s
        return handle.result(tokens, done_s - begun_s)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the host tier, all layers together."""
        assert self._copier is not None, "there is no host tier"
        return self._copier.page_bytes

    def time_page_copies(self, num_pages: int) -> float:
        """Seconds, one way, to copy so many pages to the host tier and back; waits for them.

        For an idle executor that has served nothing yet: what the host tier holds is lost.
        """
        assert self._copier is not None, "there is no host tier"
        best_s = math.inf
        for _ in range(3):  # the first one touches the host's memory for the first time
            kv, seconds = self._copier.time_round_trip(self._state.kv, num_pages)
            self._state = replace(self._state, kv=kv)
            best_s = min(best_s, seconds / 2)
        return best_s

    @property
    def host_page_layout(self) -> str:
        """What `read_host_page` gives, in words: engines with the same can exchange pages."""
        assert self._copier is not None, "there is no host tier"
        return self._copier.page_layout

    def read_host_page(self, page: int) -> bytes:
        """What a page of the host tier holds, all layers together."""
        assert self._copier is not None, "there is no host tier"
        return self._copier.read(page)

    def write_host_page(self, page: int, content: bytes) -> None:
        """Fills a page of the host tier that no copy is at with what `read_host_page` gave."""
        assert self._copier is not None, "there is no host tier"
        self._copier.write(page, content)

    def poll_transfers(self) -> list[TransferDone]:
        """Copies to and from the host that ended."""
        if self._copier is None:
            return []
        ended = self._copier.ended()
        for done in ended:
            self.land_copy(done.transfer_id, ok=done.ok)
        return ended

    def sleep(self, *, keep_weights: bool) -> None:
        """Gives back the device's memory: KV pages and row state, and the weights.

        Where weights lie in the host's memory, those that are kept stay where they are. Nothing may
        be dispatched until `wake_up`.
        """
        if self._copier is not None:
            self._copier.reset()
        if not keep_weights or not self._setup.traits.in_host_memory:
            self.weights.release(keep=keep_weights)
            self._has_put_weights_away = keep_weights
        self.__dict__.pop("_state", None)

    def wake_up(self) -> None:
        """Takes the memory again: weights that were kept, and pages that hold nothing. Weights that
        were not kept must have been set."""
        if self._has_put_weights_away:
            self.weights.restore()
            self._has_put_weights_away = False
        self._last_done_s = None
        self._state = self._fresh_state(self._make_state())

    def close(self) -> None:
        """Ends the threads behind. Nothing may be dispatched after it."""
        self.programs.close()
        if self._copier is not None:
            self._copier.close()

    def idle(self) -> None:
        """Says that no step is wanted: the time until the next dispatch is nobody's idleness."""
        if not self._in_flight:
            self._last_done_s = None
            if self._copier is not None and self._copier.is_busy:
                time.sleep(IDLE_POLL_S)

    def reset(self) -> None:
        """Fresh device state after a failed step, whose donated state is lost.

        Raises: whatever the device does when it no longer computes.
        """
        if not self._has_computed:
            self.programs.distrust()  # what fails before anything ran may be the programs
        self._in_flight.clear()
        self._last_done_s = None
        self.start_over()
        self._try_device()

    def _variant(self, plan: StepPlan) -> Variant:
        if self.lattice.pools and any(row.request.pooling for row in plan.prefill_rows):
            return "pooled"
        if "greedy" not in self.lattice.variants:
            return "general"
        requests = (*plan.decode_rows.requests, *(row.request for row in plan.prefill_rows))
        return "greedy" if all(is_plain_greedy(request) for request in requests) else "general"

    def _put_masks(self, plan: StepPlan, masks: TokenMasks) -> None:
        """Hands the device the masks of the rows that sample under one in this step."""
        decoding = plan.decode_rows
        rows = list(zip(decoding.requests, decoding.slots.tolist(), strict=True))
        rows += [(row.request, row.slot) for row in plan.prefill_rows if row.samples]
        found = [(slot, masks.mask(request.request_id)) for request, slot in rows]
        slots = [slot for slot, mask in found if mask is not None]
        if slots:
            edge = next(edge for edge in self._mask_edges if edge >= len(slots))
            masks_of_slots = [mask for _, mask in found if mask is not None]
            self.write_masks(*self._masks_of(slots, masks_of_slots, edge))

    def _masks_of(
        self, slots: list[int], masks: list[Mask], edge: int
    ) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
        """Slots and their masks, filled up to `edge` of them."""
        vector = np.full((edge,), NO_SLOT, np.int32)
        array = np.zeros((edge, self._state.logits.token_mask.shape[1]), np.uint32)
        vector[: len(slots)] = slots
        for row, mask in zip(array, masks, strict=False):
            row[:] = mask
        return vector, array

    # What a device is told, all of it: `engine/hosts` has other hosts do the same.

    def run_step(self, shape: StepShape, vector: NDArray[np.int32]) -> Any:
        """Queues a step; what the host reads of it."""
        program, weights = self.programs.get(shape), self.weights.of(shape)
        self._called_s = time.perf_counter()
        self._state, output = program(weights, self._state, vector)
        return output

    def write_row(self, slot: int, inputs: RowInputs) -> None:
        """Writes a slot's vocabulary-sized state."""
        row = logits_row(self._config.vocab_size, **inputs._asdict())
        logits = set_row(self._state.logits, np.int32(slot), row)
        self._state = replace(self._state, logits=logits)

    def write_masks(self, slots: NDArray[np.int32], masks: NDArray[np.uint32]) -> None:
        """Writes the token masks of slots."""
        token_mask = set_masks(self._state.logits.token_mask, slots, masks)
        logits = replace(self._state.logits, token_mask=token_mask)
        self._state = replace(self._state, logits=logits)

    def begin_copy(self, copy: PageCopy, *, is_in: bool) -> None:
        """Begins to copy pages to the host tier, or from there."""
        assert self._copier is not None
        if is_in:
            self._copier.begin_in(copy)
        else:
            self._copier.begin_out(self._state.kv, copy)

    def land_copy(self, transfer_id: int, *, ok: bool) -> None:
        """Ends a copy; what came in is there for later steps."""
        assert self._copier is not None
        kv = self._copier.land(self._state.kv, transfer_id, ok=ok)
        self._state = replace(self._state, kv=kv)

    def start_over(self) -> None:
        """Gives the device fresh state."""
        if self._copier is not None:
            self._copier.reset()
        self.__dict__.pop("_state", None)  # before the new one is made: there is no room for two
        self._state = self._fresh_state(self._make_state())

    def _spec(self, shape: StepShape) -> StepSpec:
        limits = self.limits
        num_groups, has_snapshots = len(limits.windows), limits.num_snapshots > 0
        return step_spec(
            shape, limits.max_pages_per_seq, limits.page_size, num_groups, has_snapshots
        )

    def _compiler_options(self, shape: StepShape) -> dict[str, str] | None:
        options = self.weights.compiler_options(shape)
        if not shape.quick:
            options |= attention_compiler_options(self._kernels.attention, self._layout.dtype)
        if self._setup.traits.has_host_loops:
            options |= graph_compiler_options()
        return options or None

    def _lower(self, shape: StepShape) -> Any:
        spec = self._spec(shape)
        step = make_step(self._config, spec, mesh=self._mesh, kernels=self._kernels)
        vector = jax.ShapeDtypeStruct((spec.size,), jnp.int32, sharding=self._whole)
        state_out = state_shardings(self._abstract_state, self._config, self._mesh)
        return jax.jit(step, donate_argnums=1, out_shardings=(state_out, self._whole)).lower(
            self.weights.abstract_of(shape),
            self._abstract_state,
            vector,
        )


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    """What a program is compiled for, of an array or the like."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
