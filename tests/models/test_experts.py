"""Routers, gates and what experts declare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.blocks.experts import Experts, Gate
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import RMSNorm
from octavo.models.blocks.router import Router
from octavo.models.parameters import flatten, num_parameters

HIDDEN, TOKENS = 16, 12


def router_weights(router: Router, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    number = router.num_experts
    return {
        "router": rng.standard_normal((HIDDEN, number)).astype(np.float32),
        "router_bias": rng.standard_normal(number).astype(np.float32),
        "router_correction": rng.standard_normal(number).astype(np.float32),
        "router_expert_scale": rng.standard_normal(number).astype(np.float32),
        "router_input_scale": rng.standard_normal(HIDDEN).astype(np.float32),
    }


def plain_choice(
    router: Router, weights: dict[str, np.ndarray], x: np.ndarray
) -> tuple[list[list[int]], list[list[float]]]:
    """Token by token, in float64."""
    chosen, shares = [], []
    for row in x.astype(np.float64):
        if router.input_eps is not None:
            row = row / np.sqrt((row**2).mean() + router.input_eps) / np.sqrt(HIDDEN)
            row = row * weights["router_input_scale"]
        logits = row @ weights["router"] + (weights["router_bias"] if router.bias else 0)
        if router.scores == "sparse_mixer":
            one_by_one = mixed_sparsely(router, logits)
            chosen.append([expert for expert, _ in one_by_one])
            shares.append([share for _, share in one_by_one])
            continue
        odds = np.exp(logits - logits.max())
        scores = odds / odds.sum() if router.scores == "softmax" else 1 / (1 + np.exp(-logits))
        ranked = scores + (weights["router_correction"] if router.corrects else 0)
        size = router.num_experts // router.num_groups
        if router.num_groups > 1:
            groups = [
                sorted(ranked[g * size : (g + 1) * size])[-2:] for g in range(router.num_groups)
            ]
            best = sorted(range(router.num_groups), key=lambda g: -sum(groups[g]))
            allowed = best[: router.num_chosen_groups]
        else:
            allowed = [0]
        experts = [e for e in range(router.num_experts) if e // size in allowed]
        experts = sorted(experts, key=lambda e: -ranked[e])[: router.num_chosen]
        total = sum(scores[e] for e in experts) if router.normalizes else 1.0
        chosen.append(experts)
        of_expert = weights["router_expert_scale"] if router.expert_scales else np.ones(12)
        shares.append([float(scores[e] / total * router.scale * of_expert[e]) for e in experts])
    return chosen, shares


def mixed_sparsely(router: Router, logits: np.ndarray) -> list[tuple[int, float]]:
    """Experts and shares of one token."""
    left, found = dict(enumerate(logits)), []
    for _ in range(router.num_chosen):
        best = max(left, key=lambda e: left[e])
        near = [
            e for e, logit in left.items()
            if (left[best] - logit) / max(abs(logit), left[best]) <= 2 * router.jitter
        ]  # fmt: skip
        odds = {e: np.exp(left[e] - left[best]) for e in near}
        found.append((best, float(odds[best] / sum(odds.values()))))
        del left[best]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalizes": False},
        {"bias": True, "num_chosen": 1},
        {"scores": "sigmoid", "corrects": True, "scale": 2.5},
        {"scores": "sigmoid", "corrects": True, "num_groups": 4, "num_chosen_groups": 2},
        {"corrects": True, "normalizes": False, "num_groups": 2, "num_chosen_groups": 1},
        {"num_chosen": 12},
        {"input_eps": 1e-3, "expert_scales": True},
        {"scores": "sparse_mixer", "normalizes": False, "jitter": 0.3},
        {"scores": "sparse_mixer", "normalizes": False, "jitter": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_router_chooses_as_its_numbers_say(changes: dict[str, Any], dtype: str) -> None:
    router = Router(**{"num_experts": 12, "num_chosen": 3} | changes)
    weights = router_weights(router)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)), dtype)
    chosen, share = jax.jit(router.choose)(weights, x)
    assert share.dtype == jnp.float32
    want, shares = plain_choice(router, weights, np.asarray(x, np.float32))
    np.testing.assert_array_equal(chosen, want)
    np.testing.assert_allclose(share, shares, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, "num_experts = 0 is not allowed: an integer from 1 to 4096"),
        ({"num_experts": 5000}, "num_experts = 5000"),
        (
            {"num_chosen": 9},
            r"num_chosen = 9 is not allowed: an integer from 1 to num_experts \(8\)",
        ),
        ({"num_chosen": True}, "num_chosen = True"),
        ({"num_groups": 3}, r"num_groups = 3 is not allowed: a divisor of num_experts \(8\)"),
        ({"num_groups": 8, "num_chosen_groups": 4}, "num_groups = 8 is not allowed: 2 experts a"),
        ({"num_groups": 2, "num_chosen_groups": 3}, "num_chosen_groups = 3"),
        ({"num_groups": 4, "num_chosen_groups": 1}, "num_chosen = 3 is not allowed: at most 2"),
        ({"scale": 0.0}, "routed scale = 0.0"),
        ({"corrects": 1}, "corrects = 1 is not allowed: true or false"),
        ({"scores": "sparse_mixer"}, "scores = 'sparse_mixer' is not allowed"),
        ({"jitter": 2.0}, "router jitter = 2.0"),
        ({"input_eps": 0.0}, "router input_eps = 0.0"),
    ],
)
def test_a_router_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        Router(**{"num_experts": 8, "num_chosen": 3} | changes)


def test_scores_of_another_kind_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="scores = 'tanh' is not supported"):
        Router(num_experts=8, num_chosen=3, scores="tanh")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 0}, "intermediate_size = 0"),
        ({"gate_limit": -1.0}, "gate_limit = -1.0"),
        ({"shared_size": 0}, "shared_size = 0"),
        ({"shared_gate": True}, "shared_gate = true is not allowed: false, without shared_size"),
        ({"apart": RMSNorm()}, "apart = a norm is not allowed: none, without shared_size"),
        ({"gated": False}, "gated = false is not allowed: false with activation = 'relu2'"),
        ({"activation": "relu2"}, "gated = true is not allowed"),
        ({"activation": "relu2", "gated": False, "bias": True}, "gated = false is not allowed"),
        ({"names": "granite", "bias": True}, "bias = true is not allowed: false, with names"),
        ({"names": "nobody"}, "names = 'nobody' is not allowed: "),
    ],
)
def test_experts_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    router = Router(num_experts=8, num_chosen=3)
    with pytest.raises(ModelLoadError, match=words):
        Experts(**{"router": router, "intermediate_size": 24} | changes)


def test_a_clamped_gate_is_what_its_formula_says() -> None:
    gate = np.linspace(-20, 20, 81, dtype=np.float32)[:, None] * np.ones((1, 81), np.float32)
    up = np.ascontiguousarray(gate.T)
    held = np.minimum(gate, 7.0).astype(np.float64)
    want = held / (1 + np.exp(-1.702 * held)) * (np.clip(up, -7.0, 7.0) + 1)
    np.testing.assert_allclose(Gate("silu", 7.0)(gate, up), want, rtol=1e-5, atol=1e-6)


def test_experts_count_what_they_hold_and_what_a_token_is_multiplied_by() -> None:
    experts = Experts(
        router=Router(num_experts=8, num_chosen=3),
        intermediate_size=24,
        shared_size=40,
        shared_gate=True,
    )
    held = num_parameters(flatten(experts.parameters(HIDDEN, jnp.dtype("float32"))))
    gate_of_shared = HIDDEN
    active, idle = experts.num_weights(HIDDEN), experts.num_idle_weights(HIDDEN)
    assert active + idle == held - gate_of_shared
    assert idle == 5 * 3 * HIDDEN * 24


def test_one_expert_that_all_choose_is_an_mlp() -> None:
    rng = np.random.default_rng(0)
    one = Experts(router=Router(num_experts=1, num_chosen=1), intermediate_size=24)
    two, down = rng.standard_normal((HIDDEN, 2, 24)), rng.standard_normal((24, HIDDEN))
    weights = {
        "router": np.zeros((HIDDEN, 1), np.float32),
        "experts_gate": two[None, :, 0].astype(np.float32),
        "experts_up": two[None, :, 1].astype(np.float32),
        "experts_down": down[None].astype(np.float32),
    }
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    plain = {"w_gate_up": two.astype(np.float32), "w_down": down.astype(np.float32)}
    want = MLP(intermediate_size=24).apply(plain, jnp.asarray(x))
    np.testing.assert_allclose(one.apply(weights, jnp.asarray(x)), want, rtol=1e-4, atol=1e-4)
    # A gate of its own halves a shared expert, where it knows nothing.
    shared = replace(one, shared_size=24, shared_gate=True)
    weights |= plain | {"shared_gate": np.zeros((HIDDEN, 1), np.float32)}
    got = shared.apply(weights, jnp.asarray(x))
    np.testing.assert_allclose(got, 1.5 * np.asarray(want), rtol=1e-4, atol=1e-4)
