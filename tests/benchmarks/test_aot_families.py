"""What is compiled of a model stands for all of it, and what does not fit fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.aot.families import KNOWN, PODS, SLICES, failure, models, needed, shortened
from benchmarks.aot.targets import TARGETS
from octavo.models.blocks.layer import LayerSpec
from octavo.models.config import ModelConfig
from octavo.models.families.table import FAMILIES, config_from_hf

RESULT: dict[str, Any] = {
    "model": "a", "target": "v6e", "num_devices": 8, "step": "decode", "attention": "mosaic_tpu",
    "num_layers": [2, 48], "whole_weight_bytes": 15 * 10**9,
    "kept_bytes": 3 * 10**9, "temp_bytes": 10**8, "copied_bytes": 10**7, "copied": ["embed"],
    "compile_s": 4.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return models()


def test_a_short_model_has_every_kind_of_layer_that_the_whole_one_has(
    found: dict[str, dict[str, Any]],
) -> None:
    for name, values in found.items():
        whole, short = config_from_hf(values), config_from_hf(shortened(values))
        assert short.num_layers <= max(8, len(set(whole.layers))), name
        assert kinds(short) == kinds(whole), name
        assert dataclasses.replace(short, layers=whole.layers) == whole, name


def kinds(model: ModelConfig) -> set[LayerSpec]:
    """The layers there are, but for a scale that some families make of their number."""
    return {
        dataclasses.replace(layer, norms=dataclasses.replace(layer.norms, residual_scale=1.0))
        for layer in model.layers
    }


def test_nearly_every_family_is_compiled(found: dict[str, dict[str, Any]]) -> None:
    types = {values["model_type"] for values in found.values()}
    left_out = {family.model_type for family in FAMILIES} - types
    assert left_out <= {"granitemoehybrid", "starcoder2"}  # whose defaults are no model of theirs
    assert set(KNOWN) <= set(found)
    assert {*SLICES, *PODS} <= set(TARGETS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"copied_bytes": 2 * 10**9}, "copies embed into another layout"),
        ({"whole_weight_bytes": 29 * 10**9}, "needs 32.1 GB of 30.9"),
        ({"error": "RESOURCE_EXHAUSTED: vmem"}, "RESOURCE_EXHAUSTED: vmem"),
    ],
)
def test_what_does_not_fit_fails(change: dict[str, Any], why: str | None) -> None:
    found = failure(RESULT | change)
    assert found is None if why is None else why in str(found)
    assert needed(RESULT) == 18.1e9
