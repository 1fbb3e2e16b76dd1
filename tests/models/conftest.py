"""Tiny models as configs, weights, files and logits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.models import decoder
from octavo.models.blocks.attention import LayerAttention
from octavo.models.blocks.state_rows import StateRows
from octavo.models.cache_groups import CachePlace
from octavo.models.cache_spec import LatentCache, RecurrentState
from octavo.models.config import ModelConfig
from octavo.models.families.table import config_from_hf
from octavo.models.loading.tensors import expected_shapes
from tests.scripts import load_script

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = json.loads((GOLDEN / "tiny_configs.json").read_text(encoding="utf-8"))


tiny_weights = load_script(GOLDEN / "tiny_weights.py")


@pytest.fixture(autouse=True)
def strict_dtypes():
    """No silent promotion between dtypes, nor between ranks, in model code."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(params=sorted(TINY))
def tiny_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TinyValues:
    """The tiny models' config.json files, by name."""

    def __call__(self, name: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(TINY[name]))
        return values

    def all(self) -> dict[str, dict[str, Any]]:
        return {name: self(name) for name in TINY}


@pytest.fixture
def tiny_values() -> TinyValues:
    """Name -> its config.json."""
    return TinyValues()


@pytest.fixture
def tiny_tensors() -> Callable[[str], dict[str, np.ndarray]]:
    """Name -> the tensors of its checkpoint."""

    def make(name: str) -> dict[str, np.ndarray]:
        config = config_from_hf(TINY[name])
        tensors: dict[str, np.ndarray] = tiny_weights.tensors(
            expected_shapes(config), config.final_norm.offset
        )
        return tensors

    return make


@pytest.fixture
def tiny_checkpoint(tmp_path: Path, tiny_tensors: Any) -> Callable[..., Path]:
    """Name (and tensors in place of its own) -> a Hugging Face directory."""

    def write(name: str, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        values = {**TINY[name], **changes}
        (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
        save_file(
            tiny_tensors(name) if tensors is None else tensors, directory / "model.safetensors"
        )
        return directory

    return write


@pytest.fixture
def tokens() -> np.ndarray:
    """[NUM_TOKENS] int32, within every tiny vocabulary."""
    ids: np.ndarray = tiny_weights.token_ids(96)
    return ids


@pytest.fixture(scope="session")
def golden_logits() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "logits.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="session")
def make_golden() -> ModuleType:
    """The script that made the golden logits; only where torch is installed."""
    pytest.importorskip("torch")
    return load_script(GOLDEN / "make_golden.py")


def dense_attention(
    positions: jax.Array, length: int
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]:
    """One sequence over a dense cache of `length` positions: the plainest attention there is."""

    def attend(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Any,
        attention: LayerAttention,
        sinks: Any,
    ) -> tuple[jax.Array, Any]:
        keys = cache[0] if k is None else cache[0].at[positions].set(k)
        if k is None:  # the cache is an earlier layer's
            values = cache[1]
        elif v is None:
            values, cache = keys[..., : attention.value_size], (keys,)
        else:
            values = cache[1].at[positions].set(v)
            cache = (keys, values)
        group = q.shape[1] // keys.shape[1]
        scores = jnp.einsum(
            "qhd,khd->hqk",
            q.astype(jnp.float32),
            jnp.repeat(keys, group, axis=1).astype(jnp.float32),
            precision="highest",
        )
        scores = scores * attention.scale
        if attention.logit_softcap is not None:
            scores = jnp.tanh(scores / attention.logit_softcap) * attention.logit_softcap
        distance = positions[:, None] - jnp.arange(length)[None, :]
        seen = distance >= 0
        if attention.sliding_window is not None:
            seen &= distance < attention.sliding_window
        if attention.attention_chunk is not None:
            chunk = attention.attention_chunk
            seen &= positions[:, None] // chunk == jnp.arange(length)[None, :] // chunk
        scores = jnp.where(seen[None], scores, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        out = jnp.einsum(
            "hqk,khd->qhd",
            weights,
            jnp.repeat(values, group, axis=1).astype(jnp.float32),
            precision="highest",
        )
        return out.astype(q.dtype), cache

    return attend


def one_row(positions: jax.Array) -> StateRows:
    """A step of one sequence, whose recurrent states lie in slot 0."""
    num_tokens = positions.shape[0]
    return StateRows(
        slot=jnp.zeros(1, jnp.int32),
        start=positions[:1],
        live=jnp.ones(1, bool),
        cu_q_lens=jnp.asarray([0, num_tokens], jnp.int32),
        token_row=jnp.zeros(num_tokens, jnp.int32),
        num_decode_rows=jnp.int32(num_tokens == 1),
        num_rows=jnp.int32(1),
        decode_only=num_tokens == 1,
    )


def make_step(config: ModelConfig, length: int) -> Callable[..., Any]:
    """A jitted (weights, token ids, positions, caches) -> (logits of all tokens, caches)."""

    @jax.jit
    def step(weights: Any, ids: jax.Array, positions: jax.Array, caches: Any) -> Any:
        x = decoder.embed(weights, config, ids)
        attend: list[Any] = [dense_attention(positions, length), one_row(positions)]
        places = [
            CachePlace(index, int(isinstance(cache, RecurrentState)))
            for index, cache in enumerate(config.own_caches())
        ]
        inputs = decoder.layer_inputs(weights, config, ids, x)
        x, caches = decoder.run_layers(
            weights, config, x, positions, attend, caches, places, layer_inputs=inputs
        )
        return decoder.unembed(weights, config, x), caches

    return step


@pytest.fixture
def run_model() -> Callable[..., np.ndarray]:
    """(config, weights, tokens, prompt length) -> logits at every position, [T, V].

    The prompt is one call; each later token is a call of its own over the cache.
    """

    def run(config: ModelConfig, weights: Any, ids: Any, prompt_length: int) -> np.ndarray:
        length = len(ids)
        dtype = weights["embed"].dtype

        def empty(cache: Any) -> tuple[jax.Array, ...]:
            if isinstance(cache, RecurrentState):
                # What another sequence left there.
                return tuple(jnp.ones((1, *array.shape), jnp.float32) for array in cache.arrays)
            num_arrays = 1 if isinstance(cache, LatentCache) else 2
            return (jnp.zeros((length, cache.num_kv_heads, cache.key_size), dtype),) * num_arrays

        caches: Any = tuple(map(empty, config.own_caches()))
        step = make_step(config, length)
        edges = [0, prompt_length, *range(prompt_length + 1, length + 1)]
        rows = []
        for start, stop in itertools.pairwise(edges):
            positions = jnp.arange(start, stop, dtype=jnp.int32)
            logits, caches = step(
                weights, jnp.asarray(ids[start:stop], jnp.int32), positions, caches
            )
            rows.append(np.asarray(logits))
        return np.concatenate(rows)

    return run
