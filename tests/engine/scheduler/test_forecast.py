"""What is made of step times: means that forget, and first tokens that are predicted."""

from __future__ import annotations

import pytest

from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.length_estimator import LengthEstimator
from octavo.engine.scheduler.load import Backlog, first_token_s
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.scheduler.step_time_model import StepFeatures, StepTimeModel

LIMITS = StepLimits(
    max_num_batched_tokens=64, max_num_seqs=8, max_num_steps=1, max_prefill_rows=4,
    max_pages_per_seq=128, page_size=4, num_pages=257, max_model_len=512, token_edges=(8, 64),
)  # fmt: skip


def seconds(features: StepFeatures) -> float:
    return 0.01 + 0.001 * features.num_prefill + 0.0001 * features.num_decode


@pytest.fixture
def forecast() -> Forecast:
    return Forecast(
        limits=LIMITS,
        step_time=StepTimeModel(LIMITS.token_edges),
        lengths=LengthEstimator(LIMITS.max_model_len),
    )


def run(forecast: Forecast, count: int, *, slow: float = 1.0, begin_s: float = 0.0) -> None:
    """Full steps and decode steps in turn."""
    for number in range(count):
        for features in (StepFeatures(4, 60, 40.0, 0.0), StepFeatures(4, 0, 40.0)):
            forecast.observe_budget(60, 4, 40.0)
            forecast.observe_step(features, slow * seconds(features), 1, begin_s + 0.1 * number)


def test_a_full_step_costs_what_is_known_of_it_after_its_first(forecast: Forecast) -> None:
    run(forecast, 3)
    assert forecast.full_step_s == pytest.approx(0.0704, rel=0.1)
    assert forecast.prefill_token_s == pytest.approx(0.0704 / 60, rel=0.1)


@pytest.mark.parametrize("slow", [6.0, 1 / 6])
def test_all_means_follow_a_change_of_speed_at_once(forecast: Forecast, slow: float) -> None:
    run(forecast, 200)
    before = (forecast.full_step_s, forecast.prefill_token_s, forecast.step_s)
    run(forecast, 4, slow=slow, begin_s=20.0)
    after = (forecast.full_step_s, forecast.prefill_token_s, forecast.step_s)
    assert after == pytest.approx([slow * value for value in before], rel=0.1)


def test_a_step_that_hung_changes_no_mean(forecast: Forecast) -> None:
    run(forecast, 200)
    before = forecast.full_step_s
    run(forecast, 1, slow=500.0, begin_s=20.0)
    assert forecast.full_step_s == pytest.approx(before, rel=0.1)


def test_refusals_take_the_low_quantile_and_it_fades(forecast: Forecast) -> None:
    run(forecast, 200)
    alone_s = forecast.alone_prefill_s(60)
    assert forecast.least_prefill_s(60, 20.0) == pytest.approx(alone_s, rel=0.05)
    assert forecast.least_prefill_s(60, 22.0) < 0.6 * alone_s
    assert forecast.best_prefill_s(60) == pytest.approx(alone_s, rel=0.05)
    assert forecast.alone_prefill_s(60) == alone_s


def test_the_hosts_time_counts_once_and_the_gap_for_each_further_step(forecast: Forecast) -> None:
    run(forecast, 200)
    without_s = forecast.alone_prefill_s(100)  # two steps
    for _ in range(16):
        forecast.host_s.observe(0.03)
        forecast.gap_s.observe(0.002)
    assert forecast.alone_prefill_s(100) == pytest.approx(without_s + 0.032)
    assert forecast.alone_prefill_s(0) == 0.0


NOBODY = Backlog(0, 0, 0)


def test_a_first_token_comes_after_what_is_before_it(drive, request_of) -> None:
    driver = drive(
        {
            "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_prefill_rows": 8,
            "num_pages": 257, "max_model_len": 512, "max_pages_per_seq": 128,
            "token_edges": (64,),
        },
        step_time=StepTimeModel((64,), fixed_s=0.01, decode_row_s=0.0, prefill_token_s=0.001),
    )  # fmt: skip
    scheduler = driver.scheduler
    table, forecast = scheduler._table, scheduler.forecast
    assert first_token_s(table, forecast, 40, NOBODY, 0.0) == pytest.approx(0.05)
    assert first_token_s(table, forecast, 40, Backlog(80, 1, 0), 0.0) == pytest.approx(0.14)
    request = driver.add(request_of("a", [1] * 40))
    assert request.metrics.predicted_ttft_s == pytest.approx(0.05)
    later = driver.add(request_of("b", [2] * 20))
    assert later.metrics.predicted_ttft_s == pytest.approx(0.07)
    driver.plan()
    # What was dispatched comes to its end first.
    third = driver.add(request_of("c", [3] * 10))
    assert third.metrics.predicted_ttft_s > 0.07
    driver.drain()


def test_a_first_token_waits_for_a_row(drive, request_of) -> None:
    driver = drive({"max_num_seqs": 1}, step_time=StepTimeModel((16,), fixed_s=1.0))
    driver.add(request_of("running", [1] * 4, 40))
    driver.turn()
    driver.turn()
    waiting = driver.add(request_of("waiting", [2] * 4, 40))
    # Of the 40 tokens of the row about as many as that are still to come, a second each.
    assert 10.0 < waiting.metrics.predicted_ttft_s < 60.0
    driver.drain()
