"""The real engine over a device that costs nothing: a clock that ends a step every so often."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from benchmarks.step_waits import StepWaits
from octavo.engine.scheduler.step_plan import RowTokens, StepPlan, StepResult, TokenRows

NUM_REQUESTS, NUM_TOKENS, PROMPT = 512, (64, 192), 16


class PacedExecutor:
    """Ends an iteration so many seconds after the one before it; every token is the same.

    Args:
        inner: answers everything else.
        step_s: seconds an iteration.
        waits: told when the engine's thread came and when the device was ready for it.
    """

    def __init__(self, inner: Any, step_s: float, waits: StepWaits) -> None:
        self._inner = inner
        self._step_s = step_s
        self._free_s = 0.0
        self._num_in_flight = 0
        self.waits = waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: StepPlan) -> tuple[StepPlan, float]:
        now_s, took_s = time.perf_counter(), self._step_s * plan.num_steps
        if self._num_in_flight:
            self.waits.dispatched(now_s - self._free_s, took_s)
        else:
            self.waits.began()
        self._num_in_flight += 1
        self._free_s = max(self._free_s, now_s) + took_s
        return plan, self._free_s

    def result(self, handle: tuple[StepPlan, float]) -> StepResult:
        plan, end_s = handle
        self.waits.enter()
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self.waits.leave(end_s if left_s > 0 else None)
        self._num_in_flight -= 1
        counts = plan.decode_rows.max_new_tokens.tolist()
        others = [RowTokens((60,) if row.samples else ()) for row in plan.prefill_rows]
        rows: Any = [*(RowTokens((60,) * count) for count in counts), *others]
        if plan.num_steps == 1:
            rows = TokenRows([60] * len(counts), others)
        return StepResult(rows=rows, duration_s=self._step_s * plan.num_steps)

    def poll_transfers(self) -> list[Any]:
        return []


def make_engine(model: Path, rows: int, tokens_per_s: float) -> Any:
    """The real engine over a paced device of so many rows and tokens a second."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=str(model), max_num_seqs=rows, max_num_batched_tokens=512, max_model_len=256,
            num_kv_pages=2 * rows * 256 // 16, block_size=16, warm_up="coarse",
        )
    )  # fmt: skip
    paced = PacedExecutor(engine.executor, rows / tokens_per_s, StepWaits())
    engine.executor = engine.core.executor = paced  # type: ignore[assignment]
    return engine


def prompt_of(number: int) -> list[int]:
    """A request's token ids."""
    rng = random.Random(number)
    return [rng.randrange(2, 250) for _ in range(PROMPT)]


def num_tokens_of(number: int) -> int:
    """How many tokens a request asks for."""
    return random.Random(-1 - number).randint(*NUM_TOKENS)


def all_tokens() -> int:
    """Tokens of all requests."""
    return sum(num_tokens_of(number) for number in range(NUM_REQUESTS))
