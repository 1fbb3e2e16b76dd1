"""Weights lie in memory as their device wants them, and nothing else about them changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.step_spec import StepShape
from octavo.engine.execution.weights import weight_layout
from octavo.engine.execution.weights.weight_layout import (
    abstract,
    lay_out,
    loop_compiler_options,
    weight_formats,
)
from octavo.engine.sampling_params import SamplingParams
from octavo.models.config import ModelConfig
from octavo.models.decoder import unembed
from octavo.models.families.table import config_from_hf
from octavo.models.flat_config import flat_config
from octavo.models.quantization import quantized_weights
from octavo.models.random_weights import random_weights
from octavo.pallas_kernels.compat import has_memory_order
from octavo.sharding.mesh import make_mesh
from tests.engine import test_recurrent_layers
from tests.engine.execution.platform.test_kernel_choice import OLMOE

CONFIG, WIDE = (
    flat_config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=width,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=True,
    )
    for head_dim, width in ((8, 192), (128, 256))
)
"""The second one's last dimensions fill whole lanes, on two devices, too."""


@pytest.fixture
def on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a TPU: it takes any order too."""
    monkeypatch.setattr(weight_layout, "PLATFORMS", frozenset({"cpu"}))


def weights(num_devices: int = 1, config: ModelConfig = CONFIG) -> Any:
    return random_weights(config, jnp.dtype("float32"), make_mesh(num_devices), seed=0)


def test_a_cpu_keeps_the_declared_order() -> None:
    given = weights()
    assert lay_out(given)["layers"][0]["w_gate_up"] is given["layers"][0]["w_gate_up"]


@pytest.mark.usefixtures("on_a_tpu")
def test_split_outputs_lie_with_their_inputs_last_but_one() -> None:
    before = np.asarray(weights(config=WIDE)["layers"][0]["w_gate_up"])
    layer = lay_out(weights(config=WIDE))["layers"][0]
    assert layer["w_gate_up"].format.layout.major_to_minor == (1, 0, 2)
    assert layer["wqkv"].format.layout.major_to_minor == (1, 2, 0, 3)
    assert layer["w_down"].format.layout.major_to_minor == (0, 1)
    np.testing.assert_array_equal(np.asarray(layer["w_gate_up"]), before)


@pytest.mark.usefixtures("on_a_tpu")
def test_outputs_that_do_not_fill_lanes_lie_with_their_inputs_last() -> None:
    before = np.asarray(weights()["layers"][0]["wqkv"])
    layer = lay_out(weights())["layers"][0]
    assert layer["wqkv"].format.layout.major_to_minor == (1, 2, 3, 0)
    assert layer["w_gate_up"].format.layout.major_to_minor == (1, 2, 0)
    np.testing.assert_array_equal(np.asarray(layer["wqkv"]), before)


@pytest.mark.usefixtures("on_a_tpu")
@pytest.mark.parametrize(("num_devices", "order"), [(1, (1, 0, 2)), (2, (1, 0, 2)), (4, (1, 2, 0))])
def test_what_fills_lanes_is_a_devices_part(num_devices: int, order: tuple[int, ...]) -> None:
    layer = lay_out(weights(num_devices, WIDE))["layers"][0]
    assert layer["w_gate_up"].format.layout.major_to_minor == order


@pytest.mark.usefixtures("on_a_tpu")
def test_inputs_of_a_delta_net_lie_last_or_last_but_one() -> None:
    config = test_recurrent_layers.config_of("gated_delta")
    layers = lay_out(weights(config=config))["layers"]
    layer = next(layer for layer in layers if "delta_in" in layer)
    fills_lanes = layer["delta_in"].shape[-1] % 128 == 0
    order = (1, 0, 2) if fills_lanes else (1, 2, 0)
    assert layer["delta_in"].format.layout.major_to_minor == order
    assert layer["delta_rates"].format.layout.major_to_minor == (1, 2, 0)


@pytest.mark.usefixtures("on_a_tpu")
def test_tables_and_stacks_of_experts_lie_row_by_row() -> None:
    """XLA's own choice for 50,272 rows of 2,880 is column by column, which pads less."""
    assert has_memory_order(weight_formats(weights())["embed"])
    assert lay_out(weights())["embed"].format.layout.major_to_minor == (0, 1)
    config = config_from_hf(OLMOE)
    assert has_memory_order(weight_formats(weights(config=config))["layers"][0]["experts_up"])
    layer = lay_out(weights(config=config))["layers"][0]
    for name in ("experts_gate", "experts_up", "experts_down"):
        assert layer[name].format.layout.major_to_minor == (0, 1, 2)


@pytest.mark.usefixtures("on_a_tpu")
def test_an_output_layer_lies_as_a_tied_table_does() -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    placed = lay_out(weights(config=config))
    assert placed["lm_head"].format.layout.major_to_minor == (1, 0)
    assert placed["embed"].format.layout.major_to_minor == (0, 1)


@pytest.mark.parametrize(
    ("shape", "kind", "is_told"),
    [
        (StepShape(32, 32, 4, "greedy"), "TPU7x", True),
        (StepShape(640, 128, 0, "general"), "TPU7x", True),
        (StepShape(640, 128, 0, "greedy"), "TPU7x", False),
        (StepShape(32, 32, 4, "greedy"), "TPU v6 lite", False),
        (StepShape(32, 32, 4, "greedy"), "cpu", False),
    ],
)
def test_loops_over_weights_keep_the_tiles_they_come_in(
    shape: StepShape, kind: str, is_told: bool
) -> None:
    assert bool(loop_compiler_options(shape, kind)) == is_told


@pytest.mark.usefixtures("on_a_tpu")
def test_programs_are_compiled_for_the_order_the_weights_are_in() -> None:
    formats = weight_formats(weights())["layers"][0]
    assert has_memory_order(formats["wqkv"])
    assert not has_memory_order(formats["wo"])


@pytest.mark.usefixtures("on_a_tpu")
def test_quantized_weights_stay_in_their_order() -> None:
    quantized = quantized_weights(weights(), CONFIG, "int8", make_mesh(1))
    before = quantized["layers"][0]["wqkv"].values
    assert lay_out(quantized)["layers"][0]["wqkv"].values is before


@pytest.mark.parametrize("num_devices", [1, 2])
def test_for_eigen_a_tied_output_layer_is_kept_inputs_first(num_devices: int) -> None:
    before = weights(num_devices)
    placed = lay_out(before, "eigen")
    np.testing.assert_array_equal(placed["lm_head"], np.asarray(before["embed"]).T)
    expected = abstract(before, "eigen")["lm_head"]
    assert expected.shape == placed["lm_head"].shape
    assert expected.sharding.is_equivalent_to(placed["lm_head"].sharding, 2)
    hidden = np.random.default_rng(0).standard_normal((3, CONFIG.hidden_size), np.float32)
    # Sums of 32 numbers in another order.
    np.testing.assert_allclose(
        unembed(placed, CONFIG, hidden), unembed(before, CONFIG, hidden), rtol=1e-5, atol=1e-5
    )
    assert "lm_head" not in lay_out(before)


def test_tokens_do_not_depend_on_the_order(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens() -> list[int]:
        llm = make_llm(max_num_seqs=1, max_num_batched_tokens=32, num_kv_pages=40)
        prompts, params = [[66, 67, 68]], SamplingParams(temperature=0, max_tokens=12)
        return list(llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids)

    declared = tokens()
    monkeypatch.setattr(weight_layout, "PLATFORMS", frozenset({"cpu"}))
    assert tokens() == declared
