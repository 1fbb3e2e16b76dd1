"""How long a step takes: models that price a plan by what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from octavo.engine.scheduler.step_plan import StepPlan


class StepWork(NamedTuple):
    """What of a plan its duration depends on.

    Attributes:
        num_decode_rows: rows that decode.
        num_prefill_rows: chunks.
        num_prefill_tokens: tokens of all chunks.
        decode_context: positions before their input that decode rows attend to, summed over rows,
            in the first iteration.
        prefill_context: positions computed before each chunk, summed over chunks.
        prefill_attention: query-key pairs of all chunks, Σ n·(start + (n + 1) / 2).
        num_steps: decode iterations of the dispatch.
        longest_decode: positions before its input that the longest decode row attends to, in the
            first iteration: where rows attend in groups, all of a group as long as its longest.
    """

    num_decode_rows: int
    num_prefill_rows: int = 0
    num_prefill_tokens: int = 0
    decode_context: int = 0
    prefill_context: int = 0
    prefill_attention: float = 0.0
    num_steps: int = 1
    longest_decode: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of one iteration."""
        return self.num_decode_rows + self.num_prefill_tokens

    def iteration(self, index: int) -> StepWork:
        """One iteration of a dispatch by itself: each row's context has grown by those before."""
        grown = self.decode_context + index * self.num_decode_rows
        longest = self.longest_decode + index if self.num_decode_rows else 0
        return self._replace(decode_context=grown, longest_decode=longest, num_steps=1)


def step_work(plan: StepPlan) -> StepWork:
    """The work of a plan. Rows that turn out to have stopped count: a device computes them too."""
    rows = plan.decode_rows
    num_tokens = context = 0
    attention = 0.0
    for chunk in plan.prefill_rows:
        num_tokens += chunk.num_tokens
        context += chunk.start
        attention += chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2)
    decode_context = int(rows.starts.sum(dtype=np.int64)) if len(rows) else 0
    longest = int(np.max(rows.starts)) if len(rows) else 0
    return StepWork(
        len(rows), len(plan.prefill_rows), num_tokens, decode_context, context, attention,
        plan.num_steps, longest,
    )  # fmt: skip


class StepTime(Protocol):
    """Prices work in seconds; a pure function."""

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class ConstantStepTime:
    """Every decode iteration, and every step with prefill, takes equally long.

    Attributes:
        step_s: seconds.
    """

    step_s: float = 1.0

    def seconds(self, work: StepWork) -> float:
        return self.step_s * work.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Coefficients in seconds, with n tokens of which p prefill and d decode.

    Attributes:
        base: of any step.
        token, prefill, decode: by n, p and d.
        decode_context, prefill_context: by position, as in `StepWork`.
    """

    base: float
    token: float
    prefill: float
    decode: float
    decode_context: float
    prefill_context: float

    def seconds(self, work: StepWork) -> float:
        return (
            self.base
            + self.token * work.num_tokens
            + self.prefill * work.num_prefill_tokens
            + self.decode * work.num_decode_rows
            + self.decode_context * work.decode_context
            + self.prefill_context * work.prefill_context
        )


@dataclass(frozen=True, slots=True)
class TwoRegimeStepTime:
    """Linear below and above a number of tokens, where weights stop and arithmetic starts to bind.

    Attributes:
        small, large: up to `edge` tokens, and above.
        edge: tokens.
    """

    small: LinearCost
    large: LinearCost
    edge: int = 512

    def seconds(self, work: StepWork) -> float:
        cost = self.small if work.num_tokens <= self.edge else self.large
        seconds = cost.seconds(work)
        if work.num_steps > 1:
            # The same cost again for each iteration, with contexts that grow by one a row.
            k = work.num_steps
            grown = cost.decode_context * work.num_decode_rows * (k * (k - 1) // 2)
            seconds = k * seconds + grown
        return seconds


NIYAMA_STEP_TIME = TwoRegimeStepTime(
    small=LinearCost(
        base=0.014936, token=5.882475e-5, prefill=2.247956e-5, decode=3.634519e-5,
        decode_context=1.111258e-7, prefill_context=7.554773e-7,
    ),
    large=LinearCost(
        base=0.005004, token=2.71905e-5, prefill=6.863043e-5, decode=-4.143993e-5,
        decode_context=1.663409e-7, prefill_context=2.727223e-6,
    ),
)  # fmt: skip
"""A measured replica's fit. Source: Niyama (microsoft/sarathi-serve, branch niyama_asplos2026)."""
