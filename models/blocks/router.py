"""Which of a layer's experts a token goes to, and how much each of them counts.

Shape suffixes: T tokens, E hidden, X experts, K chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import check_flag, check_number, check_positive, check_size, is_integer
from octavo.models.layers import linear, rms_norm

Scores = Literal["softmax", "sigmoid", "sparse_mixer"]
"""What becomes of logits."""
MAX_EXPERTS = 4096
"""Most experts of a layer: far above any that exists, and few enough to name each in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Which experts a token goes to, and with which shares; all of it in float32.

    Attributes:
        num_experts, num_chosen: X and K.
        scores: what becomes of logits: over all experts, each by itself, or, one choice after the
            other, over experts that come near to the best that is left.
        normalizes: shares are divided by their sum.
        corrects: experts are chosen by their scores plus a stored number, which shares leave out.
        bias: logits add one.
        num_groups: of experts.
        num_chosen_groups: experts are chosen from so many groups, of the best scores.
        num_group_scores: a group's score is the sum of so many of its largest.
        scale: multiplies shares in the end.
        input_eps: a token is first divided by its root mean square, this much added to the mean
            square, and by the root of E, and multiplied by stored numbers; None does not.
        expert_scales: each expert has a stored number that multiplies its share in the end.
        scales_inputs: shares multiply what experts take, and not what they return.
        jitter: of "sparse_mixer", half of what a logit may lack of the best one's, as a part of the
            larger of the two's sizes.
    """

    num_experts: int
    num_chosen: int
    scores: Scores = "softmax"
    normalizes: bool = True
    corrects: bool = False
    bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 2
    scale: float = 1.0
    input_eps: float | None = None
    expert_scales: bool = False
    scales_inputs: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts, MAX_EXPERTS)
        for name, high, of in (
            ("num_chosen", self.num_experts, "num_experts"),
            ("num_groups", self.num_experts, "num_experts"),
            ("num_chosen_groups", self.num_groups, "num_groups"),
        ):
            if not is_integer(getattr(self, name), 1, high):
                raise ModelLoadError(
                    f"{name} = {shorten(getattr(self, name))} is not allowed: "
                    f"an integer from 1 to {of} ({high})"
                )
        if self.num_experts % self.num_groups:
            raise ModelLoadError(
                f"num_groups = {self.num_groups} is not allowed: "
                f"a divisor of num_experts ({self.num_experts})"
            )
        group = self.num_experts // self.num_groups
        check_size("num_group_scores", self.num_group_scores)
        if self.num_groups > 1 and group < self.num_group_scores:
            raise ModelLoadError(
                f"num_groups = {self.num_groups} is not allowed: {self.num_group_scores} experts a "
                f"group, of num_experts ({self.num_experts})"
            )
        if self.num_chosen > group * self.num_chosen_groups:
            raise ModelLoadError(
                f"num_chosen = {self.num_chosen} is not allowed: at most "
                f"{group * self.num_chosen_groups}, in num_chosen_groups ({self.num_chosen_groups})"
            )
        if self.scores not in get_args(Scores):
            raise UnsupportedModelError(
                f"scores = {shorten(self.scores)} is not supported: {' or '.join(get_args(Scores))}"
            )
        for name in ("normalizes", "corrects", "bias", "expert_scales", "scales_inputs"):
            check_flag(name, getattr(self, name))
        check_positive("routed scale", self.scale)
        check_number("router jitter", self.jitter, 0.0, 1.0, "a number from 0 to 1")
        mixes = self.normalizes or self.corrects or self.num_groups > 1 or self.expert_scales
        if self.scores == "sparse_mixer" and mixes:
            raise ModelLoadError(
                "scores = 'sparse_mixer' is not allowed: softmax or sigmoid, with normalizes, "
                "corrects, expert_scales or groups"
            )
        if self.input_eps is not None:
            check_positive("router input_eps", self.input_eps)

    def choose(self, weights: Mapping[str, Any], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts int32 [T, K] and shares float32 [T, K] of x's tokens [T, E]."""
        x = x.astype(jnp.float32)
        if self.input_eps is not None:
            scale = weights["router_input_scale"] * jnp.float32(x.shape[1] ** -0.5)
            x = rms_norm(x, scale, self.input_eps)
        logits = linear(x, weights["router"])
        if self.bias:
            logits = logits + weights["router_bias"][None]
        if self.scores == "sparse_mixer":
            chosen, share = self._mix_sparsely(logits)
            return chosen, share if self.scale == 1.0 else share * jnp.float32(self.scale)
        scores = jax.nn.softmax(logits) if self.scores == "softmax" else jax.nn.sigmoid(logits)
        ranked = scores + weights["router_correction"][None] if self.corrects else scores
        if self.num_groups > 1:
            ranked = self._of_chosen_groups(ranked)
        _, chosen = jax.lax.top_k(ranked, self.num_chosen)
        share = jnp.take_along_axis(scores, chosen, axis=1)
        if self.normalizes:
            share = share / jnp.maximum(share.sum(1, keepdims=True), jnp.float32(1e-20))
        if self.expert_scales:
            share = share * weights["router_expert_scale"][chosen]
        return chosen, share if self.scale == 1.0 else share * jnp.float32(self.scale)

    def _mix_sparsely(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One expert after the other, of logits float32 [T, X]: the best that is left, with its
        softmax over those left that come near to it.

        Source: Liu et al., GRIN: GRadient-INformed MoE, arXiv 2409.12136, as transformers' Phi-MoE
        does at inference.
        """
        left, chosen, shares = logits, [], []
        for _ in range(self.num_chosen):
            best = left.max(1, keepdims=True)
            is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * self.jitter
            near = jnp.where(is_far, -jnp.inf, left)
            chosen.append(left.argmax(1).astype(jnp.int32))
            shares.append(1.0 / jnp.exp(near - best).sum(1))
            numbers = jnp.arange(self.num_experts, dtype=jnp.int32)
            left = jnp.where(numbers[None] == chosen[-1][:, None], -jnp.inf, left)
        return jnp.stack(chosen, 1), jnp.stack(shares, 1)

    def _of_chosen_groups(self, ranked: jax.Array) -> jax.Array:
        """Scores [T, X], those of other groups -inf."""
        by_group = ranked.reshape(len(ranked), self.num_groups, -1)
        group_scores = jax.lax.top_k(by_group, self.num_group_scores)[0].sum(-1)
        _, groups = jax.lax.top_k(group_scores, self.num_chosen_groups)
        numbers = jnp.arange(self.num_groups, dtype=groups.dtype)
        is_chosen = (groups[:, :, None] == numbers[None, None]).any(1)
        return jnp.where(is_chosen[:, :, None], by_group, -jnp.inf).reshape(ranked.shape)
