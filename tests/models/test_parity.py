"""Logits against transformers, for a tiny model of every architecture.

Tolerance: 1e-4 absolute in float32 on logits of order 1 to 10; what remains is the order of sums.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.loading.load import load_model

PROMPT_LENGTH = 12
TOLERANCE = 1e-4


_computed: dict[str, np.ndarray] = {}


@pytest.fixture
def our_logits(tiny_name, tiny_checkpoint, run_model, tokens):
    """[T, V] in float32, computed once for all tests that compare it."""
    if tiny_name not in _computed:
        model = load_model(tiny_checkpoint(tiny_name), "float32")
        config = model.config.for_context(len(tokens))
        _computed[tiny_name] = run_model(config, model.weights, tokens, PROMPT_LENGTH)
    return _computed[tiny_name]


def test_prefill_and_decode_match_the_golden_logits(tiny_name, our_logits, golden_logits):
    golden = golden_logits[tiny_name]
    assert np.abs(golden).max() > 0.5, "a model that says nothing proves nothing"
    np.testing.assert_allclose(our_logits, golden, rtol=0, atol=TOLERANCE)


def test_prefill_and_decode_match_transformers_run_live(
    tiny_name, our_logits, make_golden, tiny_values
):
    reference = make_golden.reference_logits(tiny_values(tiny_name))
    np.testing.assert_allclose(our_logits, reference, rtol=0, atol=TOLERANCE)


def test_a_transformers_5_config_means_the_same_model(tiny_name, make_golden, tiny_values):
    from octavo.models.families.table import config_from_hf

    values = tiny_values(tiny_name)
    written = make_golden.reference_model(values).config.to_dict() | {
        "architectures": values["architectures"]
    }
    expected, found = config_from_hf(values), config_from_hf(written)
    assert "rope_parameters" in written or not any(layer.rotary for layer in expected.layers)
    assert replace(found, checkpoint_dtype="") == replace(expected, checkpoint_dtype="")


@pytest.mark.parametrize("tiny_name", ["qwen2", "gemma3"], indirect=True)
def test_bfloat16_stays_near_float32(tiny_name, tiny_checkpoint, run_model, tokens, golden_logits):
    model = load_model(tiny_checkpoint(tiny_name), "bfloat16")
    assert model.weights["embed"].dtype == jnp.bfloat16
    logits = run_model(model.config, model.weights, tokens, PROMPT_LENGTH)
    golden = golden_logits[tiny_name]
    assert logits.dtype == np.float32
    # bfloat16 keeps 8 bits: a few per cent of the logits' spread after several layers.
    assert np.abs(logits - golden).mean() < 0.05 * golden.std()
