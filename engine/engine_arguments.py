"""Keyword arguments of `LLM` and `AsyncEngine`, some of which were written for vLLM."""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError

SWITCHES = frozenset(
    (
        "async_scheduling", "disable_async_output_proc", "disable_cascade_attn",
        "disable_custom_all_reduce", "disable_log_requests", "disable_log_stats",
        "enable_expert_parallel", "enforce_eager", "use_tqdm_on_load", "use_v2_block_manager",
    )
)  # fmt: skip
"""Those of `WITHOUT_EFFECT` that are on or off."""
WITHOUT_EFFECT = SWITCHES | {
    "block_manager", "compilation_config", "cuda_graph_sizes", "max_logprobs",
    "max_parallel_loading_workers", "max_seq_len_to_capture", "optimization_level",
    "preemption_mode",
}  # fmt: skip
"""Arguments of vLLM that say how it computes, and not what: any value is taken."""

_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})
NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "config_format": ((None, "auto", "hf"), "auto"),
    "convert": ((None, "auto", "none"), "auto; see task"),
    "cpu_offload_gb": (_NOTHING, "0; host_kv_memory_bytes is a host tier for KV"),
    "distributed_executor_backend": ((None, "mp", "uni"), "None: one process drives all devices"),
    "enable_lora": (_NOTHING, "False: adapters are not served"),
    "enable_prompt_adapter": (_NOTHING, "False"),
    "hf_overrides": (_NOTHING, "None"),
    "hf_token": (_NOTHING, "None: nothing is downloaded"),
    "kv_transfer_config": (_NOTHING, "None; see replica_roles"),
    "limit_mm_per_prompt": (_NOTHING, "None: text alone is served"),
    "mm_processor_kwargs": (_NOTHING, "None: text alone is served"),
    "num_gpu_blocks_override": ((None,), "None; see num_kv_pages"),
    "num_scheduler_steps": ((None, 1), "1; see num_decode_steps"),
    "pipeline_parallel_size": ((None, 1), "1"),
    "runner": ((None, "auto"), "auto; see task"),
    "skip_tokenizer_init": (_NOTHING, "False"),
    "speculative_config": (_NOTHING, "None: drafts are not served"),
    "swap_space": ((None, 0, 4), "0; see host_kv_memory_bytes, in bytes"),
    "tokenizer_mode": ((None, "auto"), "auto"),
    "tokenizer_revision": (_NOTHING, "None: nothing is downloaded"),
}  # fmt: skip
"""Other arguments of vLLM: the values that ask for nothing, and what else is allowed, in words."""

_log = logging.getLogger(__name__)


def engine_config(model: str | os.PathLike[str] | None, arguments: dict[str, Any]) -> EngineConfig:
    """An `EngineConfig` from keyword arguments.

    Of those that are not fields of `EngineConfig`, `check_others` takes some.

    Raises:
        InvalidConfigError: an unknown argument, or a value out of range.
    """
    known = EngineConfig.__dataclass_fields__
    given = {name: value for name, value in arguments.items() if name in known}
    check_others({name: value for name, value in arguments.items() if name not in known})
    if model is None:
        return EngineConfig(**given)
    return EngineConfig(model=os.fspath(model), **given)


def check_others(
    others: Mapping[str, object], without_effect: Collection[str] = WITHOUT_EFFECT
) -> None:
    """Takes arguments of vLLM that change no answer, with one warning for each set of names.

    Args:
        others: name -> value.
        without_effect: names that any value may have.

    Raises:
        InvalidConfigError: another argument, or a value that asks for something.
    """
    for name, value in others.items():
        if name not in without_effect:
            _check_other(name, value)
    if others:
        _warn(tuple(sorted(others)))


def _check_other(name: str, value: object) -> None:
    if name in NEUTRAL:
        values, allowed = NEUTRAL[name]
        # 1 == True, and neither stands for the other.
        if any(value == one and type(value) is type(one) for one in values):
            return
        raise InvalidConfigError(name, value, allowed)
    near = difflib.get_close_matches(name, EngineConfig.__dataclass_fields__, 1, 0.7)
    hint = f"did you mean {near[0]}?" if near else "see EngineConfig"
    raise InvalidConfigError(name, value, f"the name of an engine argument; {hint}")


@functools.cache  # once for each set of names
def _warn(names: tuple[str, ...]) -> None:
    _log.warning("arguments of vLLM that have no effect here: %s", ", ".join(names))
