"""Answers about the server itself: what is served, and what serves it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.sampling_message import sampling_defaults_to_message

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine


def octavo_version() -> str:
    """The installed version, or "unknown" in a source tree that is not installed."""
    try:
        return importlib.metadata.version("octavo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def model_info(engine: AsyncEngine) -> pb.GetModelInfoResponse:
    """The served model's shape and limits; 0 for a size that its layers do not have in common."""
    config = engine.model_config
    attentions = config.attentions()
    return pb.GetModelInfoResponse(
        model=engine.model_name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_attention_heads=_common(each.num_heads for each in attentions),
        num_kv_heads=_common(each.num_kv_heads for each in attentions),
        head_dim=_common(each.head_dim for each in attentions),
        max_model_len=engine.max_model_len,
        dtype=engine.dtype,
        eos_token_ids=config.eos_token_ids,
        sampling_defaults=sampling_defaults_to_message(engine.sampling_defaults),
    )


def _common(sizes: Iterable[int]) -> int:
    """The one value of all; 0 where they differ."""
    found = set(sizes)
    return found.pop() if len(found) == 1 else 0


def server_info(
    engine: AsyncEngine, *, uptime_s: float, draining: bool
) -> pb.GetServerInfoResponse:
    """Versions, devices and engine arguments."""
    import jax

    return pb.GetServerInfoResponse(
        version=octavo_version(),
        jax_version=jax.__version__,
        platform=engine.platform,
        num_devices=engine.num_devices,
        uptime_s=uptime_s,
        draining=draining,
        engine_args=engine_args(engine),
    )


def engine_args(engine: AsyncEngine) -> dict[str, str]:
    """What the engine was started with, as text."""
    return {
        field.name: str(getattr(engine.config, field.name))
        for field in dataclasses.fields(engine.config)
    }
