"""A kernel that a device gets wrong is found at the start, and another takes its place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from octavo.engine.execution.platform import kernel_choice
from octavo.engine.execution.platform.kernel_choice import choose_experts
from octavo.models.config import ModelConfig
from octavo.models.families.table import config_from_hf
from octavo.pallas_kernels.routed_experts import self_check
from octavo.sharding.mesh import make_mesh
from tests.engine.execution.platform.test_engine_setup import MODEL

BFLOAT16 = jnp.dtype("bfloat16")
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 64,
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "hidden_act": "silu",
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "norm_topk_prob": False,
}  # fmt: skip


def with_experts() -> ModelConfig:
    return config_from_hf(OLMOE)


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "backend_for", lambda platform, device_kind: "mosaic_gpu")


def checks(monkeypatch: pytest.MonkeyPatch, result: Callable[[], float | None]) -> list[Any]:
    """Arguments of the checks that are made from now on."""
    made: list[Any] = []

    def check(*args: Any, **rest: Any) -> float | None:
        made.append((*args, rest["has_biases"]))
        return result()

    monkeypatch.setattr(self_check, "check_experts", check)
    return made


def fail() -> float | None:
    raise RuntimeError("ptxas: too many registers")


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (fail, "it fails with RuntimeError: ptxas: too many registers"),
        (lambda: 0.25, "it differs from the reference by 0.25"),
        (lambda: float("nan"), "it differs from the reference by nan"),
    ],
)
def test_experts_that_a_device_gets_wrong_go_the_ragged_way(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    result: Callable[[], float | None],
    told: str,
) -> None:
    checks(monkeypatch, result)
    with caplog.at_level(logging.WARNING):
        assert choose_experts(with_experts(), make_mesh(1), dtype=BFLOAT16) == "ragged"
    assert told in caplog.text


def test_equal_layers_are_checked_once_in_what_a_device_has_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = checks(monkeypatch, lambda: None)
    widths = {}
    for num_devices in (1, 2, 4):
        mesh = make_mesh(num_devices)
        assert choose_experts(with_experts(), mesh, dtype=BFLOAT16) == "mosaic_gpu"
        [(backend, hidden, widths[num_devices], _, has_biases)] = made
        assert (backend, hidden, has_biases) == ("mosaic_gpu", 64, False)
        made.clear()
    # Six experts divide by two: whole ones. Four devices have a part of each.
    assert widths == {1: 48, 2: 48, 4: 12}


def test_what_the_kernel_never_multiplies_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checks(monkeypatch, fail)
    mesh = make_mesh(1)
    assert choose_experts(MODEL, mesh, dtype=BFLOAT16) == "mosaic_gpu"
    assert choose_experts(with_experts(), mesh, dtype=jnp.dtype("float32")) == "mosaic_gpu"
    assert not made
