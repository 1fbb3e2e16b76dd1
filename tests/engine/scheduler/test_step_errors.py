"""The level of step times, the low quantile, and how both forget."""

from __future__ import annotations

import pytest

from octavo.engine.scheduler.forecast import RecentValues
from octavo.engine.scheduler.step_time_model import MOST_DOUBT, StepErrors


def seen(ratios, errors=None, *, now_s=0.0, safety=1.1):
    errors = errors or StepErrors()
    for ratio in ratios:
        errors.observe(ratio, now_s, is_news=True, safety=safety)
    return errors


@pytest.mark.parametrize("shift", [1 / 6, 1 / 2, 2.0, 6.0])
def test_three_steps_in_a_row_are_a_shift_of_the_level(shift):
    errors = seen([1.0] * 50)
    assert seen([shift] * 3, errors).level == pytest.approx(shift)


def test_one_step_that_hung_is_none():
    errors = seen([1.0] * 50)
    seen([1000.0], errors)
    assert errors.level < 1.03
    assert errors.low(0.0) > 0.97
    seen([1.0, 1000.0, 1.0, 1000.0], errors)
    assert errors.level < 1.1


def test_the_low_quantile_sinks_at_the_second_fast_step_and_rises_after_sixteen():
    errors = seen([1.0] * 50)
    seen([0.3], errors)
    assert errors.low(0.0) * errors.level > 0.9
    seen([0.3], errors)
    assert errors.low(0.0) * errors.level == pytest.approx(0.3)
    errors = seen([1.0] * 50)
    seen([5.0] * 14, errors)
    assert errors.low(0.0) * errors.level == pytest.approx(1.0)
    seen([5.0] * 2, errors)
    assert errors.low(0.0) * errors.level == pytest.approx(5.0)


def test_belief_fades_with_the_time_since_the_last_step():
    errors = seen([1.0] * 50, now_s=100.0)
    assert errors.doubt(101.0) == 1.0
    assert errors.doubt(101.75) == pytest.approx(2.0)
    assert errors.low(101.75) == pytest.approx(0.5)
    assert errors.doubt(105.0) == MOST_DOUBT
    assert errors.doubt(1e9) == MOST_DOUBT
    assert errors.doubt(errors.doubted_s(6.0)) == pytest.approx(6.0)
    assert errors.doubted_s(MOST_DOUBT + 1) == float("inf")


def test_after_a_pause_one_fast_step_is_believed_and_a_slow_one_is_not():
    errors = seen([1.0] * 50)
    assert seen([1 / 7], errors, now_s=60.0).level == pytest.approx(1 / 7)
    errors = seen([1.0] * 50)
    assert seen([7.0], errors, now_s=60.0).level < 1.03


def test_what_an_idle_machine_can_do_outlasts_a_disturbance():
    errors = seen([1.0] * 50)
    seen([6.0] * 100, errors)
    assert errors.low(0.0) == pytest.approx(1.0)
    assert errors.best * errors.level < 1.2
    seen([6.0] * 3000, errors)  # but not for ever: it may be another machine now
    assert errors.best * errors.level == pytest.approx(6.0)


def test_before_any_step_the_prior_is_believed():
    assert StepErrors().low(1e6) == 1.0


def test_recent_values_are_those_of_the_last_sixteen():
    values = RecentValues()
    assert (values.low, values.middle) == (0.0, 0.0)
    for value in (9.0, 1.0, 5.0):
        values.observe(value)
    assert (values.low, values.middle) == (1.0, 5.0)
    for _ in range(16):
        values.observe(2.0)
    assert (values.low, values.middle) == (2.0, 2.0)
