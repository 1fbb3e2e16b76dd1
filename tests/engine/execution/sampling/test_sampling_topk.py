"""Argmax and top-k by blocks, against NumPy's argmax and a stable sort."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.sampling.topk import BLOCK, argmax, blocked, sum_pair, top_k

WIDTHS = [1, 5, BLOCK, BLOCK + 1, 1000, 4096, 4099]


def rows_of(width: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(width)
    x = rng.normal(size=(6, width)).astype(np.float32)
    if kind == "ties":
        x = np.round(x) + np.float32(0.0)
    elif kind == "equal":
        x[:] = -3.0
    elif kind == "masked":
        x[rng.random(x.shape) < 0.95] = -np.inf
    return x


@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "masked"])
@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_is_numpys(width, kind):
    x = rows_of(width, kind)
    ids, values = argmax(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(ids), x.argmax(axis=-1))
    np.testing.assert_array_equal(np.asarray(values), x.max(axis=-1))


@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "masked"])
@pytest.mark.parametrize(
    ("width", "k"), [(5, 5), (1000, 3), (4099, 1), (4099, 15), (4099, 20), (9000, 20)]
)
def test_top_k_is_a_stable_descending_sorts(width, k, kind):
    x = rows_of(width, kind)
    values, ids = top_k(jnp.asarray(x), k)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    real = np.take_along_axis(x, order, axis=-1)
    np.testing.assert_array_equal(np.asarray(values), real)
    # Which of the forbidden tokens fill up a row that has too few others does not matter.
    some = np.isfinite(real)
    np.testing.assert_array_equal(np.asarray(ids)[some], order[some])
    assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < blocked(jnp.asarray(x), 0).size // 6)).all()


def test_more_entries_than_the_row_has_are_refused():
    with pytest.raises(ValueError, match="k = 6"):
        top_k(jnp.zeros((2, 5)), 6)


def test_two_sums_along_the_last_axis():
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    first, second = sum_pair(jnp.asarray(x), jnp.asarray(x * 2.0, jnp.float32))
    np.testing.assert_array_equal(np.asarray(first), x.sum(axis=-1))
    np.testing.assert_array_equal(np.asarray(second), x.sum(axis=-1) * 2.0)


@pytest.mark.parametrize("width", [32_000, 49_152, 128_256, 262_208])
@pytest.mark.parametrize("k", [20, 96])
def test_nothing_long_is_sorted(width: int, k: int) -> None:
    """XLA sorts more than 4,096 entries of many rows outside of a GPU's graphs."""
    row = jax.ShapeDtypeStruct((64, width), jnp.float32)
    program = jax.make_jaxpr(lambda x: top_k(x, k))(row)
    selected = [each.invars[0].aval.shape for each in _all(program.jaxpr, ("top_k", "sort"))]
    assert selected
    assert max(shape[-1] for shape in selected) <= 4096


def _all(jaxpr: Any, names: tuple[str, ...]) -> list[Any]:
    """Equations of these primitives, those of inner programs among them."""
    found = [each for each in jaxpr.eqns if each.primitive.name in names]
    for each in jaxpr.eqns:
        for inner in each.params.values():
            if hasattr(inner, "jaxpr"):
                found += _all(inner.jaxpr, names)
    return found
