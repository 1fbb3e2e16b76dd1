"""What a step costs is learned from steps that ran."""

from __future__ import annotations

import random

import pytest

from octavo.engine.scheduler.step_time_model import StepFeatures, StepTimeModel

EDGES = (64, 256, 1024, 4096)


def true_s(features, scale=1.0):
    """A machine with a fixed cost for each bucket and slopes for everything else."""
    num_tokens = features.num_decode + features.num_prefill
    fixed = 0.004 + 0.002 * sum(num_tokens > edge for edge in EDGES)
    return scale * (
        fixed
        + 1e-4 * features.num_decode
        + 8e-5 * features.num_prefill
        + 2e-7 * features.decode_context
        + 5e-9 * features.prefill_context
    )


def random_features(rng):
    num_decode = rng.randint(1, 128)
    num_prefill = rng.choice([0, 0, rng.randint(1, 500), rng.randint(1, 3500)])
    return StepFeatures(
        num_decode,
        num_prefill,
        num_decode * rng.randint(50, 3000),
        num_prefill * float(rng.randint(0, 3000)),
    )


def learned(num_steps, seed=0, noise=0.0, scale=1.0, model=None):
    rng = random.Random(seed)
    model = model or StepTimeModel(EDGES)
    for _ in range(num_steps):
        features = random_features(rng)
        seconds = true_s(features, scale) * (1 + noise * rng.uniform(-1, 1))
        model.observe(features, seconds, 0.0)
    return model


def error(model, seed=99, scale=1.0):
    rng = random.Random(seed)
    errors = []
    for _ in range(300):
        features = random_features(rng)
        errors.append(abs(model.predict_s(features) / true_s(features, scale) - 1))
    return sum(errors) / len(errors)


def test_it_prices_mixed_steps_within_a_few_percent():
    assert error(learned(300)) < 0.02
    assert error(learned(2000, noise=0.2)) < 0.04


def test_a_mean_of_seconds_a_token_would_be_far_off():
    rng = random.Random(5)
    steps = [random_features(rng) for _ in range(500)]
    tokens = sum(step.num_decode + step.num_prefill for step in steps)
    mean_s = sum(map(true_s, steps)) / tokens
    errors = [abs(mean_s * (s.num_decode + s.num_prefill) / true_s(s) - 1) for s in steps]
    assert sum(errors) / len(errors) > 10 * error(learned(300))


def test_before_any_step_it_says_what_it_was_told():
    model = StepTimeModel(EDGES, fixed_s=0.5, decode_row_s=0.01, prefill_token_s=0.001)
    assert model.predict_s(StepFeatures(10, 100)) == pytest.approx(0.5 + 0.1 + 0.1)


def test_an_abrupt_change_is_followed_within_some_tens_of_steps():
    model = learned(1000)
    learned(60, seed=3, scale=2.0, model=model)
    assert error(model, scale=2.0) < 0.1


def test_a_step_that_hung_does_not_spoil_it():
    model = learned(500)
    model.observe(StepFeatures(8, 0, 800), 100.0, 0.0)
    assert error(model) < 0.1


def test_the_safety_factor_covers_nineteen_steps_in_twenty():
    rng = random.Random(1)
    model = learned(3000, noise=0.3)
    covered = 0
    for _ in range(2000):
        features = random_features(rng)
        seconds = true_s(features) * (1 + 0.3 * rng.uniform(-1, 1))
        covered += seconds <= model.predict_s(features) * model.safety
        model.observe(features, seconds, 0.0)
    assert 0.92 < covered / 2000 < 0.98


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.05, 0.1, 0.25])
def test_the_largest_chunk_within_a_time_is_priced_at_most_that(seconds):
    model = learned(500)
    for num_decode, context in ((0, 0.0), (32, 32_000.0)):
        tokens = model.prefill_tokens_within(seconds, num_decode, context, 100.0)
        if tokens:
            features = StepFeatures(num_decode, tokens, context, tokens * 100.0)
            assert model.predict_s(features) <= seconds * 1.0001
        larger = tokens + 65
        features = StepFeatures(num_decode, larger, context, larger * 100.0)
        assert model.predict_s(features) > seconds


def test_no_larger_chunk_fits_the_time_whatever_the_buckets_cost():
    rng = random.Random(3)
    model = StepTimeModel(EDGES)
    for _ in range(100):
        model.observe(random_features(rng), rng.uniform(0.01, 0.2), 0.0)
        num_decode, context = rng.randrange(300), rng.uniform(0, 1e5)
        seconds = rng.uniform(0.0, 0.3)
        most = model.prefill_tokens_within(seconds, num_decode, context, 0.0)
        for num_prefill in range(most + 1, 5000, 97):
            features = StepFeatures(num_decode, num_prefill, context, 0.0)
            assert model.predict_s(features) > seconds * (1 - 1e-9)


@pytest.mark.parametrize("row_s", [0.002, 0.009])
def test_on_a_cpu_a_few_steps_of_several_rows_teach_what_a_row_costs(row_s):
    rng = random.Random(3)
    model = StepTimeModel.of(EDGES, has_dear_rows=True)

    def observe(num_rows: int) -> None:
        features = StepFeatures(num_rows, 0, num_rows * 100)
        seconds = (0.001 + row_s * num_rows) * rng.uniform(0.9, 1.1)
        model.observe(features, seconds, 0.0)

    for _ in range(400):
        observe(1)
    for _ in range(3):
        observe(5)
    assert model.predict_s(StepFeatures(5, 0, 500)) == pytest.approx(0.001 + 5 * row_s, rel=0.2)
    assert model.predict_s(StepFeatures(1, 0, 100)) == pytest.approx(0.001 + row_s, rel=0.1)


def test_elsewhere_noisy_steps_of_few_rows_do_not_price_many():
    for seed in range(20):
        rng = random.Random(seed)
        model = StepTimeModel.of(EDGES, has_dear_rows=False)
        for _ in range(12):
            num_rows = rng.randint(1, 3)
            model.observe(StepFeatures(num_rows, 0, 100 * num_rows), rng.uniform(0.008, 0.012), 0.0)
        assert model.predict_s(StepFeatures(64, 0, 6400)) < 0.03


def test_steps_that_were_held_up_do_not_make_others_free():
    for seed in range(100):
        rng = random.Random(seed)
        model = StepTimeModel.of(EDGES, has_dear_rows=True)
        fastest_s = 1.0
        for _ in range(60):
            num_decode, num_prefill = rng.randint(0, 4), rng.choice([0, 3, 14, 60, 200])
            seconds = (0.02 + 8e-4 * (num_decode + num_prefill)) * rng.uniform(0.9, 1.1)
            if rng.random() < 0.1:
                seconds *= rng.uniform(2, 20)
            model.observe(StepFeatures(num_decode, num_prefill, num_decode * 50), seconds, 0.0)
            fastest_s = min(fastest_s, seconds)
            expected = [model.predict_s(StepFeatures(0, length)) for length in (1, 14, 200)]
            expected += model.predict_edges_s(0, 0, 0.0, 0.0)
            expected.append(model.predict_prefill_s(14))
            assert min(expected) >= 0.2 * fastest_s
            assert model.prefill_tokens_within(0.2 * fastest_s, 0, 0.0, 0.0) == 0
