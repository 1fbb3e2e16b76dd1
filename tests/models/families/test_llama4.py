"""What Llama 4 reads of its files, and what of it is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.families.table import config_from_hf
from octavo.models.rope import Rope, Temperature


def kinds(values: dict[str, Any]) -> list[str]:
    """A layer each: C of chunks, T of a temperature, D of a dense MLP."""
    found = []
    for layer in config_from_hf(values).layers:
        mixer = layer.mixer
        marks = "C" if mixer.attention_chunk else ""
        marks += "T" if mixer.rope is not None and mixer.rope.temperature else ""
        found.append(marks + ("" if isinstance(layer.feed_forward, Experts) else "D"))
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["C", "C", "C", "T"]),
        ({"no_rope_layer_interval": 2}, ["C", "T", "C", "T"]),
        ({"no_rope_layers": []}, ["C", "C", "C", "T"]),
        ({"no_rope_layers": [0, 1, 1, 1, 0]}, ["T", "C", "C", "C"]),
        ({"interleave_moe_layer_step": 2}, ["CD", "C", "CD", "T"]),
        ({"moe_layers": [0]}, ["C", "CD", "CD", "TD"]),
        ({"attention_chunk_size": None}, ["", "", "", "T"]),
        ({"attn_temperature_tuning": False}, ["C", "C", "C", ""]),
        (
            {"layer_types": ["full_attention"] * 2 + ["chunked_attention"] * 2},
            ["", "", "C", "CT"],
        ),
    ],
)
def test_layers_are_what_the_file_says(
    changes: dict[str, Any], expected: list[str], tiny_values: Any
) -> None:
    assert kinds(tiny_values("llama4") | changes) == expected


def test_chunks_of_which_a_file_says_nothing_are_those_of_all_there_are(tiny_values: Any) -> None:
    values = tiny_values("llama4")
    del values["attention_chunk_size"]
    mixer = config_from_hf(values).layers[0].mixer
    assert mixer.attention_chunk == 8192
    assert mixer.cache().window == 8192


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0] is not allowed"),
        ({"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers = [1, 0, 2, 1] is not allowed"),
        ({"moe_layers": [4]}, "moe_layers = [4] is not allowed: a list of layers from 0 to 3"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0 is not allowed"),
        ({"head_dim": None}, "lacks head_dim"),
        ({"floor_scale": 0}, "floor_scale = 0 is not allowed"),
        ({"sliding_window": 8}, "sliding_window = 8 is not supported"),
    ],
)
def test_what_is_not_implemented_or_malformed_is_refused_by_name(
    changes: dict[str, Any], words: str, tiny_values: Any
) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        config_from_hf(tiny_values("llama4") | changes)
    assert words in str(caught.value)


def test_chunks_and_a_window_exclude_each_other() -> None:
    with pytest.raises(ModelLoadError, match="attention_chunk_size = 4 is not allowed"):
        Attention(
            num_heads=1, num_kv_heads=1, head_dim=8, rope=Rope(), sliding_window=4,
            attention_chunk=4,
        )  # fmt: skip
    with pytest.raises(ModelLoadError, match="attention temperature first = 2"):
        Temperature(beta=0.1, span=8, first=2)
