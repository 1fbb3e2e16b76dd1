"""The packaged models against transformers on the same dequantized weights.

Tolerance: 1e-3 absolute in float32 on logits of up to 20 to 35; what remains is the order of sums
over 18 or 30 layers. Greedy tokens must be equal.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.models.loading.load import load_model
from octavo.models.packaged import PACKAGED_MODELS

PROMPTS = {
    # "The capital of France is", in each model's own tokens.
    "smollm2-135m": [504, 3575, 282, 4649, 314],
    "gemma3-270m": [2, 818, 5279, 529, 7001, 563],
}
CONTINUATIONS = {
    # What transformers goes on with, greedily: " Paris.\n\nThe capital is F", and
    # " the capital of the French of France.".
    "smollm2-135m": [7042, 30, 198, 198, 504, 2988, 314, 42],
    "gemma3-270m": [506, 5279, 529, 506, 2891, 529, 7001, 236761],
}
TOLERANCE = 1e-3


@pytest.fixture(params=sorted(PROMPTS))
def packaged(request):
    if not PACKAGED_MODELS[request.param].is_installed():
        pytest.skip(f"{request.param} is not installed")
    return request.param


_computed: dict[str, np.ndarray] = {}


@pytest.fixture
def our_logits(packaged, run_model):
    """Logits at each token of prompt and continuation, computed once for all tests."""
    if packaged not in _computed:
        model = load_model(packaged, "float32")
        ids = PROMPTS[packaged] + CONTINUATIONS[packaged]
        _computed[packaged] = run_model(model.config, model.weights, ids, len(PROMPTS[packaged]))
    return _computed[packaged]


def test_greedy_tokens_are_those_that_transformers_chose(packaged, our_logits):
    first = len(PROMPTS[packaged]) - 1
    assert our_logits.argmax(-1)[first:-1].tolist() == CONTINUATIONS[packaged]


def test_logits_match_transformers_run_live(packaged, our_logits, record_property):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # transformers reads GGUF files with it
    transformers = pytest.importorskip("transformers")
    path = PACKAGED_MODELS[packaged].path()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[packaged] + CONTINUATIONS[packaged]])
        expected = reference(ids).logits[0].numpy()
    error = float(np.abs(our_logits - expected).max())
    record_property("max_error", error)
    assert error < TOLERANCE
    np.testing.assert_array_equal(our_logits.argmax(-1), expected.argmax(-1))
