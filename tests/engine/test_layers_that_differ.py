"""A model whose layers differ in everything that a layer may differ in, served as any other.

No family of these layers exists: the spec below is all that defines it. What the engine says is
compared with the plainest decoder there is, in NumPy and float64, over whole sequences.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.state import kv_bytes_per_token
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.policies import POLICIES
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.latent_attention import LatentAttention
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import LayerNorm, Norms, RMSNorm
from octavo.models.cache_spec import LatentCache, PagedKVCache, SharedCache
from octavo.models.config import ModelConfig
from octavo.models.rope import Rope, Temperature
from tests.engine.alone import draw_weights, save_model, tokens_of

VOCAB, HIDDEN, NUM_TOKENS = 272, 32, 24
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
NORM = RMSNorm(eps=1e-5)
BEFORE, AFTER, BOTH = (
    Norms(norm=NORM, before=before, after=after)
    for before, after in ((True, False), (False, True), (True, True))
)
WINDOW = Attention(
    num_heads=4, num_kv_heads=2, head_dim=16, rope=Rope(theta=500.0), sliding_window=7,
    qk_norm=NORM, logit_softcap=9.0, sinks=True,
)  # fmt: skip
WHOLE = Attention(num_heads=8, num_kv_heads=4, head_dim=8, rope=Rope(), qkv_bias=True, scale=0.5)
# Its one KV head has copies where two devices share it.
PARTLY_ROTATED = Attention(
    num_heads=4, num_kv_heads=1, head_dim=16, qk_norm=NORM, qk_norm_whole=True,
    rope=Rope(theta=300.0, fraction=0.5, amplitude=1.2, temperature=Temperature(beta=0.4, span=8)),
)  # fmt: skip
LATENT = LatentAttention(
    num_heads=4, latent_size=20, nope_size=12, rope_size=8, value_size=10, query_size=18,
    rope=Rope(theta=400.0, pairs=True, temperature=Temperature(beta=0.3, span=16)), scale=0.25,
)  # fmt: skip
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    layers=(
        LayerSpec(mixer=WHOLE, feed_forward=MLP(intermediate_size=64), norms=BEFORE),
        LayerSpec(
            mixer=WINDOW,
            feed_forward=MLP(intermediate_size=48, activation="gelu_tanh"),
            norms=BOTH,
        ),
        LayerSpec(
            mixer=dataclasses.replace(WINDOW, num_heads=2, shares_cache=True, out_bias=True),
            feed_forward=MLP(intermediate_size=64, bias=True),
            norms=BEFORE,
            cache_of=1,
        ),
        LayerSpec(
            mixer=Attention(num_heads=2, num_kv_heads=1, head_dim=24, rope=None),
            feed_forward=MLP(intermediate_size=64),
            norms=AFTER,
        ),
        LayerSpec(
            mixer=dataclasses.replace(WHOLE, shares_cache=True, qkv_bias=False),
            feed_forward=MLP(intermediate_size=64),
            norms=BEFORE,
            cache_of=0,
        ),
        LayerSpec(
            mixer=PARTLY_ROTATED,
            feed_forward=MLP(intermediate_size=40, activation="gelu_tanh", bias=True, gated=False),
            norms=Norms(norm=LayerNorm(bias=True), parallel=True, residual_scale=0.7),
        ),
        LayerSpec(mixer=LATENT, feed_forward=MLP(intermediate_size=48), norms=BEFORE),
    ),
    final_norm=NORM,
    logit_scale=0.6,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_ids=(1,),
)


def make_weights() -> Any:
    """Random weights whose greedy tokens neither repeat at once nor come near a tie."""
    weights = draw_weights(CONFIG, scale=2.0)
    for layer in weights["layers"]:
        if "sinks" in layer:
            layer["sinks"] *= 10
    return {**weights, "embed": weights["embed"] * 10}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    path = tmp_path_factory.mktemp("differing") / "model"
    return save_model(path, CONFIG, make_weights(), tiny_model)


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(16, VOCAB) for _ in range(length)] for length in (3, 90, 17, 40)]


# The reference: one sequence, all of it at once, one head after another.


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def layer_normed(x: np.ndarray, w: Any, name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w[name] + w[f"{name}_bias"]


def rotated(heads: np.ndarray, rope: Rope | None) -> np.ndarray:
    """[T, D], by position; of the two halves, the first dimensions."""
    if rope is None:
        return heads
    length, size = heads.shape
    num_rotated = int(size * rope.fraction)
    frequencies = rope.theta ** (-np.arange(0, num_rotated, 2) / num_rotated)
    turned = np.arange(length)[:, None] * frequencies
    cos, sin = rope.amplitude * np.cos(turned), rope.amplitude * np.sin(turned)
    out, half, count = heads.copy(), size // 2, num_rotated // 2
    first, second = heads[:, :count], heads[:, half : half + count]
    out[:, :count] = first * cos - second * sin
    out[:, half : half + count] = second * cos + first * sin
    return out


def warmed(queries: np.ndarray, rope: Rope | None) -> np.ndarray:
    if rope is None or rope.temperature is None:
        return queries
    spans = np.arange(len(queries)) // rope.temperature.span
    return queries * (1 + rope.temperature.beta * np.log(1 + spans))[:, None]


def attention(a: Attention, w: Any, x: np.ndarray, kept: list[Any] | None) -> tuple[Any, list[Any]]:
    """Each KV head in turn; `kept` are keys and values of the layer whose cache is read."""
    group, own, out = a.num_heads // a.num_kv_heads, [], np.zeros_like(x)
    behind = np.arange(len(x))[:, None] - np.arange(len(x))[None]
    seen = (behind >= 0) & (behind < (a.sliding_window or len(x)))
    for head in range(a.num_kv_heads):
        rows = np.einsum("te,egd->gtd", x, w["wqkv"][:, head])
        if a.qkv_bias:
            rows = rows + w["bqkv"][head][:, None]
        if a.qk_norm_whole:  # of a layer with one KV head
            whole = np.concatenate(rows[:group], -1)
            rows[:group] = np.split(normed(whole, w["q_norm"]), group, -1)
            rows[group] = normed(rows[group], w["k_norm"])
        norms_heads = a.qk_norm is not None and not a.qk_norm_whole
        if kept is None:
            key = normed(rows[group], w["k_norm"]) if norms_heads else rows[group]
            own.append((rotated(key, a.rope), rows[group + 1]))
        keys, values = own[head] if kept is None else kept[head]
        for query in range(group):
            q = normed(rows[query], w["q_norm"]) if norms_heads else rows[query]
            scores = warmed(rotated(q, a.rope), a.rope) @ keys.T * a.scale
            if a.logit_softcap:
                scores = a.logit_softcap * np.tanh(scores / a.logit_softcap)
            scores = np.where(seen, scores, -np.inf)
            peak = scores.max(-1, keepdims=True)
            odds = np.exp(scores - peak)
            sink = np.exp(w["sinks"][head, query] - peak) if a.sinks else 0
            mixed = (odds / (odds.sum(-1, keepdims=True) + sink)) @ values
            out = out + mixed @ w["wo"][head, query]
    return out + (w["bo"] if a.out_bias else 0), own


def latent_attention(a: LatentAttention, w: Any, x: np.ndarray) -> np.ndarray:
    """Each head in turn, its keys and values made of all latents."""
    latents, shared = np.split(x @ w["w_latent"], [a.latent_size], -1)
    latents = latents / np.sqrt((latents**2).mean(-1, keepdims=True) + 1e-6) * w["latent_norm"]
    inner = x @ w["w_query_down"]
    inner = inner / np.sqrt((inner**2).mean(-1, keepdims=True) + 1e-6) * w["query_norm"]
    seen = np.arange(len(x))[:, None] >= np.arange(len(x))[None]
    out = np.zeros_like(x)
    for head in range(a.num_heads):
        q_nope, q_rope = np.split(inner @ w["w_query"][:, head, 0], [a.nope_size], -1)
        q = np.concatenate([q_nope, rotated(q_rope, a.rope)], -1)
        keys = np.concatenate([latents @ w["w_uk"][head].T, rotated(shared, a.rope)], -1)
        scores = np.where(seen, warmed(q, a.rope) @ keys.T * a.scale, -np.inf)
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        odds = odds / odds.sum(-1, keepdims=True)
        out = out + odds @ (latents @ w["w_uv"][head]) @ w["wo"][head, 0]
    return out


def mlp(m: MLP, w: Any, x: np.ndarray) -> np.ndarray:
    if m.gated:
        gate, up = np.einsum("te,ecf->ctf", x, w["w_gate_up"])
        if m.bias:
            gate, up = gate + w["b_gate_up"][0], up + w["b_gate_up"][1]
    else:
        gate, up = x @ w["w_up"] + w["b_up"], 1
    if m.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (gate * up) @ w["w_down"] + (w["b_down"] if m.bias else 0)


def next_logits(w: Any, ids: list[int]) -> np.ndarray:
    x, kept = w["embed"][ids], []
    for spec, layer in zip(CONFIG.layers, w["layers"], strict=True):
        before, after = spec.norms.before, spec.norms.after
        if spec.norms.parallel:
            taken = layer_normed(x, layer, "attn_norm")
            out, own = attention(spec.mixer, layer, taken, None)
            x = x + spec.norms.residual_scale * (out + mlp(spec.feed_forward, layer, taken))
            kept.append(own)
            continue
        shared = None if spec.cache_of is None else kept[spec.cache_of]
        taken = normed(x, layer["attn_norm"]) if before else x
        if isinstance(spec.mixer, LatentAttention):
            out, own = latent_attention(spec.mixer, layer, taken), []
        else:
            out, own = attention(spec.mixer, layer, taken, shared)
        x = x + (normed(out, layer["post_attn_norm"]) if after else out)
        kept.append(own)
        out = mlp(spec.feed_forward, layer, normed(x, layer["mlp_norm"]) if before else x)
        x = x + (normed(out, layer["post_mlp_norm"]) if after else out)
    return normed(x[-1], w["final_norm"]) @ w["lm_head"] * CONFIG.logit_scale


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), make_weights())
    texts = []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            logits = next_logits(weights, ids)
            second, first = np.sort(logits)[-2:]
            assert first - second > 1e-4, "a tie proves nothing"
            ids.append(int(logits.argmax()))
        texts.append(ids[len(prompt) :])
    assert all(len(set(text)) > NUM_TOKENS // 3 for text in texts), "a loop proves little"
    return texts


def generated(llm: Any) -> list[list[int]]:
    return tokens_of(llm, prompts(), PARAMS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warm_up": "full"},
        {"max_num_batched_tokens": 16, "num_decode_steps": 1},
        {"tensor_parallel_size": 2},
        {"attention_backend": "reference"},
    ],
    ids=["coarse", "full", "small chunks", "two devices", "reference"],
)
def test_the_engine_says_what_a_dense_decoder_says(
    make_llm: Callable[..., Any],
    checkpoint: Path,
    expected: list[list[int]],
    changes: dict[str, Any],
) -> None:
    llm = make_llm(model=str(checkpoint), **changes)
    assert generated(llm) == expected
    assert generated(llm) == expected  # whose beginnings come from the prefix cache


def test_pages_of_differing_pools_go_to_the_host_and_come_back(
    make_llm: Callable[..., Any],
    checkpoint: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swapping(parameters: Any) -> Any:
        whole = POLICIES["fcfs"](parameters)
        return dataclasses.replace(whole, swap_or_recompute=lambda snapshot, victim: True)

    monkeypatch.setitem(POLICIES, "fcfs-forced", swapping)
    llm = make_llm(
        model=str(checkpoint),
        num_kv_pages=24,
        host_kv_memory_bytes=4 << 20,
        scheduling_policy="fcfs-forced",
    )
    assert generated(llm) == expected
    assert llm.engine.scheduler.load().num_swaps > 0


def test_each_own_cache_has_a_pool_of_its_shape_and_a_shared_one_has_none(
    make_llm: Callable[..., Any], checkpoint: Path
) -> None:
    assert [kept for (kept,) in CONFIG.caches()] == [
        PagedKVCache(num_kv_heads=4, key_size=8, value_size=8),
        PagedKVCache(num_kv_heads=2, key_size=16, value_size=16, window=7),
        SharedCache(1),
        PagedKVCache(num_kv_heads=1, key_size=24, value_size=24),
        SharedCache(0),
        PagedKVCache(num_kv_heads=1, key_size=16, value_size=16),
        LatentCache(key_size=28, value_size=20),
    ]
    assert CONFIG.cache_places() == ((0,), (1,), (1,), (2,), (0,), (3,), (4,))
    llm = make_llm(model=str(checkpoint))
    pools = llm.engine.executor._state.kv
    heads = [(pool.num_kv_heads, pool.head_dim) for pool in pools]
    assert heads == [(4, 8), (2, 16), (1, 24), (1, 16), (1, 28)]
    numbers = 2 * (4 * 8 + 2 * 16 + 1 * 24 + 1 * 16) + 28  # values are a view of latents
    assert kv_bytes_per_token(CONFIG, jnp.dtype("float32")) == 4 * numbers
    held = sum(pool.pages.nbytes for pool in pools)
    assert held == 4 * numbers * llm.engine.limits.page_size * llm.engine.limits.num_pages
