"""Tokens that a grammar forces are appended together, and the text is the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.request import RequestStatus
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.step_time_model import StepTimeModel

WITH_GRAMMAR = {"structured_outputs": {"json_object": True}}


def with_grammar(request_of: Any, name: str, prompt: Any = 4, max_tokens: int = 12) -> Any:
    return request_of(name, prompt, max_tokens, params=WITH_GRAMMAR)


def forcing(driver: Any) -> Any:
    driver.scheduler.appends_all_forced = True
    return driver


def test_forced_tokens_are_one_chunk_of_the_next_step(drive, request_of):
    driver = forcing(drive(depth=1))
    held = driver.add(with_grammar(request_of, "g", [1] * 4, 12))
    driver.add(request_of("free", [2] * 4, 12))
    driver.turn()
    driver.turn()
    assert len(held.output_token_ids) == 1
    assert driver.unblock(held, 6) == 6
    plan = driver.turn()
    [chunk] = plan.prefill_rows
    # The newest token, which was never an input, and the forced ones; the next one is sampled.
    assert (chunk.request, chunk.start, chunk.num_tokens, chunk.samples) == (held, 4, 7, True)
    assert chunk.is_new
    assert [row.request.request_id for row in plan.decode_rows] == ["free"]
    driver.turn()
    assert len(held.output_token_ids) == 8
    driver.unblock(held)
    assert "g" in [row.request.request_id for row in driver.turn().decode_rows]
    while driver.scheduler.has_work:
        driver.turn()
        driver.unblock(held)
    driver.check_ends()


@pytest.mark.parametrize("num_forced", [3, 11, 40])
def test_a_request_ends_at_its_limit_or_its_stop_within_what_is_forced(
    drive, request_of, num_forced
):
    driver = forcing(drive())
    limited = driver.add(with_grammar(request_of, "limit", [1] * 4, 4))
    stopped = driver.add(
        request_of("stop", [2] * 4, 12, params={**WITH_GRAMMAR, "stop_token_ids": range(0, 23, 4)})
    )
    driver.turn()
    for request in (limited, stopped):
        if not request.status.is_finished:
            driver.unblock(request, num_forced)
    assert limited.status is RequestStatus.LENGTH
    while driver.scheduler.has_work:
        driver.turn()
        driver.unblock(stopped, num_forced)
    driver.check_ends()


def test_an_offer_that_is_out_of_date_or_of_nobody_appends_nothing(drive, request_of):
    driver = forcing(drive())
    held = driver.add(with_grammar(request_of, "g"))
    driver.turn()
    offers = [Unblocked("g", held.num_tokens - 1, (1, 2)), Unblocked("nobody", 5, (1, 2))]
    assert not driver.scheduler.append_forced(offers, 0.0).items
    driver.cancel("g")
    assert not driver.scheduler.append_forced([Unblocked("g", 5, (1, 2))], 0.0).items


def test_forced_rows_come_before_prompts_and_get_at_least_what_decoding_would(drive, request_of):
    driver = forcing(drive(policy="fcfs:token_budget=1"))
    held = driver.add(with_grammar(request_of, "g", [1] * 2, 20))
    while not held.output_token_ids:
        driver.turn()
    driver.add(request_of("decodes", [3], 40))
    driver.turn()
    driver.add(request_of("prompt", [2] * 30, 2))
    driver.unblock(held, 8)
    for _ in range(9):  # a token a step, as the policy leaves no more
        plan = driver.turn()
        assert [row.request.request_id for row in plan.decode_rows] == ["decodes"]
        assert [(row.request, row.num_tokens) for row in plan.prefill_rows] == [(held, 1)]
    driver.unblock(held)
    driver.cancel("g")
    driver.drain()


def model(decode_row_s: float, prefill_token_s: float, fixed_s: float = 0.01) -> StepTimeModel:
    return StepTimeModel(
        (16,), fixed_s=fixed_s, decode_row_s=decode_row_s, prefill_token_s=prefill_token_s
    )


@pytest.mark.parametrize(
    ("step_time", "num_free", "num_forced", "is_worth_it"),
    [
        (model(1e-5, 1e-5), 3, 2, True),  # steps wait for weights: a chunk costs next to nothing
        (model(0.009, 0.012, 0.001), 0, 3, False),  # a chunk's tokens are dearer than a row's
        (model(0.009, 0.003, 0.001), 0, 8, True),  # or cheaper
        (model(0.009, 0.030, 0.009), 0, 2, False),
        (model(0.009, 0.009, 0.009), 3, 2, True),  # the row would sit out every second step
        (model(0.009, 0.030, 0.009), 3, 2, False),  # three others would wait for it
    ],
)
def test_what_is_forced_is_appended_where_that_saves_more_than_it_costs_all_rows(
    drive, request_of, step_time, num_free, num_forced, is_worth_it
):
    driver = drive(step_time=step_time)
    held = driver.add(with_grammar(request_of, "g", [1] * 4, 20))
    for index in range(num_free):
        driver.add(request_of(f"free{index}", [2], 30))
    while not held.output_token_ids:
        driver.turn()
    assert (driver.unblock(held, num_forced) > 0) == is_worth_it
    driver.cancel("g")
    driver.drain()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 2),
    num_host=st.sampled_from([0, 12]),
    is_priced=st.booleans(),
    is_split=st.booleans(),
)
@pytest.mark.parametrize(
    "policy", ["fcfs", "slo", "mlfq", "orca:prefill=alone", "fcfs:token_budget=5", "static"]
)
def test_whatever_is_forced_and_when_texts_and_books_are_right(
    fakes, policy, seed, depth, num_host, is_priced, is_split
):
    rng = random.Random(seed)
    limits = fakes.limits(
        num_pages=rng.choice([18, 30]),
        max_num_seqs=3,
        num_host_pages=num_host,
        max_num_batched_tokens=rng.choice([5, 16]),
    )
    driver = fakes.Driver(
        limits, depth=depth, policy=policy, num_decode_steps=4, watermark=0.0,
        enable_prefix_caching=rng.random() < 0.8, enable_chunked_prefill=is_split,
    )  # fmt: skip
    driver.scheduler.appends_all_forced = not is_priced
    prefix = [rng.randrange(20) for _ in range(9)]
    for turn in range(900):
        if turn < 40 and rng.random() < 0.25:
            prompt = prefix[: rng.randint(1, 9)] + [rng.randrange(20)] * rng.randint(0, 6)
            has_grammar = rng.random() < 0.7
            request = fakes.request(
                f"r{turn}", prompt[: limits.max_num_batched_tokens], rng.randint(1, 24),
                seed=rng.randrange(99), arrival_s=driver.now_s, eos=[3],
                params={**WITH_GRAMMAR, "stop_token_ids": [5]} if has_grammar else None,
                tpot_target_s=rng.choice([None, 0.05]), ttft_target_s=rng.choice([None, 1.0]),
            )  # fmt: skip
            driver.add(request)
        live = [r for r in driver.requests if not r.status.is_finished]
        if live and rng.random() < 0.03:
            driver.cancel(rng.choice(live).request_id)
        if driver.in_flight and rng.random() < 0.02:  # a step fails, and all are lost
            driver.in_flight.clear()
            driver.device.lose_everything()
            driver.scheduler.recover(driver.now_s)
        plan = driver.turn()
        waits = plan is None and not driver.in_flight and not driver.device.transfers
        for request in driver.requests:
            if request.has_grammar and request.output_token_ids and not request.status.is_finished:
                entry = driver.scheduler._table.live.entry(request)
                if entry.is_blocked and (waits or rng.random() < 0.5):
                    driver.unblock(request, rng.choice([0, 2, 3, 9, 20]))
        driver.scheduler.check_integrity()
        driver.now_s += 0.01
        if turn >= 40 and not driver.scheduler.has_work:
            break
    assert not driver.scheduler.has_work, "no progress"
    driver.check_ends()
