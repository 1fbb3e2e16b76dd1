"""Hidden states computed plainly: the whole text at once, without pages, chunks or a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.models import decoder
from octavo.models.blocks.attention import LayerAttention
from octavo.models.loading.load import load_model
from tests.scripts import load_script

LENGTH = 512
"""Tokens of the plain computation: shorter texts are padded behind, where a causal model does not
look."""
Hidden = Callable[[list[int]], NDArray[np.float64]]


def _dense(q: Any, k: Any, v: Any, cache: Any, attention: LayerAttention, sinks: Any) -> Any:
    """One sequence's attention over itself: the plainest there is."""
    assert sinks is None
    group, place = q.shape[1] // k.shape[1], jnp.arange(q.shape[0])
    keys, values = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, keys, precision="highest") * attention.scale
    if attention.logit_softcap is not None:
        scores = jnp.tanh(scores / attention.logit_softcap) * attention.logit_softcap
    distance = place[:, None] - place[None, :]
    seen = distance >= 0
    if attention.sliding_window is not None:
        seen &= distance < attention.sliding_window
    weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, values, precision="highest"), cache


def plain_hidden_states(model: Path) -> Hidden:
    """Token ids -> float64[T, E], what the final norm returns of each."""
    loaded = load_model(model, "float32")
    config = loaded.config

    @jax.jit
    def run(weights: Any, ids: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)
        caches = (None,) * len(config.own_caches())
        x = decoder.embed(weights, config, ids)
        x, _ = decoder.run_layers(weights, config, x, positions, _dense, caches)
        return config.final_norm(x, weights, "final_norm")

    def hidden(token_ids: list[int]) -> NDArray[np.float64]:
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(run(loaded.weights, padded), np.float64)[: len(token_ids)]

    return hidden


def pool(hidden: NDArray[np.float64], pooling: str, normalize: bool = True) -> NDArray[np.float64]:
    """The vector of one text's hidden states."""
    vector = {"last": hidden[-1], "mean": hidden.mean(axis=0), "cls": hidden[0]}[pooling]
    found: NDArray[np.float64] = vector / np.linalg.norm(vector) if normalize else vector
    return found


@pytest.fixture(scope="session")
def plain() -> Callable[[Path], Hidden]:
    """`plain_hidden_states`."""
    return plain_hidden_states


@pytest.fixture(scope="session")
def pooled() -> Callable[..., NDArray[np.float64]]:
    """`pool`."""
    return pool


GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def family_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Path]:
    """Writes a tiny checkpoint of a family (a name in tiny_configs.json), with a byte tokenizer."""
    from safetensors.numpy import save_file

    from octavo.models.families.table import config_from_hf
    from octavo.models.loading.tensors import expected_shapes

    weights = load_script(GOLDEN / "tiny_weights.py")
    configs = json.loads((GOLDEN / "tiny_configs.json").read_text(encoding="utf-8"))

    def write(name: str, **changes: Any) -> Path:
        directory = tmp_path_factory.mktemp(name)
        values = configs[name] | {"vocab_size": 272, "max_position_embeddings": LENGTH} | changes
        config = config_from_hf(values)
        tensors = weights.tensors(expected_shapes(config), config.final_norm.offset)
        (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
        save_file(tensors, directory / "model.safetensors")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (directory / file).write_bytes((tiny_model / file).read_bytes())
        return directory

    return write
