"""A device that is not there: prices plans, and knows what each request will say."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.executor import TransferDone
from octavo.engine.scheduler.step_plan import (
    NO_TOKEN,
    RowTokens,
    StepLimits,
    StepPlan,
    StepResult,
    TokenRows,
)
from octavo.engine.simulation.faults import NO_FAULTS, Faults, FaultSource
from octavo.engine.simulation.step_time import StepTime, step_work
from octavo.engine.simulation.virtual_clock import VirtualClock
from octavo.engine.simulation.workloads.traffic import END_TOKEN

NUM_TOKEN_IDS = 4096
"""Simulated tokens are 1 … this."""

_NOTHING = RowTokens(())
_NO_TOKENS = np.empty(0, np.int32)
_FIRST_WIDTH = 256
_UINT64 = (1 << 64) - 1


class SimulatedStepError(RuntimeError):
    """A step that failed because the simulation said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverhead:
    """Seconds that the host spends on a step, in which virtual time passes.

    Attributes:
        plan_s: planning, packing and dispatching.
        plan_row_s: the same, for each row.
        commit_s, commit_row_s: taking in the result, and for each row.
    """

    plan_s: float = 0.0
    plan_row_s: float = 0.0
    commit_s: float = 0.0
    commit_row_s: float = 0.0


NO_OVERHEAD = HostOverhead()


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapLink:
    """The way between device and host memory; both directions run at once.

    Attributes:
        bytes_per_page: KV bytes in a page.
        bytes_per_s: bandwidth of one direction.
        latency_s: of each copy.
    """

    bytes_per_page: int = 2 << 20
    bytes_per_s: float = 25e9
    latency_s: float = 50e-6

    def seconds(self, num_pages: int) -> float:
        """Time to copy so many pages."""
        return self.latency_s + num_pages * self.bytes_per_page / self.bytes_per_s


@dataclass(slots=True, eq=False)
class SimulatedStep:
    """A step on its way.

    Attributes:
        plan: what it computes.
        begin_s, end_s: when the device starts and ends it.
        fails: whether its result is an error.
        token_ids: int32[decode rows, iterations], what each row will say; `NO_TOKEN` past its end.
    """

    plan: StepPlan
    begin_s: float
    end_s: float
    fails: bool
    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 1), np.int32))


def output_tokens(seed: int, num_tokens: int) -> tuple[int, ...]:
    """What a request says: each token a hash of (seed, position), the last one `END_TOKEN`."""
    return tuple(_output_tokens(seed, num_tokens).tolist())


def _output_tokens(seed: int, num_tokens: int) -> NDArray[np.int32]:
    """Source: splitmix64 (Steele, Lea, Flood 2014)."""
    x = np.arange(1, num_tokens, dtype=np.uint64) + np.uint64((seed << 20) & _UINT64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    tokens = np.empty(num_tokens, np.int32)
    tokens[:-1] = x % np.uint64(NUM_TOKEN_IDS) + np.uint64(1)
    tokens[-1] = END_TOKEN
    return tokens


class SimulatedExecutor:
    """Computes nothing, in the time that a device would need.

    Steps run one after the other in dispatch order. Reading a result moves the clock to the step's
    end, as waiting for a device does.

    Args:
        limits: what plans may ask for.
        clock: moved by dispatches and results.
        step_time: prices a step.
        host: what the host spends on it.
        link: prices page copies.
        faults, seed: what goes wrong.
        on_step: told of each step as it is dispatched.
    """

    def __init__(
        self,
        limits: StepLimits,
        clock: VirtualClock,
        step_time: StepTime,
        *,
        host: HostOverhead = NO_OVERHEAD,
        link: SwapLink | None = None,
        faults: Faults = NO_FAULTS,
        seed: int = 0,
        on_step: Callable[[SimulatedStep], None] | None = None,
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._step_time = step_time
        self._host = host
        self._link = link or SwapLink()
        self._faults = FaultSource(faults, seed)
        self._on_step = on_step
        self._outputs: dict[str, NDArray[np.int32]] = {}
        # By slot: what its request says, and the index of what follows position 0's input.
        self._said = np.full((limits.max_num_seqs, _FIRST_WIDTH), NO_TOKEN, np.int32)
        self._first_index = np.zeros(limits.max_num_seqs, np.int32)
        self._transfers: list[tuple[float, int, bool]] = []
        self._free_s = self._out_free_s = self._in_free_s = clock.now_s()
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.busy_s = 0.0
        self.num_pages_out = 0
        self.num_pages_in = 0
        self.num_failed_steps = 0
        self.num_failed_transfers = 0

    # What only the simulation does.

    def learn_output(self, request_id: str, seed: int, num_tokens: int) -> None:
        """Tells what a request will say; the scheduler never hears of it."""
        self._outputs[request_id] = _output_tokens(seed, num_tokens)

    def forget_output(self, request_id: str) -> None:
        """Lets go of a request that ended."""
        self._outputs.pop(request_id, None)

    @property
    def next_transfer_s(self) -> float | None:
        """When the next page copy ends, if one is under way."""
        return self._transfers[0][0] if self._transfers else None

    # The executor's interface.

    def dispatch(self, plan: StepPlan) -> SimulatedStep:
        """Queues a step behind those before it."""
        work, clock, host = step_work(plan), self._clock, self._host
        if host is not NO_OVERHEAD:
            clock.advance(host.plan_s + host.plan_row_s * plan.num_rows)
        begin_s = max(clock.now_s(), self._free_s)
        seconds = self._step_time.seconds(work) * self._faults.stretch() if plan.num_rows else 0.0
        hang_s = self._faults.hang_s() if plan.num_rows else 0.0
        seconds = hang_s or seconds
        self._free_s = begin_s + seconds
        self.busy_s += seconds
        self.num_steps += 1
        self.num_prefill_tokens += work.num_prefill_tokens
        if plan.copy_outs or plan.copy_ins:
            self._begin_transfers(plan, begin_s)
        fails, token_ids = self._faults.step_fails() or hang_s > 0, self._decode(plan)
        step = SimulatedStep(plan, begin_s, self._free_s, fails, token_ids)
        if self._on_step is not None:
            self._on_step(step)
        return step

    def result(self, handle: SimulatedStep) -> StepResult:
        """Waits for the step's end, in virtual time.

        Raises:
            SimulatedStepError: it was to fail.
        """
        self._clock.advance_to(handle.end_s)
        if handle.fails:
            self.num_failed_steps += 1
            raise SimulatedStepError("a simulated fault")
        plan, host = handle.plan, self._host
        prompts: list[RowTokens] = []
        for chunk in plan.prefill_rows:
            if chunk.samples:
                index = chunk.start + chunk.num_tokens - len(chunk.request.prompt_token_ids)
                tokens = self._outputs.get(chunk.request.request_id, _NO_TOKENS)
                prompts.append(RowTokens(tuple(tokens[index : index + 1].tolist())))
            else:
                prompts.append(_NOTHING)
        token_ids, handle.token_ids = handle.token_ids, handle.token_ids[:0]
        rows: Sequence[RowTokens]
        if plan.num_steps == 1:
            rows = TokenRows(token_ids[:, 0].tolist(), prompts)
        else:
            counts = plan.decode_rows.max_new_tokens.tolist()
            rows = [*map(_emitted, token_ids.tolist(), counts), *prompts]
        if host is not NO_OVERHEAD:
            self._clock.advance(host.commit_s + host.commit_row_s * len(rows))
        return StepResult(rows=rows, duration_s=handle.end_s - handle.begin_s)

    def poll_transfers(self) -> list[TransferDone]:
        """Page copies that have ended by now."""
        ended: list[TransferDone] = []
        while self._transfers and self._transfers[0][0] <= self._clock.now_s():
            _, transfer_id, ok = heapq.heappop(self._transfers)
            self.num_failed_transfers += not ok
            ended.append(TransferDone(transfer_id, ok))
        return ended

    def idle(self) -> None:
        """Nothing to do: a device that is not there does not wait."""

    def reset(self) -> None:
        """Steps queued behind a failed one never run, and copies under way are lost."""
        now_s = self._clock.now_s()
        self._free_s = self._out_free_s = self._in_free_s = now_s
        self._transfers = [(now_s, transfer_id, False) for _, transfer_id, _ in self._transfers]
        heapq.heapify(self._transfers)

    def _decode(self, plan: StepPlan) -> NDArray[np.int32]:
        """What the decode rows will say, int32[rows, iterations]; takes in new rows, too."""
        for chunk in plan.prefill_rows:
            if chunk.is_new:
                tokens = self._outputs.get(chunk.request.request_id, _NO_TOKENS)
                self._reserve(len(tokens))
                said = self._said[chunk.slot]
                said[: len(tokens)] = tokens
                said[len(tokens) :] = NO_TOKEN
                self._first_index[chunk.slot] = 1 - len(chunk.request.prompt_token_ids)
        slots, last = plan.decode_rows.slots, self._said.shape[1] - 1
        first = plan.decode_rows.starts + self._first_index[slots]
        if plan.num_steps == 1:
            newest: NDArray[np.int32] = self._said[slots, np.minimum(first, last)]
            return newest[:, None]
        index = np.minimum(first[:, None] + np.arange(plan.num_steps), last)
        emitted: NDArray[np.int32] = self._said[slots[:, None], index]
        return emitted

    def _reserve(self, num_tokens: int) -> None:
        """Makes room for so many tokens a slot, and one place behind them that holds none."""
        width = self._said.shape[1]
        if num_tokens >= width:
            more = np.full((len(self._said), max(width, num_tokens + 1 - width)), NO_TOKEN)
            self._said = np.concatenate((self._said, more.astype(np.int32)), axis=1)

    def _begin_transfers(self, plan: StepPlan, begin_s: float) -> None:
        for copy in plan.copy_outs:
            ok, late_s = self._faults.transfer()
            self._out_free_s = max(begin_s, self._out_free_s) + self._seconds(copy.device_pages)
            self.num_pages_out += len(copy.device_pages)
            heapq.heappush(self._transfers, (self._out_free_s + late_s, copy.transfer_id, ok))
        for copy in plan.copy_ins:
            ok, late_s = self._faults.transfer()
            self._in_free_s = max(begin_s, self._in_free_s) + self._seconds(copy.device_pages)
            self.num_pages_in += len(copy.device_pages)
            heapq.heappush(self._transfers, (self._in_free_s + late_s, copy.transfer_id, ok))

    def _seconds(self, pages: tuple[int, ...]) -> float:
        return self._link.seconds(len(pages))


def _emitted(token_ids: list[int], count: int) -> RowTokens:
    """A row's tokens up to its own limit, or to its end."""
    emitted = token_ids[:count]
    if emitted[-1] == NO_TOKEN:
        emitted = emitted[: emitted.index(NO_TOKEN)]
    result: RowTokens = tuple.__new__(RowTokens, (tuple(emitted), None, None, None))
    return result  # as `RowTokens(…)` would make it, at a third of the cost
