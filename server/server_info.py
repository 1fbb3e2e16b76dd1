"""Answers about the server itself: what is served, and what serves it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import TYPE_CHECKING

from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

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
    return pb.GetModelInfoResponse(
        model=engine.model_name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_attention_heads=config.common(lambda layer: layer.mixer.num_heads) or 0,
        num_kv_heads=config.common(lambda layer: layer.mixer.num_kv_heads) or 0,
        head_dim=config.common(lambda layer: layer.mixer.head_dim) or 0,
        max_model_len=engine.max_model_len,
        dtype=engine.dtype,
        eos_token_ids=config.eos_token_ids,
    )


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
