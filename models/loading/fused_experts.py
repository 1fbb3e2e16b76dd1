"""Experts that a checkpoint holds fused: all of a layer's in one tensor, gates before ups.

`mlp.experts.gate_up_proj` [X, 2 · F, E] and `mlp.experts.down_proj` [X, E, F] stand for the tensors
`mlp.experts.N.gate_proj.weight`, `.up_proj.weight` and `.down_proj.weight` of every expert N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models.tensor_layouts import Index, Tensor

_FUSED = {
    "gate_proj.weight": ("gate_up_proj", 0, 2),
    "up_proj.weight": ("gate_up_proj", 1, 2),
    "down_proj.weight": ("down_proj", 0, 1),
}
"""An expert's tensor -> the fused one, which of its parts it is, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPart:
    """Where a tensor of one expert lies.

    Attributes:
        stored: the fused tensor's name.
        expert: the expert.
        first: of the fused tensor's rows.
        shape: of the part.
    """

    stored: str
    expert: int
    first: int
    shape: tuple[int, ...]

    def index(self, index: Index) -> Index:
        """A slice of the part, as one of the fused tensor; one dimension more."""
        rows = slice(self.first + index[0].start, self.first + index[0].stop)
        return (slice(self.expert, self.expert + 1), rows, *index[1:])


def fused_parts(
    stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[Tensor, str]]
) -> dict[str, FusedPart]:
    """Expected tensors that are parts of stored ones.

    Args:
        stored: shapes by name.
        expected: see `expected_tensors`.

    Returns:
        By name; without those whose fused tensor has another shape than they want, or lacks.
    """
    found: dict[str, list[tuple[str, FusedPart]]] = {}
    num_experts: dict[str, int] = {}
    for name, (tensor, _) in expected.items():
        if tensor.expert is None or name in stored:
            continue
        prefix, _, which = name.rpartition(f".{tensor.expert}.")
        if which not in _FUSED:
            continue
        last, number, of = _FUSED[which]
        fused, rows = f"{prefix}.{last}", tensor.shape[0]
        num_experts[fused] = max(num_experts.get(fused, 0), tensor.expert + 1)
        if stored.get(fused, ())[1:] == (of * rows, *tensor.shape[1:]):
            part = FusedPart(
                stored=fused, expert=tensor.expert, first=number * rows, shape=tensor.shape
            )
            found.setdefault(fused, []).append((name, part))
    return {
        name: part
        for fused, parts in found.items()
        if stored[fused][0] == num_experts[fused]
        for name, part in parts
    }
