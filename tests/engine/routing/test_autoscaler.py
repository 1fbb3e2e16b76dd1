"""How many replicas there should be."""

from __future__ import annotations

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.routing.autoscaler import Autoscaler, Autoscaling


def test_one_overload_is_not_answered_at_every_look() -> None:
    scaler = Autoscaler(Autoscaling(most=10, high=0.5, low=0.1, calm_looks=2))
    assert scaler.wanted(1.0, 2, 0) == 4
    assert scaler.wanted(1.0, 2, 2) == 4
    assert scaler.wanted(0.3, 4, 0) == 4
    assert [scaler.wanted(0.05, 4, 0) for _ in range(3)] == [4, 3, 4]


@pytest.mark.parametrize(
    "text",
    ["moods", "saturation:least=9,most=3", "saturation:high=0.1,low=0.5", "saturation:size=3"],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="autoscale"):
        Autoscaling.parse(text)
