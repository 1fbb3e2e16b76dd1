"""How long an answer will be, by its class and by how far it has come."""

from __future__ import annotations

import random

import pytest

from octavo.engine.request import Priority
from octavo.engine.scheduler.length_estimator import LengthEstimator


def ended(request_of, length, **fields):
    request = request_of(max_tokens=4096, **fields)
    request.output_token_ids.extend([7] * length)
    return request


def at(request_of, num_emitted, max_tokens=4096, **fields):
    request = request_of(max_tokens=max_tokens, **fields)
    request.output_token_ids.extend([7] * num_emitted)
    return request


@pytest.fixture
def lengths(request_of):
    estimator, rng = LengthEstimator(4096), random.Random(0)
    for _ in range(400):
        estimator.observe(ended(request_of, rng.randint(80, 120), output_len_class="chat"))
        estimator.observe(ended(request_of, rng.choice([10, 1000]), output_len_class="code"))
    return estimator


def test_classes_have_lengths_of_their_own(lengths, request_of):
    chat = lengths.expected(at(request_of, 0, output_len_class="chat"))
    assert chat == pytest.approx(100, rel=0.15)
    code = lengths.expected(at(request_of, 0, output_len_class="code"))
    assert code == pytest.approx(505, rel=0.15)


def test_quantiles_bracket_the_mean(lengths, request_of):
    request = at(request_of, 0, output_len_class="code")
    low, middle, high = (lengths.quantile(request, index) for index in range(3))
    assert low <= middle <= high
    assert low == pytest.approx(10, rel=0.2)
    assert high == pytest.approx(1000, rel=0.2)


def test_a_row_that_outlived_the_short_ones_is_expected_to_be_long(lengths, request_of):
    remaining = lengths.expected(at(request_of, 50, output_len_class="code"))
    assert remaining == pytest.approx(950, rel=0.2)
    late = lengths.expected(at(request_of, 100, output_len_class="chat"))
    assert 1 <= late < 30


def test_nothing_beyond_the_limit_is_expected(lengths, request_of):
    assert lengths.expected(at(request_of, 5, max_tokens=8, output_len_class="code")) <= 3


def test_beyond_everything_seen_it_goes_on_as_long_again(lengths, request_of):
    assert lengths.expected(at(request_of, 400, output_len_class="chat")) > 100


def test_without_a_class_priority_and_tenant_speak(request_of):
    estimator = LengthEstimator(4096)
    assert estimator.length_class(request_of(tenant="a")) != estimator.length_class(request_of())
    assert estimator.length_class(request_of(output_len_class="x", tenant="a")) == "x"


def test_several_are_expected_to_be_as_long_as_one_by_one(lengths, request_of):
    rng = random.Random(3)
    requests = [
        at(
            request_of,
            rng.choice([0, 0, 5, 90, 3000]),
            max_tokens=rng.choice([3001, 4096]),
            output_len_class=rng.choice(["chat", "code", ""]),
            tenant=rng.choice(["", "a"]),
            priority=Priority(rng.randrange(4)),
        )
        for _ in range(60)
    ]
    assert lengths.expected_each(requests) == [lengths.expected(request) for request in requests]
