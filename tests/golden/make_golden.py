"""Write logits.npz: what transformers (torch, float32) says of every tiny model.

    python tests/golden/make_golden.py

needs torch and octavo's own dependencies. Weights are not stored: `tiny_weights.py` makes them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny_weights
import torch
import transformers
from safetensors.numpy import save_file

from octavo.models.families.table import config_from_hf
from octavo.models.loading.tensors import expected_shapes

HERE = Path(__file__).parent


def reference_model(values: dict[str, Any]) -> torch.nn.Module:
    """A tiny model in transformers, with the weights of `tiny_weights`."""
    config = config_from_hf(values)
    model_class = getattr(transformers, values["architectures"][0])
    weights = tiny_weights.tensors(expected_shapes(config), config.final_norm.offset)
    # From a checkpoint: transformers has its own names for some tensors, of experts above all.
    with tempfile.TemporaryDirectory() as directory:
        save_file(weights, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        (Path(directory) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        model, found = model_class.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(found.values()), found
    return model.eval()


def reference_logits(values: dict[str, Any]) -> np.ndarray:
    """Logits at every position of the tiny token run: [NUM_TOKENS, V] float32."""
    token_ids = tiny_weights.token_ids(values["vocab_size"])
    with torch.no_grad():
        output = reference_model(values)(torch.from_numpy(token_ids)[None].long())
    return output.logits[0].float().numpy()


def main() -> None:
    configs = json.loads((HERE / "tiny_configs.json").read_text(encoding="utf-8"))
    logits = {name: reference_logits(values) for name, values in configs.items()}
    np.savez_compressed(HERE / "logits.npz", **logits)
    for name, array in logits.items():
        print(f"{name}: {array.shape}, largest {np.abs(array).max():.3f}")


if __name__ == "__main__":
    main()
