"""Write logits.npz: what transformers (torch, float32) says of every tiny model.

    python tests/golden/make_golden.py

needs torch and octavo's own dependencies. Weights are not stored: `tiny_weights.py` makes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_weights
import torch
import transformers

from octavo.models.families.table import config_from_hf
from octavo.models.loading.tensors import expected_shapes

HERE = Path(__file__).parent


def reference_model(values: dict[str, Any]) -> torch.nn.Module:
    """A tiny model in transformers, with the weights of `tiny_weights`."""
    config = config_from_hf(values)
    model_class = getattr(transformers, values["architectures"][0])
    fields = {name: value for name, value in values.items() if name != "architectures"}
    reference_config = model_class.config_class(**fields)
    reference_config._attn_implementation = "eager"
    model = model_class(reference_config).eval()
    weights = tiny_weights.tensors(expected_shapes(config), config.final_norm.offset)
    state = {name: torch.from_numpy(tensor) for name, tensor in weights.items()}
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys, result.unexpected_keys
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert result.missing_keys in ([], tied), result.missing_keys
    return model


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
