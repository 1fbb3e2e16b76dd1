"""Which library computes a CPU's products is measured, and changes no token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.weight_layout import abstract, lay_out
from octavo.models.config import ModelConfig
from octavo.models.decoder import unembed
from octavo.models.quantization import quantized_weights
from octavo.models.random_weights import random_weights
from octavo.pallas_kernels.compat import product_compiler_options
from octavo.pallas_kernels.product_library import choose_product_library, tune_products
from octavo.pallas_kernels.ragged_paged_attention import tuning
from octavo.sharding.mesh import make_mesh

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)
F32 = jnp.dtype("float32")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes that a library is the faster one here into the only folder of tables."""
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "none")
    tuning.forget_tables()

    def write(library: str, *, device: str | None = None, more_cores: int = 0) -> Path:
        entry = {"dtype": "float32", "num_cores": tuning.num_cores() + more_cores}
        table = {"device": device or tuning.tuning_device(), "date": "2026-11-22"}
        path = tmp_path / "table.json"
        tuning.write_table(path, table, [], [{**entry, "library": library}])
        return path

    yield write
    tuning.forget_tables()


def weights(num_devices: int = 1) -> Any:
    return random_weights(CONFIG, F32, make_mesh(num_devices), seed=0)


def test_what_was_measured_is_taken(measured: Callable[..., Path]) -> None:
    assert choose_product_library(weights(), F32) == "ynnpack"
    measured("eigen")
    assert choose_product_library(weights(), F32) == "eigen"


@pytest.mark.parametrize("change", [{"device": "another"}, {"more_cores": 1}])
def test_another_machine_says_nothing(measured: Callable[..., Path], change: Any) -> None:
    measured("eigen", **change)
    assert choose_product_library(weights(), F32) == "ynnpack"


def test_only_float32_throughout_was_measured(measured: Callable[..., Path]) -> None:
    measured("eigen")
    quantized = quantized_weights(weights(), CONFIG, "int8", make_mesh(1))
    assert choose_product_library(quantized, F32) == "ynnpack"
    assert choose_product_library(weights(), jnp.int8) == "ynnpack"


def test_an_unknown_library_is_refused(measured: Callable[..., Path]) -> None:
    path = measured("mkl")
    with pytest.raises(InvalidConfigError, match="library = 'mkl' in products"):
        choose_product_library(weights(), F32)
    assert path.exists()


def test_measuring_anew_keeps_what_it_does_not_measure(measured: Callable[..., Path]) -> None:
    measured("eigen", more_cores=2)
    table = json.loads(measured("ynnpack").read_text())
    cores = tuning.num_cores()
    assert {each["num_cores"]: each["library"] for each in table["products"]} == {
        cores: "ynnpack",
        cores + 2: "eigen",
    }


def test_both_libraries_are_measured() -> None:
    tuned = tune_products(16, 32, rows=(2, 4), rounds=1)
    assert tuned.entry()["rows"] == [2, 4]
    assert all(len(tuned.ms[name]) == 2 and min(tuned.ms[name]) > 0 for name in tuned.ms)


def test_eigen_computes_what_the_compiler_was_asked_for() -> None:
    x, w = np.random.default_rng(0).standard_normal((2, 16, 64, 64), np.float32)
    lowered = jax.jit(lambda x, w: jnp.matmul(x[0], w[0])).lower(x, w)
    eigen = lowered.compile(product_compiler_options("eigen"))
    assert "ynn" not in eigen.as_text()
    np.testing.assert_allclose(eigen(x, w), x[0] @ w[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_tied_output_layer_is_kept_inputs_first(num_devices: int) -> None:
    before = weights(num_devices)
    placed = lay_out(before, "eigen")
    np.testing.assert_array_equal(placed["lm_head"], np.asarray(before["embed"]).T)
    expected = abstract(before, "eigen")["lm_head"]
    assert expected.shape == placed["lm_head"].shape
    assert expected.sharding.is_equivalent_to(placed["lm_head"].sharding, 2)
    hidden = np.random.default_rng(0).standard_normal((3, CONFIG.hidden_size), np.float32)
    np.testing.assert_allclose(
        unembed(placed, CONFIG, hidden), unembed(before, CONFIG, hidden), rtol=1e-5, atol=1e-5
    )
    assert "lm_head" not in lay_out(before)
