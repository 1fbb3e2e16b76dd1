"""What a shape's program reads is made only where a shape reads it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.step_spec import StepShape
from octavo.engine.execution.weights import program_weights
from octavo.engine.execution.weights.program_weights import ProgramWeights
from octavo.engine.execution.weights.weight_variants import WeightVariants, plain_variants
from octavo.models.loading.load import open_model
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    BlockQuantizedWeight,
    PanelWeight,
    abstract_block_quantized,
)
from octavo.pallas_kernels.cpu.native_int8_linear import COMPILER_OPTIONS as NATIVE_OPTIONS
from octavo.pallas_kernels.cpu.native_int8_linear import NativeInt8Weight
from octavo.pallas_kernels.stored_blocks import BlockType
from octavo.sharding.mesh import make_mesh


@pytest.mark.parametrize("has_panels", [False, True])
def test_panels_are_made_where_several_rows_read_them(tiny_model: Path, has_panels: bool) -> None:
    mesh = make_mesh(1)
    weights = open_model(str(tiny_model), "float32", mesh, "none").abstract_weights()
    half = np.dtype(np.float16)
    kind = BlockType(codes=32, nibbles=True, scale_dtype=half, minimum_dtype=half)
    some = {"w_down": abstract_block_quantized(kind, (64,), 2)}
    blocks = {"layers": (some, *({} for _ in weights["layers"][1:]))}
    variants = WeightVariants(block_quantized_rows=4)
    made = ProgramWeights(weights, mesh, variants, blocks=blocks, has_panels=has_panels)
    one = made.abstract_of(StepShape(1, 1, 4, block_quantized=True))["layers"][0]["w_down"]
    assert isinstance(one, BlockQuantizedWeight)
    assert ("panels" in made.abstract) == has_panels
    if has_panels:
        several = made.abstract_of(StepShape(4, 4, 4, block_quantized=True))["layers"][0]["w_down"]
        assert isinstance(several, PanelWeight)
    plain = made.abstract_of(StepShape(4, 4, 4))["layers"][0]["w_down"]
    assert isinstance(plain, jax.ShapeDtypeStruct)


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_few_rows_of_int8_on_one_device_are_native_products(
    tiny_model: Path, quantization: str, num_devices: int
) -> None:
    mesh = make_mesh(num_devices)
    weights = open_model(str(tiny_model), "float32", mesh, quantization).abstract_weights()
    made = ProgramWeights(weights, mesh, plain_variants(weights, jnp.dtype("float32")))

    def is_native(shape: StepShape) -> bool:
        read = made.abstract_of(shape)["layers"][0]["w_down"]
        wants_options = NATIVE_OPTIONS.items() <= made.compiler_options(shape).items()
        assert isinstance(read, NativeInt8Weight) == wants_options
        return wants_options

    is_possible = quantization == "int8" and num_devices == 1
    assert is_native(StepShape(1, 1, 4)) == is_possible
    assert is_native(StepShape(2, 2, 4, "greedy")) == is_possible
    assert not is_native(StepShape(1, 1, 4, quick=True))
    assert not is_native(StepShape(4, 4, 4))
    assert not is_native(StepShape(2, 2, 0))


def test_a_variant_made_in_the_background_is_not_ready_before(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh(1)
    weights = open_model(str(tiny_model), "float32", mesh, "none").read_weights()
    may_end = threading.Event()
    real = program_weights.int8_split_weights

    def slow(whole: Any) -> Any:
        assert may_end.wait(60)
        return real(whole)

    monkeypatch.setattr(program_weights, "int8_split_weights", slow)
    made = ProgramWeights(weights, mesh, WeightVariants(int8_split_tokens=(8, 16)))
    plain, split = StepShape(4, 4, 4), StepShape(8, 8, 4)
    assert made.is_ready(plain)
    assert not made.is_ready(split)
    may_end.set()
    assert made.of(split)["layers"][0]["w_down"] is not made.of(plain)["layers"][0]["w_down"]
    assert made.is_ready(split)
