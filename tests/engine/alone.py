"""Small models of any layers, and what each of a few requests says of them by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from octavo.engine.sampling_params import SamplingParams
from octavo.models.config import ModelConfig
from octavo.models.loading import orbax
from octavo.models.parameters import declare, is_spec
from octavo.sharding.mesh import make_mesh

ALONE: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 256,
    "num_decode_steps": 1,
    "overlap": False,
    "enable_prefix_caching": False,
    "attention_backend": "reference",
    "warm_up": "coarse",
}
"""Settings that serve each prompt by itself, whole, one step a dispatch, nothing overlapped."""


def draw_weights(config: ModelConfig, scale: float = 1.5) -> Any:
    """Random weights whose greedy tokens neither repeat at once nor come near a tie."""
    rng = np.random.default_rng(3)

    def values(spec: Any) -> np.ndarray:
        normal = rng.standard_normal(spec.shape)
        if spec.num_inputs is None:
            centre = 1.0 if spec.init == "ones" else 0.0
            return np.asarray(centre + 0.3 * normal, spec.dtype)
        inputs = spec.shape[spec.num_stacked : spec.num_stacked + spec.num_inputs]
        return np.asarray(scale * normal / math.sqrt(math.prod(inputs)), spec.dtype)

    return jax.tree.map(values, declare(config, jnp.dtype("float32")), is_leaf=is_spec)


def save_model(path: Path, config: ModelConfig, weights: Any, tiny_model: Path) -> Path:
    """Writes a model with the tokenizer of the tiny one; returns the path."""
    weights = jax.device_put(weights, NamedSharding(make_mesh(1), PartitionSpec()))
    orbax.save(path, config, weights, jnp.dtype("float32"), tiny_model)
    return path


def tokens_of(llm: Any, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """What an engine says to each prompt, all of them at once."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def one_by_one(
    model: Path, prompts: list[list[int]], params: SamplingParams, **changes: Any
) -> list[list[int]]:
    """What it says to each prompt by itself."""
    from octavo import LLM

    llm = LLM(str(model), progress=False, **ALONE | changes)
    found = [tokens_of(llm, [prompt], params)[0] for prompt in prompts]
    llm.close()
    return found


def check_variety(texts: list[list[int]]) -> None:
    """Asserts that different prompts have different texts, most of which say more than one thing:
    others prove little."""
    assert len({tuple(ids) for ids in texts}) == len(texts)
    assert sum(len(set(ids)) > 5 for ids in texts) > len(texts) * 2 / 3
