"""The textbook workload, played by the real scheduler within its pages."""

from __future__ import annotations

import pytest

from benchmarks import textbook


@pytest.mark.parametrize(
    ("policy", "cost_model", "least", "most"),
    [
        ("fcfs", "swap", 29, 31),
        ("edf", "swap", 64, 68),
        ("edf-shed:lengths=declared", "swap", 70, 72),
        ("edf-shed:lengths=declared", "recompute", 70, 72),
        ("edf-shed:lengths=declared", "restart", 68, 70),
        ("slo:lengths=declared", "swap", 72, 74),
        ("slo:lengths=declared (class means)", "swap", 69, 74),
    ],
)
def test_as_many_are_on_time_as_is_known(policy, cost_model, least, most):
    (figures,) = textbook.run((policy,), (cost_model,))
    assert least <= figures["goodput"] <= most
    assert figures["peak_pages"] <= textbook.NUM_PAGES
