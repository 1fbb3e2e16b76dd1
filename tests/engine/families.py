"""Tiny checkpoints of models whose layers differ from a Llama's: one of each kind of cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.families.table import config_from_hf
from tests.engine import test_gemma4, test_recurrent_layers, test_windows
from tests.engine.alone import draw_weights, save_model
from tests.engine.conftest import write_tiny_model

FAMILIES = ("latents", "gemma 4", "windows", "recurrent")


def write_family(name: str, path: Path, tiny_model: Path) -> Path:
    """Writes a model of a family, with the tokenizer of the tiny one."""
    if name == "latents":
        return write_tiny_model(path, num_experts=8, has_latents=True)
    config, weights = _FAMILIES[name]()
    return save_model(path / "model", config, weights, tiny_model)


def _gemma4() -> tuple[ModelConfig, Any]:
    config = config_from_hf(test_gemma4.VALUES)
    return config, draw_weights(config)


def _windows() -> tuple[ModelConfig, Any]:
    config = test_windows.model_config(test_windows.LETTERS["gemma 2"])
    return config, test_windows.make_weights(config)


def _recurrent() -> tuple[ModelConfig, Any]:
    config = test_recurrent_layers.config_of("gated_delta")
    return config, test_recurrent_layers.make_weights(config)


_FAMILIES = {"gemma 4": _gemma4, "windows": _windows, "recurrent": _recurrent}
