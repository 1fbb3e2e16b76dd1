"""What a shape's program reads is made only where a shape reads it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.program_weights import ProgramWeights
from octavo.engine.execution.step_spec import StepShape
from octavo.models.loading.load import open_model
from octavo.pallas_kernels.packed_linear import (
    BlockType,
    PackedWeight,
    PanelWeight,
    abstract_packed,
)
from octavo.sharding.mesh import make_mesh


@pytest.mark.parametrize("has_panels", [False, True])
def test_panels_are_made_where_several_rows_read_them(tiny_model: Path, has_panels: bool) -> None:
    mesh = make_mesh(1)
    weights = open_model(str(tiny_model), "float32", mesh, "none").abstract_weights()
    half = np.dtype(np.float16)
    kind = BlockType(codes=32, nibbles=True, scale_dtype=half, minimum_dtype=half)
    some = {"w_down": abstract_packed(kind, (64,), 2)}
    packed = {"layers": (some, *({} for _ in weights["layers"][1:]))}
    made = ProgramWeights(
        weights, mesh, kv_dtype=jnp.dtype("float32"), packed=packed, has_panels=has_panels
    )
    one = made.abstract_of(StepShape(1, 1, 4, packed=True))["layers"][0]["w_down"]
    assert isinstance(one, PackedWeight)
    assert (made.abstract.panels is not None) == has_panels
    if has_panels:
        several = made.abstract_of(StepShape(4, 4, 4, packed=True))["layers"][0]["w_down"]
        assert isinstance(several, PanelWeight)
    plain = made.abstract_of(StepShape(4, 4, 4))["layers"][0]["w_down"]
    assert isinstance(plain, jax.ShapeDtypeStruct)
