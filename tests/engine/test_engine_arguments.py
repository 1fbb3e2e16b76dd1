"""Arguments written for vLLM: what changes no answer is taken, the rest refused by name."""

from __future__ import annotations

import logging

import pytest

from octavo.engine import engine_arguments
from octavo.engine.config import EngineConfig
from octavo.engine.engine_arguments import NEUTRAL, WITHOUT_EFFECT, engine_config
from octavo.engine.errors import InvalidConfigError


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process() -> None:
    engine_arguments._warn.cache_clear()


def test_arguments_without_effect_are_taken_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"enforce_eager": True, "disable_log_stats": False, "swap_space": 4, "max_num_seqs": 7}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            config = engine_config("path", dict(given))
    assert config == EngineConfig(model="path", max_num_seqs=7)
    (record,) = caplog.records
    assert record.getMessage().endswith(": disable_log_stats, enforce_eager, swap_space")


def test_no_argument_of_octavos_own_is_among_them() -> None:
    fields = set(EngineConfig.__dataclass_fields__)
    assert not fields & (WITHOUT_EFFECT | set(NEUTRAL))
    assert not WITHOUT_EFFECT & set(NEUTRAL)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_asks_for_nothing_is_taken_and_all_else_refused(name: str) -> None:
    values, allowed = NEUTRAL[name]
    for value in values:
        engine_config(None, {name: value})
    for value in ("x", 17, True, ["x"], {"x": 1}, 1.5):
        with pytest.raises(InvalidConfigError) as caught:
            engine_config(None, {name: value})
        assert (caught.value.field, caught.value.allowed) == (name, allowed)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_num_seq", "max_num_seqs"), ("gpu_memory_utilisation", "gpu_memory_utilization")],
)
def test_a_slip_of_the_pen_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"did you mean {hint}"):
        engine_config(None, {name: 1, "enforce_eager": True})
