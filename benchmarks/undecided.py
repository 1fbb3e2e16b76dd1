"""How near a model is to saying another token, for answers that should be alike.

Programs of other sizes add a sum's products in another order, which moves logits by their
rounding. Two answers to one request may part where the model is undecided within that: where its
two likeliest tokens are as near, or a draw falls as near to the edge between two tokens. Nowhere
else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from octavo.engine.execution.sampling.sampler import random_words
from octavo.engine.sampling_params import SamplingParams
from octavo.models import decoder
from octavo.models.loading.load import load_model

TIE = 1e-3
"""Nats, or share of a draw. Logits are up to 35 and agree within 1e-3 between frameworks, as in
tests/engine/test_weight_variants.py; an edge of a draw moves by less than they do."""


class PlainModel:
    """A decoder over one sequence at a time, in float32: no cache, no batch and one program.

    Args:
        model: as for `load_model`; without sliding windows.
        length: most tokens of a sequence.
    """

    def __init__(self, model: str | Path, length: int) -> None:
        self._loaded, self._length = load_model(model, "float32"), length
        self._run = jax.jit(self._forward)

    def _forward(self, weights: Any, ids: jax.Array, last: jax.Array) -> jax.Array:
        config, positions = self._loaded.config, jnp.arange(self._length, dtype=jnp.int32)
        x = decoder.embed(weights, config, ids)
        caches = (None,) * len(config.own_caches())
        x, _ = decoder.run_layers(weights, config, x, positions, _attend, caches)
        return decoder.unembed(weights, config, x[last][None])[0]

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """[V], of what follows these tokens."""
        padded = np.zeros(self._length, np.int32)
        padded[: len(token_ids)] = token_ids
        last = np.int32(len(token_ids) - 1)
        return np.asarray(self._run(self._loaded.weights, padded, last), np.float64)

    def gap(self, token_ids: Sequence[int], params: SamplingParams, token_id: int) -> float:
        """How far the model is from saying this token after those: nats that the likeliest is above
        it, or by how much the share that was drawn misses it. 0 if it says it.

        Args:
            params: with a seed, and nothing but a temperature.
        """
        logits = self.logits(token_ids)
        if params.temperature == 0.0:
            return float(logits.max() - logits[token_id])
        assert params.seed is not None
        weights = np.exp((logits - logits.max()) / params.temperature)
        ends = np.cumsum(weights) / weights.sum()
        begin, end = (float(ends[at]) if at >= 0 else 0.0 for at in (token_id - 1, token_id))
        seed = jnp.asarray([[params.seed >> 32, params.seed & 0xFFFFFFFF]], jnp.uint32)
        share = float(random_words(seed, jnp.asarray([len(token_ids)]))[0]) / 2**32
        return max(0.0, begin - share, share - end)

    def parting(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        one: Sequence[int],
        other: Sequence[int],
    ) -> float:
        """How far the model is from saying both of two answers where they first part: 0 if they do
        not, infinite if one merely ends before the other. Below `TIE` it is undecided."""
        pairs = zip(one, other, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            return 0.0 if len(one) == len(other) else math.inf
        common = [*prompt, *one[:at]]
        return max(self.gap(common, params, answer[at]) for answer in (one, other))


def _attend(q: Any, k: Any, v: Any, cache: Any, attention: Any, sinks: Any) -> Any:
    """One sequence's attention over itself."""
    assert sinks is None
    assert attention.sliding_window is None
    group, place = q.shape[1] // k.shape[1], jnp.arange(q.shape[0])
    keys, values = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, keys, precision="highest") * attention.scale
    odds = jax.nn.softmax(jnp.where(place[:, None] >= place, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", odds, values, precision="highest"), cache
