"""The lattice of compiled shapes: few programs that together serve every plan.

Row and token counts inside a program are data, not shape, so a program is a size and not a mix:
the lattice is one ladder of decode programs and one of mixed programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.execution.step_spec import StepShape, Variant
from octavo.engine.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Lattice:
    """Every shape an engine compiles.

    Attributes:
        decode: decode programs, by rows, ascending.
        mixed: mixed programs, by tokens, ascending.
        variants: sampling variants each of them is compiled for.
    """

    decode: tuple[StepShape, ...]
    mixed: tuple[StepShape, ...]
    variants: tuple[Variant, ...]

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """All shapes: those that can serve any plan first, then the finer ones."""
        coarse = [self.mixed[-1], self.decode[-1]]
        fine = [s for s in (*self.mixed, *self.decode) if s not in coarse]
        return tuple(
            StepShape(s.num_tokens, s.num_rows, s.num_steps, variant)
            for s in (*coarse, *fine)
            for variant in self.variants
        )

    @property
    def token_edges(self) -> tuple[int, ...]:
        return tuple(shape.num_tokens for shape in self.mixed)

    @property
    def max_prefill_rows(self) -> int:
        return self.mixed[-1].num_new_rows

    def choose(self, plan: StepPlan, variant: Variant) -> StepShape:
        """The smallest shape that takes the plan.

        Raises:
            AssertionError: the plan exceeds the limits that the scheduler was given.
        """
        num_rows, num_prefills = plan.num_rows, len(plan.prefill_rows)
        if not num_prefills:
            for shape in self.decode:
                if shape.num_rows >= num_rows:
                    return StepShape(shape.num_tokens, shape.num_rows, shape.num_steps, variant)
        num_tokens = plan.num_tokens
        for shape in self.mixed:
            if (
                shape.num_tokens >= num_tokens
                and shape.num_rows >= num_rows
                and shape.num_new_rows >= num_prefills
            ):
                return StepShape(shape.num_tokens, shape.num_rows, 0, variant)
        raise AssertionError(f"no program takes {num_tokens} tokens in {num_rows} rows")


def make_lattice(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_steps: int,
    variants: tuple[Variant, ...],
) -> Lattice:
    """A coarse lattice: decode rows 1, 8, 32, 64, 128, …; mixed tokens 32, 128, 512, ….

    Rows leave a full batch one by one, so decode programs are finer where padding costs most.

    Args:
        max_num_seqs: rows of the largest programs.
        max_num_batched_tokens: tokens of the largest mixed program.
        num_steps: decode iterations in a dispatch.
        variants: sampling variants.
    """
    decode = [StepShape(n, n, num_steps) for n in _ladder((1, 8, 32), 2, max_num_seqs)]
    mixed = [
        StepShape(n, min(n, max_num_seqs), 0) for n in _ladder((32,), 4, max_num_batched_tokens)
    ]
    return Lattice(tuple(decode), tuple(mixed), variants)


def _ladder(first: tuple[int, ...], ratio: int, last: int) -> list[int]:
    """Edges that begin as `first`, then grow by `ratio`, ending exactly at `last`."""
    edges = [edge for edge in first if edge < last]
    while edges and edges[-1] >= first[-1] and edges[-1] * ratio < last:
        edges.append(edges[-1] * ratio)
    return [*edges, last]
