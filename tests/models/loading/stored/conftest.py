"""Checkpoints of tiny models whose linear layers a format stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.loading.stored.writers import write_safetensors

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, tiny_values: Any) -> Write:
    """A directory of a tiny model with some tensors."""

    def make(model: str, tensors: dict[str, np.ndarray], how: Any = None, **changes: Any) -> Path:
        directory = tmp_path / ("quantized" if how else "plain")
        directory.mkdir(exist_ok=True)
        values = tiny_values(model) | ({"quantization_config": how} if how else {}) | changes
        (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
        write_safetensors(directory / "model.safetensors", tensors)
        return directory

    return make
