"""Write logits.npz: what transformers (torch, float32) says of every tiny model.

    python tests/golden/make_golden.py [NAME ...]

Names are of tiny models, and those of others stay as they are; none is all of them. It
needs torch and octavo's own dependencies. Weights are not stored: `tiny_weights.py` makes them.
"""

from __future__ import annotations

import json
import sys
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
STORED_FUSED = ("mistral4", "gemma4_text")
"""Models whose checkpoints hold the experts of a layer in one tensor, and in no other way."""

RENAMED = {"nemotron_h": (("model.embed_tokens.", "model.embeddings."), ("model.", "backbone."))}
"""Models whose checkpoints have other names than Octavo has: what they begin with."""


def reference_model(values: dict[str, Any]) -> torch.nn.Module:
    """A tiny model in transformers, with the weights of `tiny_weights`."""
    config = config_from_hf(values)
    model_class = getattr(transformers, values["architectures"][0])
    weights = tiny_weights.tensors(expected_shapes(config), config.final_norm.offset)
    if values["model_type"] in STORED_FUSED:
        weights = with_fused_experts(weights)
    for old, new in RENAMED.get(values["model_type"], ()):
        weights = {name.replace(old, new, 1): tensor for name, tensor in weights.items()}
    # From a checkpoint: transformers has its own names for some tensors, of experts above all.
    with tempfile.TemporaryDirectory() as directory:
        save_file(weights, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        (Path(directory) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        model, found = model_class.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(found.values()), found
    return model.eval()


def with_fused_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of which each layer's experts are `experts.gate_up_proj` and `experts.down_proj`."""
    fused = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for prefix in {name.split(".experts.")[0] for name in weights.keys() - fused.keys()}:

        def stacked(which: str, prefix: str = prefix) -> np.ndarray:
            suffix = f".{which}.weight"
            begin = f"{prefix}.experts."
            names = [name for name in weights if name.startswith(begin) and name.endswith(suffix)]
            names.sort(key=lambda name: int(name.removeprefix(begin).removesuffix(suffix)))
            return np.stack([weights[name] for name in names])

        gate_up = np.concatenate([stacked("gate_proj"), stacked("up_proj")], axis=1)
        fused[f"{prefix}.experts.gate_up_proj"] = gate_up
        fused[f"{prefix}.experts.down_proj"] = stacked("down_proj")
    return fused


def reference_logits(values: dict[str, Any]) -> np.ndarray:
    """Logits at every position of the tiny token run: [NUM_TOKENS, V] float32."""
    token_ids = tiny_weights.token_ids(values["vocab_size"])
    with torch.no_grad():
        output = reference_model(values)(torch.from_numpy(token_ids)[None].long())
    return output.logits[0].float().numpy()


def main() -> None:
    configs = json.loads((HERE / "tiny_configs.json").read_text(encoding="utf-8"))
    wanted = sys.argv[1:] or list(configs)
    logits = {name: reference_logits(configs[name]) for name in wanted}
    kept = {}
    if sys.argv[1:]:
        with np.load(HERE / "logits.npz") as stored:
            kept = dict(stored)
    np.savez_compressed(HERE / "logits.npz", **(kept | logits))
    for name, array in logits.items():
        print(f"{name}: {array.shape}, largest {np.abs(array).max():.3f}")


if __name__ == "__main__":
    main()
