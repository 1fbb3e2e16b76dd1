"""The shape of a compiled step, and the one description of what it is fed.

A step's input is a single int32 vector: one transfer, whatever it holds. `StepSpec` lays the
fields out once, and both sides use it: the packer writes through NumPy views, the compiled step
reads static slices. They cannot drift.

Legend: T tokens, S rows, U new rows, B page updates, G cache groups, M entries in a row of a block
table, K stop ids.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from octavo.engine.sampling_params import MAX_STOP_IDS
from octavo.engine.scheduler.step_plan import MAX_SAVES

Variant = Literal["greedy", "general", "pooled"]

NEW_ROW_INTS = (
    "slot",
    "num_computed_tokens",
    "max_total_tokens",
    "top_k",
    "stop_from",
    "num_logprobs",
    "flags",
    "seed_high",
    "seed_low",
)
NEW_ROW_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """What one compiled program takes. All of it is static.

    Attributes:
        num_tokens: T, tokens computed in an iteration.
        num_rows: S, rows; T for a decode program.
        num_steps: most decode iterations in a dispatch; 0 marks a mixed program (prefill chunks
            and decode rows, one iteration).
        variant: "greedy" compiles the argmax alone; "general" serves every request that generates;
            "pooled", of mixed programs alone, serves every request and returns hidden states.
        block_quantized: linear layers read block-quantized weights.
        quick: what compiles soonest, where another program of the size computes faster.
    """

    num_tokens: int
    num_rows: int
    num_steps: int
    variant: Variant = "general"
    block_quantized: bool = False
    quick: bool = False

    @property
    def is_decode(self) -> bool:
        return self.num_steps > 0

    @property
    def is_greedy(self) -> bool:
        """Whether its rows are greedy and want nothing but tokens."""
        return self.variant == "greedy"

    @property
    def pools(self) -> bool:
        """Whether it returns hidden states."""
        return self.variant == "pooled"

    @property
    def num_iterations(self) -> int:
        return max(1, self.num_steps)

    @property
    def num_new_rows(self) -> int:
        """U, rows whose state the program can set: none when decoding."""
        return 0 if self.is_decode else prefill_rows(self.num_tokens, self.num_rows)

    def __str__(self) -> str:
        kind = f"decode {self.num_rows} x {self.num_steps}" if self.is_decode else "mixed"
        marks = " block-quantized" * self.block_quantized + " quick" * self.quick
        return f"{kind} {self.num_tokens} {self.variant}{marks}"


def prefill_rows(num_tokens: int, num_rows: int) -> int:
    """Prefill rows that a mixed program of this size takes.

    Each adds a row of the block table to the input, and no arithmetic. Too few of them, and a few
    tokens each of many prompts, such as what follows a cached prefix, take a program of many more
    tokens, all of which a CPU computes.
    """
    return min(num_rows, max(16, num_tokens // 16))


@dataclass(frozen=True, slots=True)
class Field:
    """A named stretch of the input vector."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.int32] | type[np.float32]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class StepSpec:
    """Layout of a step's input.

    Args:
        shape: the program's shape.
        table_pages: M.
        page_size: tokens in a page.
        num_groups: G.
        has_snapshots: whether rows may begin with snapshots of recurrent states, and leave some.
    """

    def __init__(
        self,
        shape: StepShape,
        table_pages: int,
        page_size: int,
        num_groups: int = 1,
        has_snapshots: bool = False,
    ) -> None:
        self.shape = shape
        self.table_pages = table_pages
        self.page_size = page_size
        self.num_groups = num_groups
        self.has_snapshots = has_snapshots
        rows, tokens, new = shape.num_rows, shape.num_tokens, shape.num_new_rows
        # Each row may cross into a new page an iteration; chunks fill pages of their own.
        self.num_page_updates = rows * (1 + shape.num_iterations // page_size)
        if not shape.is_decode:
            self.num_page_updates += tokens // page_size
        i32, f32 = np.int32, np.float32
        layout: list[tuple[str, tuple[int, ...], type[np.int32] | type[np.float32]]] = [
            ("num_decode_rows", (), i32),
            ("num_rows", (), i32),
            ("num_steps", (), i32),
            ("row_slot", (rows,), i32),
            ("row_max_new_tokens", (rows,), i32),
            ("page_updates", (self.num_page_updates, 2 + num_groups), i32),
        ]
        if not shape.is_decode:
            layout += [
                ("row_start", (rows,), i32),
                ("cu_q_lens", (rows + 1,), i32),
                ("token_ids", (tokens,), i32),
                ("token_row", (tokens,), i32),
                ("score_ids", (tokens,), i32),
                ("new_slot", (new,), i32),
                ("new_ints", (new, len(NEW_ROW_INTS)), i32),
                ("new_floats", (new, len(NEW_ROW_FLOATS)), f32),
                ("new_stop_ids", (new, MAX_STOP_IDS), i32),
                ("new_table", (new, num_groups, table_pages), i32),
            ]
        if has_snapshots and not shape.is_decode:
            layout += [
                ("state_source", (rows,), i32),
                ("save_at", (rows, MAX_SAVES), i32),
                ("save_slot", (rows, MAX_SAVES), i32),
            ]
        if shape.pools:
            layout.append(("pool_row", (tokens,), i32))
        fields, offset = [], 0
        for name, dims, dtype in layout:
            fields.append(Field(name, dims, dtype, offset))
            offset += math.prod(dims)
        self.fields = tuple(fields)
        self.size = offset

    def abstract(self) -> jax.ShapeDtypeStruct:
        """The vector's abstract value."""
        return jax.ShapeDtypeStruct((self.size,), jnp.int32)

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of a host vector, one a field."""
        return {
            f.name: vector[f.offset : f.offset + f.size].view(f.dtype).reshape(f.shape)
            for f in self.fields
        }

    def unpack(self, vector: jax.Array) -> dict[str, jax.Array]:
        """The same fields inside a traced step."""
        out = {}
        for f in self.fields:
            part = lax.slice(vector, (f.offset,), (f.offset + f.size,))
            if f.dtype is np.float32:
                part = lax.bitcast_convert_type(part, jnp.float32)
            out[f.name] = part.reshape(f.shape)
        return out


@functools.lru_cache(maxsize=256)
def step_spec(
    shape: StepShape,
    table_pages: int,
    page_size: int,
    num_groups: int = 1,
    has_snapshots: bool = False,
) -> StepSpec:
    """The spec of a shape, made once."""
    return StepSpec(shape, table_pages, page_size, num_groups, has_snapshots)
