"""What can be refused before JAX is imported, a model read or a process started."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from octavo.engine.config import EngineConfig
from octavo.engine.errors import InvalidConfigError, ModelLoadError, shorten
from octavo.engine.sampling_defaults import sampling_defaults
from octavo.engine.text.chat_template_file import read_chat_template
from octavo.models.loading.locate import locate


def check_early(config: EngineConfig) -> None:
    """Refuses arguments that cannot work on this machine, in milliseconds. Imports no JAX.

    Raises:
        ModelLoadError: there is no such model, or no such tokenizer.
        InvalidConfigError: a model that is not of its `load_format`, more replicas than a CPU has
            cores for, a chat template that is none, or sampling parameters that no request may
            have.
    """
    locate(config.model, config.load_format)
    if config.tokenizer is not None:
        _check_tokenizer(config.tokenizer)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    sampling_defaults(config)
    check_cores(config, os.environ)


def check_cores(config: EngineConfig, environ: Mapping[str, str]) -> None:
    """Refuses more replicas than cores where they are sure to run on a CPU.

    Args:
        environ: of the process; it may name the platform.

    Raises:
        InvalidConfigError: there are fewer cores.
    """
    size = config.data_parallel_size
    if size == 1 or not hasattr(os, "sched_getaffinity") or not has_only_cpus(environ):
        return
    num_cores = len(os.sched_getaffinity(0))
    if size > num_cores:
        raise InvalidConfigError(
            "data_parallel_size", size, f"1 to {num_cores}, the number of cores there are"
        )


def has_only_cpus(environ: Mapping[str, str]) -> bool:
    """Whether JAX can find nothing but a CPU here, without it being asked."""
    named = environ.get("JAX_PLATFORMS") or environ.get("JAX_PLATFORM_NAME")
    if named:
        return named.lower() == "cpu"
    has_plugin = bool(importlib.metadata.entry_points(group="jax_plugins"))
    has_plugin |= importlib.util.find_spec("jax_plugins") is not None
    return not has_plugin and importlib.util.find_spec("libtpu") is None


def _check_tokenizer(tokenizer: str) -> None:
    try:
        Path(tokenizer).stat()
    except (OSError, ValueError):
        raise ModelLoadError(
            f"tokenizer = {shorten(tokenizer, 400)} is neither a directory nor a file"
        ) from None
