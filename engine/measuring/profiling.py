"""Measures the running machine through the real engine, for simulations of it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.engine.engine import Engine
from octavo.engine.executor import StepExecutor, TransferDone
from octavo.engine.measuring.measurement import measure
from octavo.engine.scheduler.step_plan import StepPlan, StepResult
from octavo.engine.simulation.executor import HostOverhead, SwapLink
from octavo.engine.simulation.profile import Profile, ProgramCost, Sample, fit_link, fit_program
from octavo.engine.simulation.step_time import step_work
from octavo.engine.simulation.workloads.bench_requests import BenchRequest, random_workload

COPIES_TIMED = (1, 8, 64, 256)
"""Pages of the copies by which the link to the host tier is measured."""
LONGEST_CONTEXT = 1024
"""Longest sequences that are profiled unless somebody wants others."""
SHORTEST_CONTEXT = 32
"""The least that these may be."""


class RecordingExecutor:
    """Passes everything on to an executor, and keeps what each step held and took.

    Attributes:
        samples: (the program's shape, work, seconds) of each step read so far.
        waited_s: seconds spent waiting for results.
    """

    def __init__(self, executor: Any) -> None:
        self._executor: StepExecutor = executor
        self.limits = executor.limits
        self.samples: list[tuple[Any, Sample]] = []
        self.host: list[tuple[int, float]] = []
        self.waited_s = 0.0

    def dispatch(self, plan: StepPlan) -> Any:
        return self._executor.dispatch(plan)

    def result(self, handle: Any) -> StepResult:
        begun_s = time.perf_counter()
        result = self._executor.result(handle)
        self.waited_s += time.perf_counter() - begun_s
        if result.duration_s > 0:  # two that end at once cannot be told apart
            sample = Sample(work=step_work(handle.plan), seconds=result.duration_s)
            self.samples.append((handle.shape, sample))
        return result

    def poll_transfers(self) -> list[TransferDone]:
        return self._executor.poll_transfers()

    def idle(self) -> None:
        self._executor.idle()

    def reset(self) -> None:
        self._executor.reset()


@dataclass(frozen=True, slots=True)
class Measured:
    """What one round of small workloads took.

    Attributes:
        samples: (the program's shape, work, seconds) of each step.
        turns: (rows committed, host seconds without waiting) of each of the engine's turns.
    """

    samples: list[tuple[Any, Sample]]
    turns: list[tuple[int, float]]


def profile_engine(
    engine: Engine,
    *,
    repeats: int = 1,
    longest_context: int = LONGEST_CONTEXT,
    on_progress: Callable[[float], None] | None = None,
) -> Profile:
    """Runs small workloads that reach every program, and fits what each of them takes.

    Args:
        engine: warmed up, fresh; it must serve nothing else meanwhile.
        repeats: how often each is run.
        longest_context: tokens of the longest sequences; about those of the traffic to be
            simulated, as costs are lines through what was measured.
        on_progress: told the share that is done.

    Returns:
        The profile; a program that no workload reached takes as long as the next larger one.
    """
    link = time_link(engine)
    rounds = []
    for turn in range(repeats):

        def part(share: float, turn: int = turn) -> None:
            if on_progress is not None:
                on_progress((turn + share) / repeats)

        # New prompts in every repeat: those served before would be in the prefix cache.
        rounds.append(
            measure_programs(
                engine,
                seed=1 + 1000 * turn,
                longest_context=longest_context,
                on_progress=part,
            )
        )
    return fit_profile(engine, rounds, link)


def measure_programs(
    engine: Engine,
    *,
    seed: int,
    longest_context: int = LONGEST_CONTEXT,
    part: tuple[int, int] = (0, 1),
    on_progress: Callable[[float], None] | None = None,
) -> Measured:
    """One round of the workloads, recorded.

    Args:
        engine: warmed up and idle; it must serve nothing else meanwhile.
        seed: of the workloads, another one in every round: what was served before would be in the
            prefix cache.
        longest_context: tokens of the longest sequences.
        part: which of how many parts of the workloads, counted from 0; each reaches every program
            by other workloads.
        on_progress: told the share that is done.
    """
    longest = max(SHORTEST_CONTEXT, min(engine.limits.max_model_len - 40, longest_context))
    recorder = RecordingExecutor(engine.core.executor)
    engine.core.executor = recorder
    turns = _time_turns(engine, recorder)
    try:
        batches = _batches(engine, seed, longest)
        # The last one has the most rows, and passes through all sizes as it empties.
        measure(engine, batches.pop())
        step_s = float(np.median([sample.seconds for _, sample in recorder.samples]))
        arriving = _arriving(engine, seed, longest, step_s)
        workloads = [*batches[part[0] :: part[1]], *arriving[part[0] :: part[1]]]
        # The machine's speed may change meanwhile: in any order, that is no program's alone.
        random.Random(seed).shuffle(workloads)
        for index, workload in enumerate(workloads):
            measure(engine, workload)
            if on_progress is not None:
                on_progress(index / len(workloads))
        if on_progress is not None:
            on_progress(1.0)
    finally:
        engine.core.executor = recorder._executor
        del engine.step
    return Measured(recorder.samples, turns)


def fit_profile(
    engine: Engine, rounds: Sequence[Measured], link: SwapLink | None = None
) -> Profile:
    """The profile that rounds of `measure_programs` on an engine come to, all together.

    Args:
        link: to the host tier, as `time_link` measured it.
    """
    return Profile(
        programs=_programs(engine, [sample for found in rounds for sample in found.samples]),
        host=_host([turn for found in rounds for turn in found.turns]),
        limits=engine.limits,
        link=link,
    )


def _time_turns(engine: Engine, recorder: RecordingExecutor) -> list[tuple[int, float]]:
    """Has every turn of the engine timed: (rows committed, host seconds without waiting)."""
    turns: list[tuple[int, float]] = []
    step = engine.step

    def timed() -> Any:
        waited_s, num_steps = recorder.waited_s, len(recorder.samples)
        begun_s = time.perf_counter()
        outputs = step()
        seconds = time.perf_counter() - begun_s - (recorder.waited_s - waited_s)
        if len(recorder.samples) > num_steps:
            work = recorder.samples[-1][1].work
            turns.append((work.num_decode_rows + work.num_prefill_rows, seconds))
        return outputs

    engine.step = timed  # type: ignore[method-assign]
    return turns


def _batches(engine: Engine, seed: int, longest: int) -> list[list[BenchRequest]]:
    """Requests that come together: every decode program with short contexts, with long ones, and
    with both side by side.

    Args:
        longest: tokens of the longest sequences.
    """
    vocab, limits = engine.model_config.vocab_size, engine.limits
    rows = sorted({shape.num_rows for shape in engine.executor.lattice.decode})
    # A seed for each: with one seed prompts of different lengths begin alike.
    seeds = itertools.count(seed)
    lengths = [n for n in (8, 24, 48, 96, 128, 200, 256, 384, 512, 768, 1000) if n <= longest]
    workloads = [
        random_workload(1, (length, length), (2, 2), vocab, next(seeds)) for length in lengths
    ]
    for num_rows in rows:
        for prompt in ((8, 24), (longest // 12, longest // 6), (longest // 4, longest // 2)):
            # Long enough that the first still decodes when the last prompt has been computed.
            num_chunks = num_rows * (prompt[0] + prompt[1]) // 2 // limits.max_num_batched_tokens
            num_output = min(24 + num_chunks, limits.max_model_len - prompt[1])
            num_pages = num_rows * limits.needs.to_compute(prompt[1] + num_output + 8)
            if num_pages < limits.num_pages - 1:
                workloads.append(
                    random_workload(num_rows, prompt, (num_output,) * 2, vocab, next(seeds))
                )
        # The batch empties row by row: sizes in between, of contexts of all lengths.
        prompt = (8, max(64, longest // 4))
        workloads.append(random_workload(num_rows, prompt, (1, 32), vocab, next(seeds)))
    return workloads


def _arriving(engine: Engine, seed: int, longest: int, step_s: float) -> list[list[BenchRequest]]:
    """Prompts that arrive while others decode: chunks of every size beside few rows and many.

    Args:
        longest: tokens of the longest sequences.
        step_s: a typical step.
    """
    vocab = engine.model_config.vocab_size
    # Shortest and longest prompt, typical steps between two of them, how many.
    kinds = (
        (6, longest // 2, 2.0, 24), (4, 24, 2.0, 24), (4, 24, 0.7, 24), (16, 128, 1.0, 24),
        # Light traffic, of which steps with few rows and now and then a prompt are made.
        (16, 128, 5.0, 12), (16, 128, 12.0, 6),
    )  # fmt: skip
    workloads = []
    for index, (shortest_prompt, longest_prompt, num_steps, num_requests) in enumerate(kinds):
        requests = random_workload(
            num_requests, (shortest_prompt, longest_prompt), (8, 48), vocab, seed + 200 + index
        )
        workloads.append(
            [
                BenchRequest(request.prompt_token_ids, request.max_tokens, num_steps * step_s * n)
                for n, request in enumerate(requests)
            ]
        )
    return workloads


def _programs(engine: Engine, samples: Sequence[tuple[Any, Sample]]) -> tuple[ProgramCost, ...]:
    by_shape: dict[tuple[int, int, int, int], list[Sample]] = {}
    for shape, sample in samples:
        key = (shape.num_tokens, shape.num_rows, shape.num_new_rows, shape.num_steps)
        by_shape.setdefault(key, []).append(sample)
    lattice = engine.executor.lattice
    # Of several programs of one size the fastest runs.
    keys = dict.fromkeys(
        (shape.num_tokens, shape.num_rows, shape.num_new_rows, shape.num_steps)
        for shape in (*lattice.decode, *lattice.mixed)
    )
    return tuple(
        fit_program(
            by_shape[key], num_tokens=key[0], num_rows=key[1], num_new_rows=key[2],
            num_steps=key[3],
        )
        for key in keys
        if key in by_shape
    )  # fmt: skip


def time_link(engine: Engine) -> SwapLink | None:
    """Copies of few and of many pages, if there is a host tier: latency and bandwidth.

    For an engine that has served nothing yet.
    """
    limits, executor = engine.limits, engine.executor
    most = min(limits.num_pages - 1, limits.num_host_pages)
    if not most:
        return None
    sizes = [n for n in COPIES_TIMED if n <= most] or [most]
    samples = [(n, executor.time_page_copies(n)) for n in sizes]
    return fit_link(samples, executor.page_bytes)


def _host(turns: Sequence[tuple[int, float]]) -> HostOverhead:
    """Host time a turn by its rows, half of it before the dispatch."""
    rows = np.array([turn[0] for turn in turns], np.float64)
    seconds = np.array([turn[1] for turn in turns], np.float64)
    kept = seconds <= np.quantile(seconds, 0.95)
    x = np.stack([np.ones(kept.sum()), rows[kept]], axis=1)
    base_s, row_s = np.linalg.lstsq(x, seconds[kept], rcond=None)[0]
    if base_s < 0 or row_s < 0:
        base_s, row_s = float(np.median(seconds)), 0.0
    return HostOverhead(
        plan_s=float(base_s) / 2, plan_row_s=float(row_s) / 2,
        commit_s=float(base_s) / 2, commit_row_s=float(row_s) / 2,
    )  # fmt: skip
