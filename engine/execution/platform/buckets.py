"""The lattice of compiled shapes: few programs that together serve every plan.

Row and token counts inside a program are data, not shape, so a program is a size and not a mix:
the lattice is one ladder of decode programs and one of mixed programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from octavo.engine.config import FEW_ROWS, FEW_TOKENS
from octavo.engine.execution.step_spec import StepShape, Variant
from octavo.engine.scheduler.step_plan import StepPlan

QUICK_COST, BLOCK_QUANTIZED_COST = 1.25, 0.5
"""Of a quick program and of one with block-quantized weights, compared with another of the size;
roughly."""

SMALL_MIXED, SMALLEST_MIXED = (8, 16), 4
"""Tokens of mixed programs with block-quantized weights; and of the one where no more rows than
that read such weights."""


@dataclass(frozen=True, slots=True)
class Lattice:
    """Every shape an engine compiles.

    Attributes:
        decode: decode programs, by rows, ascending; of as many rows the fastest first and the one
            that compiles soonest last.
        mixed: mixed programs, by tokens, ascending; of as many tokens as `decode`.
        variants: sampling variants each of them is compiled for; none where nothing is generated.
        pools: mixed programs are compiled for pooled requests, too.
    """

    decode: tuple[StepShape, ...]
    mixed: tuple[StepShape, ...]
    variants: tuple[Variant, ...]
    pools: bool = False

    @property
    def coarse(self) -> tuple[StepShape, ...]:
        """The largest shapes, which serve every plan, as soon as can be."""
        return self._in_variants((self.mixed[-1], self.decode[-1]))

    @property
    def fine(self) -> tuple[StepShape, ...]:
        """The others: the small decode programs, which save most, come first."""
        return self._in_variants((*self.decode[:-1], *self.mixed[:-1][::-1]))

    def few(self, is_left: Callable[[StepShape], bool]) -> tuple[StepShape, ...]:
        """A program for every step of a handful of rows, the smallest ones first that an earlier
        start left; of one row alone, too, if that was left."""
        chosen = []
        for shapes, least in ((self.mixed, FEW_TOKENS), (self.decode, FEW_ROWS)):
            serving = [each for each in shapes if each.num_tokens >= least] or [*shapes[-1:]]
            soonest = [each for each in serving if each.num_tokens == serving[0].num_tokens][-1]
            for variant in self._variants_of(soonest):
                each = (dataclasses.replace(shape, variant=variant) for shape in serving)
                small = dataclasses.replace(soonest, variant=variant)
                chosen.append(next(filter(is_left, each), small))
        one = self._in_variants(self.decode[:1])
        return (*chosen, *(shape for shape in one if shape not in chosen and is_left(shape)))

    @property
    def full(self) -> tuple[StepShape, ...]:
        """What there is to serve with once all is compiled: none that another one outdoes."""
        return tuple(shape for shape in self.shapes if not shape.quick)

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """All shapes, the coarse ones first."""
        return (*self.coarse, *self.fine)

    def _in_variants(self, shapes: tuple[StepShape, ...]) -> tuple[StepShape, ...]:
        return tuple(
            dataclasses.replace(shape, variant=variant)
            for shape in shapes
            for variant in self._variants_of(shape)
        )

    def _variants_of(self, shape: StepShape) -> tuple[Variant, ...]:
        if self.pools and not shape.is_decode:
            return (*self.variants, "pooled")
        return self.variants

    @property
    def token_edges(self) -> tuple[int, ...]:
        return tuple(shape.num_tokens for shape in self.mixed if not shape.quick)

    @property
    def max_prefill_rows(self) -> int:
        return self.mixed[-1].num_new_rows

    def choose(
        self, plan: StepPlan, variant: Variant, has: Callable[[StepShape], bool]
    ) -> StepShape:
        """The smallest shape that takes the plan and has a program; else the smallest of all.

        Raises:
            AssertionError: the plan exceeds the limits that the scheduler was given.
        """
        fitting = [
            dataclasses.replace(shape, variant=variant)
            for shape in (self.mixed if plan.prefill_rows or not self.variants else self.decode)
            if _takes(shape, plan)
        ]
        assert fitting, f"no program takes {plan.num_tokens} tokens in {plan.num_rows} rows"
        return next((shape for shape in fitting if has(shape)), fitting[0])


def waste(shape: StepShape, best: StepShape) -> float:
    """What an iteration of one program costs more than one of another, in token slots."""
    return _cost(shape) - _cost(best)


def _cost(shape: StepShape) -> float:
    if shape.quick:
        return QUICK_COST * shape.num_tokens
    return (BLOCK_QUANTIZED_COST if shape.block_quantized else 1.0) * shape.num_tokens


def _takes(shape: StepShape, plan: StepPlan) -> bool:
    """Whether a program of this shape has room for the plan."""
    return (
        shape.num_tokens >= plan.num_tokens
        and shape.num_rows >= plan.num_rows
        and shape.num_new_rows >= len(plan.prefill_rows)
    )


def make_lattice(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_steps: int,
    variants: tuple[Variant, ...],
    block_quantized_rows: int = 0,
    has_quick: bool = False,
    has_dear_rows: bool = False,
    for_few: bool = False,
    pools: bool = False,
) -> Lattice:
    """Decode rows 1, 4, 8, 16, 24, 32, 48, … 128, 160, …; mixed tokens 32, 128, 256, 384, 512, ….

    Rows leave a full batch one by one, so decode programs are finer where padding costs most. Many
    tokens compute on every device, so that mixed ones are two to a doubling.

    Args:
        max_num_seqs: rows of the largest programs.
        max_num_batched_tokens: tokens of the largest mixed program.
        num_steps: decode iterations in a dispatch.
        variants: sampling variants.
        block_quantized_rows: decode programs of at most so many rows read block-quantized weights.
            What they take goes with their rows, so there are those of 6, 20 and 28, too. They
            compile slowly, so the largest program is there without them as well, and comes first.
            There are mixed ones of 8 and 16 tokens, or of 4, too: what follows a cached prefix, or
            a grammar forces, is few tokens, and reading all weights in float32 takes as long as
            computing 50.
        has_quick: programs can be compiled sooner than they should be to compute fast. So are the
            largest ones first, which readiness waits for.
        has_dear_rows: a step of few tokens takes longer with each, as on a CPU, where it computes;
            elsewhere it waits for the weights. There is one of 12 rows, too, and one of 64 tokens.
        for_few: what compiles soonest is there for a handful of rows as well.
        pools: there are mixed programs that return hidden states.
    """
    finer = [n for n in (6, 20, 28) if n <= block_quantized_rows]
    decode = sorted([1, 4, 8, *([12] * has_dear_rows), 16, 24, 32, *finer])
    while decode[-1] < max_num_seqs:
        power = 1 << (decode[-1].bit_length() - 1)
        decode.append(decode[-1] + max(16, power // 4))
    mixed = [32, *([64] * has_dear_rows), 128, 256]
    while mixed[-1] < max_num_batched_tokens:
        mixed += [mixed[-1] * 3 // 2, mixed[-1] * 2]
    rows = _up_to(max_num_seqs, decode)
    in_blocks = [n for n in rows if n <= block_quantized_rows]
    plain = [n for n in rows if n not in in_blocks or (n == max_num_seqs and not has_quick)]
    most_tokens = _up_to(max_num_batched_tokens, mixed)
    most_small = min(block_quantized_rows, max_num_batched_tokens)
    small = [n for n in SMALL_MIXED if n <= most_small] or [SMALLEST_MIXED]
    prefill = [
        *(
            StepShape(n, min(n, max_num_seqs), 0, block_quantized=True)
            for n in small
            if n <= most_small
        ),
        *(StepShape(n, min(n, max_num_seqs), 0) for n in most_tokens),
    ]
    decodes = [
        *(StepShape(n, n, num_steps, block_quantized=True) for n in in_blocks),
        *(StepShape(n, n, num_steps) for n in plain),
        *(StepShape(n, n, num_steps, quick=True) for n in rows[-1:] * has_quick),
    ]
    if has_quick:
        prefill.append(dataclasses.replace(prefill[-1], quick=True))
    if for_few:
        few = next(n for n in rows if n >= min(FEW_ROWS, max_num_seqs))
        decodes = _with(StepShape(few, few, num_steps, quick=has_quick), decodes)
        few = next(n for n in most_tokens if n >= min(FEW_TOKENS, max_num_batched_tokens))
        prefill = _with(StepShape(few, min(few, max_num_seqs), 0, quick=has_quick), prefill)
    return Lattice(tuple(decodes), tuple(prefill), variants, pools)


def _with(shape: StepShape, shapes: list[StepShape]) -> list[StepShape]:
    """The shapes and, last among those of its size, one more if it is not there."""
    if shape in shapes:
        return shapes
    return sorted([*shapes, shape], key=lambda each: each.num_tokens)


def _up_to(last: int, edges: list[int]) -> list[int]:
    """The edges below `last`, and `last`."""
    return [*(edge for edge in edges if edge < last), last]
