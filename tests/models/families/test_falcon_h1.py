"""What Falcon-H1 reads of its files, and what of it is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.cache_spec import PagedKVCache, RecurrentState
from octavo.models.families.table import config_from_hf


def test_every_layer_keeps_pages_and_a_state(tiny_values: Any) -> None:
    config = config_from_hf(tiny_values("falcon_h1"))
    kinds = [tuple(map(type, caches)) for caches in config.caches()]
    assert kinds == [(PagedKVCache, RecurrentState)] * 2
    assert config.cache_places() == ((0, 1), (2, 3))
    layout = config.cache_layout()
    assert (len(layout.arrays), len(layout.states)) == (2, 2)


@pytest.mark.parametrize(
    "name",
    [
        *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier"),
        *("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier"),
    ],
)
def test_each_multiplier_matters_and_is_above_zero(name: str, tiny_values: Any) -> None:
    values = tiny_values("falcon_h1")
    assert config_from_hf(values | {name: 0.77}) != config_from_hf(values)
    with pytest.raises(ModelLoadError, match=f"{name} = -0.5 is not allowed"):
        config_from_hf(values | {name: -0.5})


@pytest.mark.parametrize(("name", "count"), [("mlp_multipliers", 2), ("ssm_multipliers", 5)])
def test_each_of_several_multipliers_matters(name: str, count: int, tiny_values: Any) -> None:
    values, ones = tiny_values("falcon_h1"), [1.0] * count
    made = {
        config_from_hf(values | {name: [*ones[:place], 0.5, *ones[place + 1 :]]})
        for place in range(count)
    }
    assert len(made | {config_from_hf(values | {name: None})}) == count + 1
    for wrong in (ones[1:], [*ones, 1.0], [*ones[1:], 0.0]):
        with pytest.raises(ModelLoadError, match=f"{count} numbers above 0"):
            config_from_hf(values | {name: wrong})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"projectors_bias": True}, "projectors_bias = True is not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias = True is not supported"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp = False is not supported"),
        ({"attn_layer_indices": [0]}, "attn_layer_indices = [0] is not supported"),
        ({"mamba_d_ssm": 40}, "mamba_d_head = 8 is not allowed: mamba_d_ssm (40)"),
        ({"layer_types": ["hybrid", "mamba"]}, "a list of hybrid"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit = [0.0, 0.1]"),
    ],
)
def test_what_is_not_implemented_or_malformed_is_refused_by_name(
    changes: dict[str, Any], words: str, tiny_values: Any
) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        config_from_hf(tiny_values("falcon_h1") | changes)
    assert words in str(caught.value)
