"""A step on its way, and what it came to once its tokens are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from octavo.engine.execution.sampling.next_tokens import Scores
from octavo.engine.execution.step import PooledStepOutput, StepOutput
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.request import Request
from octavo.engine.scheduler.step_plan import (
    NO_TOKEN,
    NOT_FINITE,
    NOTHING_ALLOWED,
    PrefillRow,
    RowTokens,
    StepPlan,
    StepResult,
    TokenRows,
    TokenScore,
)


@dataclass(slots=True)
class DispatchedStep:
    """A step on its way.

    Attributes:
        plan: what it computes.
        shape: the program that computes it.
        order: its decode rows' order, as indices into the plan.
        output: arrays on the device; None if the plan had no rows.
        dispatched_s: `time.perf_counter()` at dispatch.
        done_s: when it was done, if that is known without asking.
    """

    plan: StepPlan
    shape: StepShape | None
    order: NDArray[np.intp]
    output: StepOutput | None
    dispatched_s: float
    done_s: float | None = None

    def read(self) -> NDArray[np.int32]:
        """Waits for the step and fetches its tokens [iterations, rows]."""
        assert self.output is not None, "the step had no rows"
        return np.asarray(self.output.tokens)

    def result(self, tokens: NDArray[np.int32], duration_s: float) -> StepResult:
        """What the step came to, in the order of the plan's rows.

        Args:
            tokens: that were read.
            duration_s: it ran.
        """
        is_marked = int(np.min(tokens)) < NO_TOKEN
        rows = self._rows(tokens)
        broken = self._marked(tokens, NOT_FINITE) if is_marked else ()
        return StepResult(
            rows=rows,
            duration_s=duration_s,
            broken=self._with_broken_sums(broken, rows),
            barred=self._marked(tokens, NOTHING_ALLOWED) if is_marked else (),
        )

    def _with_broken_sums(
        self, broken: tuple[int, ...], rows: Sequence[RowTokens]
    ) -> tuple[int, ...]:
        """Adds the rows that pool a hidden state which is not finite: any of a chunk's may be."""
        if not isinstance(self.output, PooledStepOutput):
            return broken
        found = {
            index
            for index, row in enumerate(rows)
            if row.pooled is not None and not np.isfinite(row.pooled).all()
        }
        return tuple(sorted(found.union(broken)))

    def _marked(self, tokens: NDArray[np.int32], mark: int) -> tuple[int, ...]:
        """The plan's rows that hold a mark in place of a token."""
        plan = self.plan
        rows = np.concatenate([self.order, np.arange(len(plan.decode_rows), plan.num_rows)])
        found = (tokens[:, : plan.num_rows] == mark).any(axis=0)
        return tuple(sorted(rows[found].tolist()))

    def _rows(self, tokens: NDArray[np.int32]) -> Sequence[RowTokens]:
        plan = self.plan
        scores, prompt_scores = self._scores()
        pooled = self._pooled()
        num_decodes = len(plan.decode_rows)
        place = np.empty(num_decodes, np.intp)
        place[self.order] = np.arange(num_decodes)
        is_plain = plan.num_steps == 1 and scores is None
        rows: list[RowTokens] = []
        if not is_plain:
            decoded = tokens[:, place].T.tolist()
            for index, (request, emitted) in enumerate(
                zip(plan.decode_rows.requests, decoded, strict=True)
            ):
                ids = tuple(emitted) if emitted[-1] >= 0 else tuple(t for t in emitted if t >= 0)
                rows.append(_row(request, ids, scores, int(place[index])))
        first = num_decodes
        for index, prefill in enumerate(plan.prefill_rows, num_decodes):
            emitted_id = int(tokens[0, index])
            ids = (emitted_id,) if emitted_id >= 0 else ()
            row = _row(prefill.request, ids, scores, index)
            num_top = prefill.request.sampling_params.prompt_logprobs
            if num_top is not None and prompt_scores is not None:
                span = range(first, first + prefill.num_tokens)
                row = row._replace(
                    prompt_logprobs=tuple(_score(prompt_scores, (t,), num_top) for t in span)
                )
            if pooled is not None and is_pooled(prefill):
                row = row._replace(pooled=pooled[index - num_decodes])
            rows.append(row)
            first += prefill.num_tokens
        if is_plain:
            return TokenRows(np.maximum(tokens[0, place], NO_TOKEN).tolist(), rows)
        return rows

    def _pooled(self) -> NDArray[np.float32] | None:
        """Sums of hidden states, a row for each prefill row, fetched only if a row pools any."""
        output = self.output
        if isinstance(output, PooledStepOutput) and any(map(is_pooled, self.plan.prefill_rows)):
            return np.asarray(output.pooled)
        return None

    def _scores(self) -> tuple[Scores | None, Scores | None]:
        """Scores of tokens and of prompts, fetched only if a row asked for them."""
        plan, output = self.plan, self.output
        assert output is not None
        prefills = [row.request for row in plan.prefill_rows]
        wants = any(
            request.sampling_params.logprobs is not None
            for request in (*plan.decode_rows.requests, *prefills)
        )
        wants_prompt = any(r.sampling_params.prompt_logprobs is not None for r in prefills)
        return (
            jax.device_get(output.scores) if wants else None,
            jax.device_get(output.prompt_scores) if wants_prompt else None,
        )


def is_pooled(row: PrefillRow) -> bool:
    """Whether a chunk has tokens that its request pools."""
    return bool(range(row.num_tokens)[row.pooled_tokens])


def _row(request: Request, ids: tuple[int, ...], scores: Scores | None, column: int) -> RowTokens:
    num_top = request.sampling_params.logprobs
    if num_top is None or scores is None:
        return RowTokens(ids)
    return RowTokens(ids, tuple(_score(scores, (k, column), num_top) for k in range(len(ids))))


def _score(scores: Scores, at: tuple[int, ...], num_top: int) -> TokenScore:
    return TokenScore(
        float(scores.logprob[at]),
        int(scores.rank[at]),
        tuple(scores.top_ids[at][:num_top].tolist()),
        tuple(scores.top_logprobs[at][:num_top].tolist()),
    )
