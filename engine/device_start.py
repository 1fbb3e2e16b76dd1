"""From a configuration to an executor: what every host of an engine does, also one that plans
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from octavo.engine.config import SERVING_BATCHED_TOKENS, EngineConfig, Task
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.execution.platform.engine_setup import EngineSetup, decide_setup
from octavo.engine.execution.programs.compile_cache import CompileCache
from octavo.engine.execution.weights.weight_reading import WeightReading
from octavo.engine.execution.weights.weight_variants import choose_weight_variants
from octavo.engine.pooling.make_pooler import resolve_task
from octavo.engine.structured.masks import TokenMasks
from octavo.models.loading.load import OpenedModel, open_model
from octavo.sharding.mesh import make_mesh


class Hosts(Protocol):
    """The hosts that an engine spans, as a start sees them from one of them."""

    def agree(self, setup: EngineSetup) -> int: ...

    def make_executor(self, *args: Any, **kwargs: Any) -> DeviceExecutor: ...


@dataclass(slots=True, kw_only=True)
class DeviceStart:
    """An executor whose weights are being read, and what it was made from.

    Attributes:
        model: whose weights they are.
        task: what requests ask for; not "auto".
        setup: what the engine is on its devices.
        executor: whose warm-up has begun.
    """

    model: OpenedModel
    task: Task
    setup: EngineSetup
    executor: DeviceExecutor
    _reading: WeightReading | None
    _read_again: Callable[[], WeightReading]

    def set_weights(self) -> None:
        """Gives the executor its weights; waits for them. Later calls read them anew, where they
        were not kept asleep.

        Raises:
            ModelLoadError: they cannot be read.
        """
        # Kept no longer: a sleeping engine holds none of them.
        reading, self._reading = self._reading or self._read_again(), None
        reading.begin()
        self.executor.weights.set(*reading.result())


def start_device(
    config: EngineConfig,
    cache: CompileCache,
    *,
    masks: TokenMasks | None = None,
    host_memory_bytes: int | None = None,
    hosts: Hosts | None = None,
) -> DeviceStart:
    """Opens the model, decides what the engine is, and begins to read weights and load programs.

    Args:
        config: of one engine.
        cache: in use.
        masks: token masks of requests, which a follower never asks.
        host_memory_bytes: of the host's memory that it may fill; None takes what is available.
        hosts: that the engine spans; None is this one alone.

    Raises:
        ModelLoadError: the checkpoint cannot be used.
        InvalidConfigError: arguments that do not fit the model, the machine or the other hosts.
    """
    model = _open(config)
    task = resolve_task(config, model)
    chosen = choose_weight_variants(config, model, host_memory_bytes)
    has_blocks = chosen.blocks is not None
    reading = WeightReading(model, with_blocks=has_blocks, cache=cache)

    def decide(config: EngineConfig) -> EngineSetup:
        return decide_setup(
            config,
            model.config,
            model.dtype,
            model.mesh,
            chosen.variants,
            unread_bytes=chosen.num_bytes if reading.is_late else 0,
            host_memory_bytes=host_memory_bytes,
            task=task,
        )

    setup = decide(config)
    make_executor: Callable[..., DeviceExecutor] = DeviceExecutor
    if hosts is not None:
        setup = decide(config.replace(num_kv_pages=hosts.agree(setup)))
        make_executor = hosts.make_executor
    # Beside it programs of an earlier start load, and the tokenizer.
    reading.begin()
    executor = make_executor(
        setup,
        model.abstract_weights(),
        blocks=chosen.blocks,
        masks=masks,
        cache=cache,
        fail_on_compile=config.fail_on_compile,
    )
    executor.begin_warm_up(config.warm_up)
    return DeviceStart(
        model=model,
        task=task,
        setup=setup,
        executor=executor,
        _reading=reading,
        _read_again=lambda: WeightReading(_open(config), with_blocks=has_blocks, cache=cache),
    )


def of_one_engine(config: EngineConfig) -> EngineConfig:
    """The configuration with its token budget.

    Raises:
        InvalidConfigError: it is of several engines.
    """
    if config.data_parallel_size != 1:
        raise InvalidConfigError(
            "data_parallel_size",
            config.data_parallel_size,
            "1 for one engine: `LLM`, `AsyncEngine` and their commands make several",
        )
    return config.with_token_budget(SERVING_BATCHED_TOKENS)


def _open(config: EngineConfig) -> OpenedModel:
    """The model on a mesh of the devices at hand; nothing of its weights is read."""
    try:
        mesh = make_mesh(config.tensor_parallel_size)
    except ValueError as error:
        raise InvalidConfigError(
            "tensor_parallel_size",
            config.tensor_parallel_size,
            f"1 to {len(jax.devices())}, the number of devices there are",
        ) from error
    return open_model(
        config.model,
        config.dtype,
        mesh,
        config.quantization,
        load_format=config.load_format,
        seed=config.seed,
    )
