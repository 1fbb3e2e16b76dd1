"""Routed experts for Hopper: rows sorted by their expert, and each expert's weights read once.

XLA makes one dense product of a ragged one there: every row by every expert, of which it reads all.
Here a work item is a tile of one expert's rows and a block of columns, and experts without rows
have none. A persistent grid takes the items in turn: one warpgroup copies rows and weights with the
bulk tensor engine, over the ends of items, and two multiply. Of many rows an expert each of the two
has 64 of them, of few both have the same 64 and half of the columns each.

Gates and ups are multiplied in one go and meet in registers, so that they never reach memory.

Shape suffixes: A places of sorted rows, K a product's inputs, N its outputs, I tiles of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.compat import device_kind, mosaic_gpu_options
from octavo.pallas_kernels.hopper import num_multiprocessors, tiled_smem
from octavo.pallas_kernels.routed_experts.weights import (
    ExpertWeights,
    Gated,
    Sorted,
    place_choices,
    sort_choices,
    summed,
)

ROWS = 64
"""Of one wgmma."""
INPUTS = 64
"""Of a stage: 128 bytes of a row, as wide as a swizzled tile."""
COLUMNS = 128
"""Of each of an item's two products."""
ALIGNMENT = 8
"""Rows that an expert's first place is a multiple of, as bulk copies of swizzled tiles want it."""
NUM_STAGES = 4
"""Rows and weights of 64 inputs on their way at once: 192 KB at 128 rows."""
_REGISTERS = (40, 232)
"""Of the copying warpgroup, and of each of the two that multiply."""


@dataclass(frozen=True, slots=True)
class _Split:
    """How two warpgroups share an item.

    Attributes:
        rows, columns: parts of either, one of them 2 and the other 1.
    """

    rows: int
    columns: int

    @property
    def tile(self) -> int:
        """Rows of an item."""
        return self.rows * ROWS

    @property
    def width(self) -> int:
        """Columns of one warpgroup's product."""
        return COLUMNS // self.columns


def takes(x: jax.Array, weights: ExpertWeights) -> bool:
    """Whether the kernel multiplies these: plain stacks of bfloat16, in rows of whole 16 bytes."""
    return x.dtype == jnp.bfloat16 and all(
        isinstance(stack, jax.Array) and stack.dtype == x.dtype and stack.shape[-1] % 8 == 0
        for stack in weights.stacks()
    )


def grouped_experts(
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    weights: ExpertWeights,
    gated: Gated,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See `routed_experts`; of weights that the kernel `takes`.

    Args:
        interpret: see `plgpu.kernel`.
    """
    num_tokens, num_chosen = chosen.shape
    num_choices, num_experts = num_tokens * num_chosen, weights.num_experts
    split = _Split(1, 2) if num_choices <= ROWS * num_experts else _Split(2, 1)
    by_expert = sort_choices(chosen, num_experts)
    work = _work(by_expert, num_choices, split.tile)
    at, choice = place_choices(by_expert, work.first_place, work.num_places)
    product = partial(_product, work, split, interpret)
    # Places that nobody has hold the first token's row, which nobody looks at.
    rows = x[choice // num_chosen]
    biases = (weights.gate_bias, weights.up_bias)
    hidden = product(rows, (weights.gate, weights.up), biases, gated)
    out = product(hidden, (weights.down,), (weights.down_bias,), None)
    return summed(out[at].reshape(num_tokens, num_chosen, -1), chosen, share, num_experts)


@dataclass(frozen=True, slots=True)
class _Work:
    """Tiles of rows, in the order of experts.

    Attributes:
        first_place: int32 [X], of each expert's rows.
        num_places: A.
        expert: int32 [I].
        start: int32 [I], the first row's place.
        num_rows: int32 [I].
        num_tiles: int32 [1], of those that there are.
    """

    first_place: jax.Array
    num_places: int
    expert: jax.Array
    start: jax.Array
    num_rows: jax.Array
    num_tiles: jax.Array


def _work(by_expert: Sorted, num_choices: int, tile: int) -> _Work:
    sizes = by_expert.sizes
    num_experts = len(sizes)
    most_used = min(num_choices, num_experts)
    taken = -(-sizes // ALIGNMENT) * ALIGNMENT
    first_place = jnp.cumsum(taken) - taken
    tiles = -(-sizes // tile)
    end = jnp.cumsum(tiles)
    number = jnp.arange(most_used + num_choices // tile, dtype=jnp.int32)
    expert = jnp.sum(end[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    before = (number - (end - tiles)[expert]) * tile
    most_places = num_choices + (ALIGNMENT - 1) * most_used
    return _Work(
        first_place=first_place,
        # The last tile's rows are read to its end.
        num_places=-(-most_places // ALIGNMENT) * ALIGNMENT + tile,
        expert=expert,
        start=(first_place[expert] + before).astype(jnp.int32),
        num_rows=jnp.clip(sizes[expert] - before, 0, tile).astype(jnp.int32),
        num_tiles=end[-1:].astype(jnp.int32),
    )


def _product(
    work: _Work,
    split: _Split,
    interpret: Any,
    x: jax.Array,
    weights: tuple[Any, ...],
    biases: tuple[jax.Array | None, ...],
    gated: Gated | None,
) -> jax.Array:
    """Rows [A, K] by the weights [X, K, N] of their experts.

    Args:
        weights: one, or gates and ups.
        biases: [X, N], of each weight.
        gated: what gates and ups make.

    Returns:
        [A, N]; garbage in places that nobody has.
    """
    num_inputs, num_outputs = weights[0].shape[1:]
    width = COLUMNS * (1 if gated else 2)
    num_blocks = -(-num_outputs // width)
    # A block of columns is read to its end.
    has_bias = biases[0] is not None
    beyond = ((0, 0), (0, num_blocks * width - num_outputs))
    padded = [jnp.pad(bias.astype(jnp.float32), beyond) for bias in biases if bias is not None]
    num_programs = num_multiprocessors(device_kind())
    call = plgpu.kernel(
        partial(_kernel, split, gated, -(-num_inputs // INPUTS), num_blocks, num_programs,
                has_bias, bool(interpret)),
        out_type=jax.ShapeDtypeStruct((len(x), num_outputs), x.dtype),
        scratch_types={
            "x_smem": tiled_smem((NUM_STAGES, split.rows, ROWS, INPUTS), x.dtype),
            "w_smem": tiled_smem((NUM_STAGES, 2, split.columns, INPUTS, split.width), x.dtype),
            "out_smem": tiled_smem((2, ROWS, split.width), x.dtype),
            "ready": plgpu.Barrier(
                num_arrivals=split.rows + 2 * split.columns, num_barriers=NUM_STAGES
            ),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=NUM_STAGES),
        },
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic_gpu_options(
            pl.CostEstimate(
                flops=2 * len(x) * num_inputs * num_outputs * len(weights),
                bytes_accessed=sum(2 * each.size for each in (x, *weights))
                + 2 * len(x) * num_outputs,
                transcendentals=0,
            ),
            interpret,
        ),
    )  # fmt: skip
    out: jax.Array = call(
        work.expert, work.start, work.num_rows, work.num_tiles, x, *weights, *padded
    )
    return out


def _kernel(
    split: _Split,
    gated: Gated | None,
    num_steps: int,
    num_blocks: int,
    num_programs: int,
    has_bias: bool,
    plain: bool,
    # Global memory.
    expert_ref: Any,  # int32[I]
    start_ref: Any,  # int32[I]
    num_rows_ref: Any,  # int32[I]
    num_tiles_ref: Any,  # int32[1]
    x_ref: Any,  # [A, K]
    *weights_and_output: Any,  # [X, K, N] one or two; as many float32[X, N] if any; then [A, N]
    # Shared memory; S stages.
    x_smem: Any,  # [S, rows, 64, 64]
    w_smem: Any,  # [S, 2, columns, 64, width]
    out_smem: Any,  # [2, 64, width]
    ready: Any,
    free: Any,
) -> None:
    num_weights = 2 if gated else 1
    w_refs, bias_refs = weights_and_output[:num_weights], weights_and_output[num_weights:-1]
    out_ref = weights_and_output[-1]
    program, wg = lax.axis_index("program"), lax.axis_index("wg")
    num_items = num_tiles_ref[0] * num_blocks
    num_turns = lax.div(num_items - program + (num_programs - 1), jnp.int32(num_programs))
    columns = COLUMNS * (1 if gated else 2)

    def item(turn: Any) -> tuple[Any, Any]:
        """The tile of rows, and the first column."""
        number = turn * num_programs + program
        tile = lax.div(number, jnp.int32(num_blocks))
        block = number - tile * num_blocks
        return tile, pl.multiple_of(block * columns, columns)

    def half(which: int, column: Any) -> tuple[Any, Any]:
        """Of an item's two products: the weight, and its first column."""
        return (w_refs[which], column) if gated else (w_refs[0], column + which * COLUMNS)

    @pl.when(wg == 2)
    def _copy() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="decrease")

        @pl.loop(0, num_turns)
        def _item(turn: Any) -> None:
            tile, column = item(turn)
            expert, start = expert_ref[tile], pl.multiple_of(start_ref[tile], ALIGNMENT)

            @pl.loop(0, num_steps)
            def _stage(k: Any) -> None:
                step = turn * num_steps + k
                slot = lax.rem(step, jnp.int32(NUM_STAGES))
                pl.when(step >= NUM_STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                inputs = pl.ds(pl.multiple_of(k * INPUTS, INPUTS), INPUTS)
                for part in range(split.rows):
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(start + part * ROWS, ROWS), inputs],
                        x_smem.at[slot, part],
                        ready.at[slot],
                    )
                for which in range(2):
                    weight, first = half(which, column)
                    for part in range(split.columns):
                        outputs = pl.ds(first + part * split.width, split.width)
                        plgpu.copy_gmem_to_smem(
                            weight.at[expert, inputs, outputs],
                            w_smem.at[slot, which, part],
                            ready.at[slot],
                        )

    def operands(slot: Any) -> tuple[Any, Any, Any]:
        by_rows = split.rows == 2
        x = x_smem.at[slot, wg if by_rows else 0]
        part = 0 if by_rows else wg
        return x, w_smem.at[slot, 0, part], w_smem.at[slot, 1, part]

    def multiply(turn: Any) -> tuple[jax.Array, jax.Array]:
        first = turn * num_steps
        shape = (ROWS, split.width)

        def slot_of(k: Any) -> Any:
            return lax.rem(first + k, jnp.int32(NUM_STAGES))

        if plain:  # the interpreter's

            def add(k: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                slot = slot_of(k)
                plgpu.barrier_wait(ready.at[slot])
                x, *both = operands(slot)
                a, b = (
                    total + jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)
                    for total, w in zip(sums, both, strict=True)
                )
                plgpu.barrier_arrive(free.at[slot])
                return a, b

            zeros = jnp.zeros(shape, jnp.float32)
            return lax.fori_loop(0, num_steps, add, (zeros, zeros))

        def product(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
            def start(k: Any) -> None:
                slot = slot_of(k)
                plgpu.barrier_wait(ready.at[slot])
                x, w_a, w_b = operands(slot)
                plgpu.wgmma(a, x, w_a)
                plgpu.wgmma(b, x, w_b)

            start(0)

            @pl.loop(1, num_steps)
            def _step(k: Any) -> None:
                start(k)
                plgpu.wgmma_wait(2)  # the stage before has been read
                plgpu.barrier_arrive(free.at[slot_of(k - 1)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot_of(num_steps - 1)])
            return a[...], b[...]

        return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))

    def leave(tile: Any, column: Any, out: jax.Array) -> None:
        by_rows = split.rows == 2
        start = pl.multiple_of(start_ref[tile], ALIGNMENT)
        num_rows = num_rows_ref[tile]
        if by_rows:
            start, num_rows = start + wg * ROWS, num_rows - wg * ROWS
        else:
            column = column + wg * split.width
        here = pl.ds(pl.multiple_of(column, split.width), split.width)
        plgpu.wait_smem_to_gmem(0)  # what was left before has been read
        out_smem[wg] = out.astype(out_smem.dtype)
        plgpu.commit_smem()

        @pl.when(num_rows >= ROWS)
        def _whole() -> None:
            plgpu.copy_smem_to_gmem(
                out_smem.at[wg], out_ref.at[pl.ds(start, ROWS), here], commit_group=False
            )

        # What follows a short tile is another expert's.
        @pl.when(num_rows < ROWS)
        def _short() -> None:
            @pl.loop(0, lax.div(jnp.maximum(num_rows, 0) + ALIGNMENT - 1, jnp.int32(ALIGNMENT)))
            def _some(i: Any) -> None:
                offset = pl.multiple_of(i * ALIGNMENT, ALIGNMENT)
                plgpu.copy_smem_to_gmem(
                    out_smem.at[wg, pl.ds(offset, ALIGNMENT)],
                    out_ref.at[pl.ds(start + offset, ALIGNMENT), here],
                    commit_group=False,
                )

        plgpu.commit_smem_to_gmem_group()

    @pl.when(wg < 2)
    def _multiply() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="increase")

        @pl.loop(0, num_turns)
        def _item(turn: Any) -> None:
            both = list(multiply(turn))
            tile, column = item(turn)
            if has_bias:
                expert = expert_ref[tile]
                part = 0 if split.rows == 2 else wg * split.width
                for which in range(2):
                    ref = bias_refs[which] if gated else bias_refs[0]
                    first = column + part + (0 if gated else which * COLUMNS)
                    bias = plgpu.load(
                        ref.at[expert, pl.ds(pl.multiple_of(first, split.width), split.width)],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                    both[which] += lax.broadcast_in_dim(bias, both[which].shape, [1])
            if gated:
                leave(tile, column, gated(*both))
            else:
                for which, out in enumerate(both):
                    leave(tile, column + which * COLUMNS, out)

        plgpu.wait_smem_to_gmem(0)
