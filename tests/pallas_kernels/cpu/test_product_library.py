"""Which library computes a CPU's products is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import multiplies_bfloat16, product_compiler_options
from octavo.pallas_kernels.cpu import product_library
from octavo.pallas_kernels.cpu.eigen_linear import EigenWeight, eigen_linear
from octavo.pallas_kernels.cpu.product_library import (
    choose_block_quantized_rows,
    choose_bounded_argmax,
    choose_int8_split,
    choose_product_library,
)
from octavo.pallas_kernels.cpu.tune_products import ModelSize, choose, faster_between, tune_products

F32 = jnp.dtype("float32")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes that a library is the faster one here into the only folder of tables."""
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "none")
    tuning.forget_tables()

    def write(library: str, *, device: str | None = None, more_cores: int = 0, **more: Any) -> Path:
        entry = {"dtype": "float32", "num_cores": tuning.num_cores() + more_cores, **more}
        table = {"device": device or tuning.tuning_device(), "date": "2026-11-22"}
        path = tmp_path / "table.json"
        tuning.write_table(path, table, [], [{**entry, "library": library}])
        return path

    yield write
    tuning.forget_tables()


def weights(*dtypes: str) -> Any:
    return [jnp.zeros((2, 2), dtype) for dtype in ("float32", *dtypes)]


def test_what_was_measured_is_taken(measured: Callable[..., Path]) -> None:
    assert choose_product_library(weights(), F32) == "ynnpack"
    measured("eigen")
    assert choose_product_library(weights(), F32) == "eigen"


def test_a_table_for_all_generations_of_a_cpu_is_taken(
    measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "tuning_device", lambda: "cpu X, family 6 model 1, L2 8 KiB")
    measured("eigen", device="cpu X, L2 8 KiB")
    assert choose_product_library(weights(), F32) == "eigen"
    measured("eigen", device="cpu X, family 6 model 2, L2 8 KiB")
    assert choose_product_library(weights(), F32) == "ynnpack"


@pytest.mark.parametrize("change", [{"device": "another"}, {"more_cores": 1}])
def test_another_machine_says_nothing(measured: Callable[..., Path], change: Any) -> None:
    measured("eigen", **change)
    assert choose_product_library(weights(), F32) == "ynnpack"


def test_only_float32_throughout_was_measured(measured: Callable[..., Path]) -> None:
    measured("eigen")
    assert choose_product_library(weights("int8"), F32) == "ynnpack"
    assert choose_product_library(weights("bfloat16"), F32) == "ynnpack"
    assert choose_product_library(weights(), jnp.int8) == "ynnpack"


def test_weights_are_split_where_that_was_faster(measured: Callable[..., Path]) -> None:
    assert choose_int8_split(weights()) is None
    measured("eigen")
    assert choose_int8_split(weights()) is None
    measured("eigen", int8_split=[8, 32])
    assert choose_int8_split(weights()) == (8, 32)
    assert choose_int8_split(weights("bfloat16")) is None
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    whole = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert choose_int8_split(jax.device_put(weights(), whole)) is None


def test_logits_are_bounded_where_that_was_faster(
    measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_library, "multiplies_bfloat16", lambda: True)
    assert choose_bounded_argmax(weights()) is None
    measured("eigen", bounded_argmax=[8, 32])
    assert choose_bounded_argmax(weights()) == (8, 32)
    assert choose_bounded_argmax(weights("bfloat16")) is None
    monkeypatch.setattr(product_library, "multiplies_bfloat16", lambda: False)
    assert choose_bounded_argmax(weights()) is None


def test_names_of_earlier_tables_are_read(
    measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_library, "multiplies_bfloat16", lambda: True)
    measured("eigen", sliced=[8, 32], screened=[4, 16], packed=24)
    assert choose_int8_split(weights()) == (8, 32)
    assert choose_bounded_argmax(weights()) == (4, 16)
    assert choose_block_quantized_rows(weights()) == 24
    measured("eigen", sliced=[8, 4])
    with pytest.raises(InvalidConfigError, match=r"sliced = \[8, 4\] in products"):
        choose_int8_split(weights())


@pytest.mark.parametrize("name", ["int8_split", "bounded_argmax"])
@pytest.mark.parametrize("span", [8, [8], [8, 4], [0, 4], ["8", 16]])
def test_spans_that_cannot_be_are_refused(
    measured: Callable[..., Path], name: str, span: Any
) -> None:
    measured("eigen", **{name: span})
    with pytest.raises(InvalidConfigError, match=rf"{name} = .* in products: want \[least, most\]"):
        choose_int8_split(weights())


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


@pytest.mark.parametrize(
    ("ms", "found"),
    [
        ([8, 8, 8, 8], (8, 64)),
        ([10, 8, 8, 11], (16, 32)),
        ([8, 10, 8, 8], (32, 64)),
        ([8, 8, 9.5, 8], (8, 16)),
        ([11, 12, 11, 10], None),
    ],
)
def test_splitting_pays_for_neighbouring_sizes(ms: list[float], found: tuple[int, int]) -> None:
    assert faster_between((8, 16, 32, 64), ms, [10, 10, 10, 10], 0.1) == found


SIZE = ModelSize(
    hidden_size=32, intermediate_size=64, num_layers=8, vocab_size=300, can_bound_logits=True
)


def test_both_libraries_are_measured_split_weights_and_bounds() -> None:
    tuned = tune_products(SIZE, rows=(2, 4), rounds=1)
    layers = {"ynnpack", "eigen", "eigen_turned", "int8_split", "block_quantized"}
    outputs = {"ynnpack_output", "eigen_output", "bounded_argmax"}
    assert tuned.ms.keys() == layers | outputs
    entry = tuned.entry()
    for name in ("int8_split", "bounded_argmax"):
        assert entry[name] in (None, [2, 2], [2, 4], [4, 4])
    assert entry["rows"] == [2, 4]
    assert entry["block_quantized"] in (1, 2, 4)
    assert all(len(tuned.ms[name]) == 2 and min(tuned.ms[name]) > 0 for name in tuned.ms)


def test_without_bounds_none_are_measured() -> None:
    tuned = tune_products(replace(SIZE, can_bound_logits=False), rows=(2,), rounds=1)
    assert "bounded_argmax" not in tuned.ms
    assert tuned.bounded_argmax is None


def test_split_weights_and_bounds_are_held_to_whole_steps() -> None:
    ms: dict[str, tuple[float, ...]] = {
        "ynnpack": (13, 13), "eigen": (10, 10), "eigen_turned": (11, 11), "int8_split": (8, 8),
        "ynnpack_output": (6, 6), "eigen_output": (5, 5), "bounded_argmax": (5.5, 2),
    }  # fmt: skip
    tuned = choose(SIZE, (8, 64), ms)
    # 15, with bounds 16.5 and 13; split 14 and, with bounds, 10: less than a tenth of 15.
    assert (tuned.library, tuned.bounded_argmax, tuned.int8_split) == ("eigen", (64, 64), (64, 64))
    # Three times the layers hide what turning costs, or what bounds gain.
    deep = choose(replace(SIZE, num_layers=24), (8, 64), ms)
    assert (deep.bounded_argmax, deep.int8_split) == (None, (8, 64))
    # YNNPACK's programs turn nothing.
    ynnpack = choose(SIZE, (8, 64), {**ms, "eigen": (13, 13), "int8_split": (14, 14)})
    assert (ynnpack.library, ynnpack.bounded_argmax, ynnpack.int8_split) == (
        "ynnpack",
        (64, 64),
        None,
    )
    no_bounds = {name: each for name, each in ms.items() if name != "bounded_argmax"}
    assert choose(SIZE, (8, 64), no_bounds).bounded_argmax is None
    # What splitting saves is held to what bounds have saved already.
    assert choose(SIZE, (8, 64), {**ms, "int8_split": (10, 10)}).int8_split is None


def test_eigen_computes_a_product_of_a_program_of_the_others() -> None:
    x, w = np.random.default_rng(0).standard_normal((2, 16, 64, 64), np.float32)
    near = w[1].astype(jnp.bfloat16)

    def both(x: Any, w: Any) -> Any:
        turned = eigen_linear(x.reshape(64, 8, 8), EigenWeight(weight=w.reshape(8, 8, 2, 32)), 2)
        exact = jax.lax.optimization_barrier(turned.reshape(64, 64))
        rough = jnp.matmul(x.astype(jnp.bfloat16), near, preferred_element_type=jnp.float32)
        return exact, rough

    program = jax.jit(both).lower(x[0], w[0]).compile()
    # Sums of 64 numbers in another order.
    np.testing.assert_allclose(program(x[0], w[0])[0], x[0] @ w[0], rtol=1e-5, atol=1e-5)
    text = program.as_text()
    fused = set(re.findall(r"calls=(%[\w.]+).*ynn_fusion", text))
    left = [part for part in text.split("\n\n") if part.strip().split(" ")[0] not in fused]
    products = re.findall(r"= (\w+)\[64,64\]\S* dot\(", "\n".join(left))
    assert products == ["f32"] if multiplies_bfloat16() else "f32" in products


def test_block_quantized_weights_are_read_by_as_many_rows_as_gain() -> None:
    ms: dict[str, tuple[float, ...]] = {
        "ynnpack": (9, 9, 9, 9), "eigen": (9, 9, 9, 9), "eigen_turned": (9, 9, 9, 9),
        "int8_split": (20, 20, 5, 20), "ynnpack_output": (2,) * 4, "eigen_output": (2,) * 4,
        "block_quantized": (10, 4, 6, 6),
    }  # fmt: skip
    rows = (1, 4, 8, 16)
    # One row always; of 8 slices are faster, and none beyond is asked.
    tuned = choose(SIZE, rows, ms)
    assert (tuned.int8_split, tuned.block_quantized) == ((8, 8), 4)
    assert choose(SIZE, rows, {**ms, "int8_split": (20,) * 4}).block_quantized == 16
    assert choose(SIZE, rows, {**ms, "block_quantized": (10, 9, 6, 6)}).block_quantized == 1
    without = {name: each for name, each in ms.items() if name != "block_quantized"}
    assert choose(SIZE, rows, without).block_quantized == 1


def test_how_many_rows_read_block_quantized_weights_is_measured(
    measured: Callable[..., Path],
) -> None:
    assert choose_block_quantized_rows(weights()) == 4
    measured("eigen")
    assert choose_block_quantized_rows(weights()) == 4
    measured("eigen", block_quantized=16)
    assert choose_block_quantized_rows(weights()) == 16
    measured("eigen", block_quantized=0)
    with pytest.raises(
        InvalidConfigError, match="block_quantized = 0 in products: want a number of rows"
    ):
        choose_block_quantized_rows(weights())


def test_eigen_computes_what_the_compiler_was_asked_for() -> None:
    x, w = np.random.default_rng(0).standard_normal((2, 16, 64, 64), np.float32)
    lowered = jax.jit(lambda x, w: jnp.matmul(x[0], w[0])).lower(x, w)
    eigen = lowered.compile(product_compiler_options("eigen"))
    assert "ynn" not in eigen.as_text()
    # Sums of 64 numbers in another order.
    np.testing.assert_allclose(eigen(x, w), x[0] @ w[0], rtol=1e-5, atol=1e-5)
