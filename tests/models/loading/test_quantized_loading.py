"""Every kind of checkpoint is quantized alike."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from octavo.models.loading.load import load_model, save_model


def test_every_loader_gives_the_same_values(
    tiny_checkpoint: Any, tiny_gguf: Any, tmp_path: Any
) -> None:
    directory = tiny_checkpoint("smollm2")
    save_model(load_model(directory, "float32"), tmp_path / "saved")
    first, *others = (
        jax.tree.leaves(load_model(source, "float32", quantization="int8").weights)
        for source in (directory, tiny_gguf("smollm2"), tmp_path / "saved")
    )
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
