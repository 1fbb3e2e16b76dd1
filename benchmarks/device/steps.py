"""Whole engine steps: the real scheduler, packer and executor over random weights.

What is timed is the engine's own: a dispatch's seconds from the moment the device was free for it
until its tokens were on the host, and the share of time in which the device had nothing to do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.report import Skipped

if TYPE_CHECKING:
    from octavo.engine.execution.step_spec import Variant
    from octavo.models.config import ModelConfig

PAGE = 64
TOP_P = 0.95
"""Of rows with a temperature."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run: the full one, or one that a CPU does in seconds."""

    decode_rows: tuple[int, ...]
    context: int
    num_tokens: int
    chunk: int
    long_prompt: int
    mixed_tokens: int
    mixed_prompts: int
    offline: tuple[int, int, int]


FULL = Sizes((1, 32, 128), 1024, 24, 2048, 8192, 640, 6, (64, 512, 128))
TINY = Sizes((1, 4), 64, 8, 32, 128, 16, 2, (6, 16, 8))


def measure(
    results: dict[str, Any], deadline_s: float, *, backend: str, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Decode at several rows, prefill chunks, mixed steps, and an offline batch end to end."""
    try:
        bench = StepBench(backend, dtype, TINY if tiny else FULL)
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed, which whole steps need") from error
    yield {"what": "programs", "seconds": bench.ready_s, **bench.compile_s}
    for rows in bench.sizes.decode_rows:
        if time.monotonic() > deadline_s:
            return
        yield bench.decode(rows, results)
    for each in (bench.prefill, bench.mixed, bench.offline, bench.sampled):
        if time.monotonic() > deadline_s:
            return
        yield each(results)


class StepBench:
    """An engine core without text: programs for the measured sizes, and no others.

    Args:
        backend: of attention.
        dtype: of weights and KV.
        sizes: of the run.
        config: of the model (default: Llama-3.1-8B's shapes, or tiny ones).
        variants: of the programs.
    """

    def __init__(
        self,
        backend: str,
        dtype: str,
        sizes: Sizes,
        config: ModelConfig | None = None,
        variants: tuple[Variant, ...] = ("greedy", "general"),
    ) -> None:
        from benchmarks.aot.cases import LLAMA_8B
        from octavo.engine.clock import MonotonicClock
        from octavo.engine.core import EngineCore
        from octavo.engine.execution.executor import DeviceExecutor
        from octavo.engine.execution.platform.buckets import Lattice
        from octavo.engine.execution.platform.engine_setup import EngineSetup
        from octavo.engine.execution.platform.kernel_choice import Kernels
        from octavo.engine.execution.step_spec import StepShape
        from octavo.engine.execution.weights.weight_variants import plain_variants
        from octavo.engine.scheduler.scheduler import Scheduler
        from octavo.engine.scheduler.step_plan import StepLimits
        from octavo.models.parameters import declare, num_parameters
        from octavo.models.random_weights import random_weights
        from octavo.sharding.mesh import make_mesh

        begun_s = time.perf_counter()
        self.sizes = sizes
        if config is None:
            config = LLAMA_8B if sizes is FULL else _tiny()
        most_rows = sizes.decode_rows[-1]
        self.page = PAGE if sizes.chunk > 1024 else 16
        mesh = make_mesh(1)
        lattice = Lattice(
            tuple(StepShape(n, n, 4) for n in sizes.decode_rows),
            tuple(
                StepShape(n, min(n, most_rows), 0)
                for n in sorted({sizes.mixed_tokens, sizes.chunk})
            ),
            variants,
        )
        per_row = -(-(sizes.context + 2 * sizes.num_tokens + 64) // self.page)
        longest = sizes.long_prompt + 64
        limits = StepLimits(
            max_num_batched_tokens=sizes.chunk,
            max_num_seqs=most_rows,
            max_num_steps=4,
            max_prefill_rows=lattice.max_prefill_rows,
            max_pages_per_seq=-(-longest // self.page // 8) * 8 + 8,
            page_size=self.page,
            num_pages=1 + most_rows * per_row + 2 * -(-longest // self.page),
            max_model_len=longest,
            token_edges=lattice.token_edges,
            windows=config.cache_layout().windows,
            has_states=bool(config.cache_layout().states),
        )
        kv_dtype = jnp.dtype(dtype)
        specs = declare(config, kv_dtype)
        embedding = config.vocab_size * config.hidden_size
        self.num_read = num_parameters(specs) - embedding  # of the embedding, a row a token
        self.weight_bytes = self.num_read * kv_dtype.itemsize
        self.config, self.kv_dtype, self.limits = config, kv_dtype, limits
        weights = random_weights(config, kv_dtype, mesh, 0)
        setup = EngineSetup(
            model=config,
            mesh=mesh,
            limits=limits,
            num_slots=limits.max_num_seqs,
            lattice=lattice,
            kernels=Kernels.for_devices(mesh, backend),  # type: ignore[arg-type]
            kv_dtype=kv_dtype,
            variants=plain_variants(weights, kv_dtype),
        )
        executor = DeviceExecutor(setup, weights)
        executor.warm_up()
        self.executor = executor
        self.compile_s = dict(executor.programs.stats.seconds)
        self.ready_s = time.perf_counter() - begun_s
        self._new_core = lambda: EngineCore(
            Scheduler(limits, policy="fcfs", enable_prefix_caching=False, num_decode_steps=4),
            executor,
            MonotonicClock(),
        )
        self._log: list[tuple[Any, float]] = []
        self._calls_s: list[float] = []
        result, run_step = executor.result, executor.run_step

        def logged(handle: Any) -> Any:
            done = result(handle)
            self._log.append((handle.plan, done.duration_s))
            return done

        def timed(*args: Any) -> Any:
            begun_s = time.perf_counter()
            output = run_step(*args)
            self._calls_s.append(time.perf_counter() - begun_s)
            return output

        executor.result = logged  # type: ignore[method-assign]
        executor.run_step = timed  # type: ignore[method-assign]

    def decode(self, rows: int, results: dict[str, Any]) -> dict[str, Any]:
        """Rows that all decode at about `context`."""
        prompt, answer = self._around_context(rows)
        idle = self._serve([prompt] * rows, answer)
        # Dispatches of a whole batch and four iterations; the first waited for the last prefill.
        whole = [
            (plan, seconds)
            for plan, seconds in self._log
            if not plan.prefill_rows and len(plan.decode_rows) == rows and plan.num_steps == 4
        ][1:]
        if not whole:
            return {"what": f"decode {rows}", "note": "no dispatch held all rows"}
        each_s = statistics.median(seconds / plan.num_steps for plan, seconds in whole)
        num_keys = statistics.median(int(plan.decode_rows.starts.sum()) + rows for plan, _ in whole)
        least = self.weight_bytes + num_keys * self._kv_bytes_per_token()
        return {
            "what": f"decode {rows} x {self.sizes.context}",
            "ms": 1e3 * each_s,
            "tok/s": rows / each_s,
            "mean context": num_keys / rows,
            "GB/s": 1e-9 * least / each_s,
            "of copy": least / each_s / results["copy_bytes_per_s"],
            "device idle": idle,
            "call ms": self._call_ms(),
            "dispatches": len(whole),
        }

    def _around_context(self, rows: int) -> tuple[int, int]:
        """Prompt and answer such that all rows decode together, at about `context`.

        The first rows decode while the last are prefilled: their answers last longer than that.
        """
        sizes = self.sizes
        num_prefills = -(-rows * sizes.context // max(1, sizes.chunk - rows))
        alone = 2 * sizes.num_tokens
        return sizes.context - num_prefills // 2 - alone // 2, num_prefills + alone

    def prefill(self, results: dict[str, Any]) -> dict[str, Any]:
        """Chunks of one long prompt."""
        idle = self._serve([self.sizes.long_prompt] * 2, 1)
        took, flops = [], []
        for plan, seconds in self._log:
            if plan.num_tokens == self.sizes.chunk and not plan.decode_rows:
                took.append(seconds)
                flops.append(
                    sum(self._flops(row.start, row.num_tokens) for row in plan.prefill_rows)
                )
        rate = sum(flops) / sum(took)
        return {
            "what": f"prefill in chunks of {self.sizes.chunk}, up to {self.sizes.long_prompt}",
            "ms": 1e3 * statistics.median(took),
            "tok/s": self.sizes.chunk * len(took) / sum(took),
            "TFLOP/s": 1e-12 * rate,
            "of matmul": rate / results["matmul_flops_per_s"],
            "device idle": idle,
            "call ms": self._call_ms(),
            "dispatches": len(took),
        }

    def mixed(self, results: dict[str, Any]) -> dict[str, Any]:
        """All rows but one decode while prompts come in: steps of `mixed_tokens`."""
        sizes = self.sizes
        rows = sizes.decode_rows[-1]
        chunk = sizes.mixed_tokens - rows
        prompt, answer = self._around_context(rows - 1)
        idle = self._serve([prompt] * (rows - 1), answer,
                           late=[min(chunk, sizes.context)] * sizes.mixed_prompts)  # fmt: skip
        took, floors = [], []
        for plan, seconds in self._log:
            # The first prompts' chunks fill larger steps while half of the rows decode already.
            if not plan.prefill_rows or len(plan.decode_rows) < rows - 1:
                continue
            if plan.num_tokens > sizes.mixed_tokens:
                continue
            flops = sum(self._flops(row.start, row.num_tokens) for row in plan.prefill_rows)
            flops += len(plan.decode_rows) * self._flops(sizes.context, 1)
            kv = len(plan.decode_rows) * sizes.context * self._kv_bytes_per_token()
            by_bytes = (self.weight_bytes + kv) / results["copy_bytes_per_s"]
            took.append(seconds)
            floors.append((by_bytes, flops / results["matmul_flops_per_s"]))
        if not took:
            return {"what": "mixed", "note": "no step held decoding rows and a chunk"}
        return {
            "what": f"mixed {rows} rows, {chunk} prefill tokens",
            "ms": 1e3 * statistics.median(took),
            "floor by bytes ms": 1e3 * statistics.median(b for b, _ in floors),
            "floor by FLOPs ms": 1e3 * statistics.median(f for _, f in floors),
            "over their sum": sum(took) / sum(b + f for b, f in floors),
            "device idle": idle,
            "call ms": self._call_ms(),
            "dispatches": len(took),
        }

    def offline(self, results: dict[str, Any], temperature: float = 0.0) -> dict[str, Any]:
        """A batch of requests, all at once, end to end."""
        count, prompt, answer = self.sizes.offline
        begun_s = time.perf_counter()
        idle = self._serve([prompt] * count, answer, temperature=temperature)
        wall_s = time.perf_counter() - begun_s
        how = "greedy"
        if temperature:
            how = f"temperature {temperature}, top_p {TOP_P}"
        else:
            results["offline_tokens_per_s"] = count * answer / wall_s
        return {
            "what": f"{count} requests of {prompt} + {answer}, {how}",
            "seconds": wall_s,
            "output tok/s": count * answer / wall_s,
            "device idle": idle,
            "call ms": self._call_ms(),
        }

    def sampled(self, results: dict[str, Any]) -> dict[str, Any]:
        """The same batch, as most requests ask for it."""
        return self.offline(results, temperature=1.0)

    def _call_ms(self) -> float:
        """The median call of a program: one that lasts as long as the step cannot overlap."""
        return 1e3 * statistics.median(self._calls_s)

    def _serve(
        self,
        prompts: list[int],
        max_tokens: int,
        late: list[int] | None = None,
        temperature: float = 0.0,
    ) -> float:
        """Runs requests to their end, the late ones once the others decode; the idle share."""
        from octavo.engine.request import Request
        from octavo.engine.sampling_params import SamplingParams

        rng = np.random.default_rng(0)
        core = self._new_core()
        stats = self.executor.stats
        busy_s, idle_s = stats.busy_s, stats.idle_s
        self._log.clear()
        self._calls_s.clear()

        def add(index: int, length: int, count: int) -> None:
            core.add(
                Request(
                    request_id=str(index),
                    prompt_token_ids=rng.integers(1, self.config.vocab_size, length).tolist(),
                    sampling_params=SamplingParams(
                        temperature=temperature, top_p=TOP_P, ignore_eos=True
                    ),
                    seed=index,
                    eos_token_ids=(),
                    max_tokens=count,
                    arrival_s=time.monotonic(),
                )
            )

        for index, length in enumerate(prompts):
            add(index, length, max_tokens)
        waiting = list(late or ())
        while core.has_work:
            core.step()
            last = self._log[-1][0] if self._log else None
            if waiting and last is not None and len(last.decode_rows) >= len(prompts):
                add(10_000 + len(waiting), waiting.pop(), 1)
        core.scheduler.check_integrity()
        self.executor.idle()
        busy_s, idle_s = stats.busy_s - busy_s, stats.idle_s - idle_s
        return idle_s / max(1e-9, busy_s + idle_s)

    def _kv_bytes_per_token(self) -> int:
        from octavo.engine.execution.state import kv_bytes_per_token

        return kv_bytes_per_token(self.config, self.kv_dtype)

    def _flops(self, start: int, count: int) -> float:
        """Of `count` tokens after `start`, but for the head, which few of them need."""
        head = self.config.vocab_size * self.config.hidden_size
        pairs = count * start + count * (count + 1) // 2
        attention = (
            4 * pairs * sum(each.num_heads * each.head_dim for each in self.config.attentions())
        )
        return 2.0 * count * (self.num_read - head) + attention


def _tiny() -> Any:
    from octavo.models.flat_config import flat_config

    return flat_config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=64, rms_norm_eps=1e-5, max_position_embeddings=1024,
    )  # fmt: skip


def free_device() -> None:
    """Lets go of what earlier sections held."""
    import gc

    gc.collect()
    jax.clear_caches()
