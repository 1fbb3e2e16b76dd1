"""What Nemotron-H reads of its files, and what of it is refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.families.table import config_from_hf
from octavo.models.loading.load import load_model


def test_layers_may_be_named_in_a_list_or_by_letters(tiny_values: Any) -> None:
    values = tiny_values("nemotron_h")
    named = {"M": "mamba", "-": "mlp", "*": "attention"}
    listed = [named[letter] for letter in values.pop("hybrid_override_pattern")]
    assert config_from_hf(values | {"layers_block_type": listed}) == config_from_hf(
        tiny_values("nemotron_h")
    )


def test_tensors_are_found_under_the_names_that_files_have(
    tiny_checkpoint: Callable[..., Any], tiny_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    tensors = tiny_tensors("nemotron_h")
    stored = {
        name.replace("model.embed_tokens.", "model.embeddings.").replace(
            "model.", "backbone."
        ): each
        for name, each in tensors.items()
    }
    assert "backbone.embeddings.weight" in stored
    found = load_model(tiny_checkpoint("nemotron_h", stored), "float32").weights
    found = jax.tree.map(np.array, found)  # the other checkpoint takes the same place
    expected = load_model(tiny_checkpoint("nemotron_h", tensors), "float32").weights
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_experts_without_gates_hold_two_matrices_each(tiny_values: Any) -> None:
    experts = config_from_hf(tiny_values("nemotron_h_moe")).layers[1].feed_forward
    assert experts.num_weights(32) == 32 * 8 + 2 * 32 * (3 * 24 + 28)
    assert experts.num_idle_weights(32) == 2 * 32 * 24 * 5


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M-MX*-"}, "layers_block_type = "),
        ("nemotron_h", {"hybrid_override_pattern": ""}, "layers_block_type = [] is not allowed"),
        ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers = 5 is not allowed: 6"),
        ("nemotron_h", {"hybrid_override_pattern": "M-MM--"}, "at least one with attention"),
        ("nemotron_h", {"use_bias": True}, "use_bias = True"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
        ("nemotron_h", {"sliding_window": 8}, "sliding_window = 8 is not supported"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, "moe_latent_size = 16"),
        ("nemotron_h_moe", {"n_shared_experts": 2}, "n_shared_experts = 2"),
    ],
)
def test_what_is_not_implemented_or_malformed_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str, tiny_values: Any
) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        config_from_hf(tiny_values(name) | changes)
    assert words in str(caught.value)
