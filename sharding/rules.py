"""Logical axis names of arrays, and the mesh axes they are split over.

Model and engine code names the axes of an array by what they are ("kv_heads", "mlp"); only this
table says where they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.sharding.mesh import TENSOR_AXIS

LogicalAxes = tuple[str | None, ...]
"""One name a dimension; None for a dimension that is never split."""


@dataclass(frozen=True, slots=True)
class AxisRules:
    """Which mesh axis each logical axis is split over; None keeps it whole on every device.

    Attributes:
        table: (logical axis, mesh axis or None) pairs; each logical axis once.
    """

    table: tuple[tuple[str, str | None], ...]

    def mesh_axis(self, logical_axis: str | None) -> str | None:
        """The mesh axis `logical_axis` is split over.

        Raises:
            ValueError: a name the table does not have.
        """
        if logical_axis is None:
            return None
        for name, mesh_axis in self.table:
            if name == logical_axis:
                return mesh_axis
        known = ", ".join(name for name, _ in self.table)
        raise ValueError(f"logical axis = {logical_axis!r} is not allowed: one of {known}")

    def spec(self, logical_axes: Sequence[str | None]) -> PartitionSpec:
        """The canonical partition of an array with these axes, if all of them divide.

        Of several that name one mesh axis, the first is split.
        """
        axes: list[str | None] = []
        for name in logical_axes:
            axis = self.mesh_axis(name)
            axes.append(None if axis in axes else axis)
        return canonical_spec(axes)

    def sharding(
        self, mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int]
    ) -> NamedSharding:
        """Where an array of `shape` lives on `mesh`.

        A dimension that does not divide evenly over its mesh axis is kept whole on every device. Of
        several dimensions that name one mesh axis, the first that divides is split: experts where
        there are enough of them, or else the features within each.

        Raises:
            ValueError: as many names as dimensions are needed, each of them in the table.
        """
        if len(logical_axes) != len(shape):
            raise ValueError(
                f"logical_axes = {tuple(logical_axes)!r} is not allowed: "
                f"{len(shape)} names, for the shape {tuple(shape)}"
            )
        axes = [self.mesh_axis(name) for name in logical_axes]
        fitting: list[str | None] = []
        for axis, size in zip(axes, shape, strict=True):
            fits = axis is not None and axis not in fitting and size % mesh.shape[axis] == 0
            fitting.append(axis if fits else None)
        return NamedSharding(mesh, canonical_spec(fitting))


def canonical_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """A partition without trailing Nones, so that equal placements always compare equal.

    `P("x")` and `P("x", None)` place an array alike but differ as keys of compiled programs.
    """
    trimmed = list(axes)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    return PartitionSpec(*trimmed)


DEFAULT_RULES = AxisRules(
    table=(
        ("vocab", TENSOR_AXIS),
        ("heads", TENSOR_AXIS),
        ("kv_heads", TENSOR_AXIS),
        ("expert", TENSOR_AXIS),
        ("mlp", TENSOR_AXIS),
        ("embed", None),
        ("head_dim", None),
        ("tokens", None),
        ("pages", None),
    )
)
"""Tensor parallelism: heads, MLP features and vocabulary split, the rest on every device.

"expert" counts whole experts of a layer: a device that holds some of them computes what tokens they
are chosen for, and its results are summed with the others' as those of an MLP's features are. There
is no mesh axis of its own for them."""
