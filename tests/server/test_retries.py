"""When clients try again, and that they do against a server."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import numpy as np
import pytest

from octavo.client import (
    AsyncOctavoClient,
    EngineDeadError,
    InvalidRequestError,
    OctavoClient,
    OverloadedError,
    RetryPolicy,
    SamplingParams,
)
from octavo.engine.errors import InvalidConfigError, StepFailedError
from octavo.server.retries import NO_RETRIES, Attempts, check_timeout

TWO = SamplingParams(max_tokens=2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def attempts(policy: RetryPolicy, timeout_s: float | None, clock: Clock, chance: float = 0.0):
    return Attempts(policy, timeout_s, clock=clock, chance=lambda: chance)


def test_an_overloaded_servers_own_time_is_kept_to():
    several = attempts(RetryPolicy(), None, Clock())
    assert several.pause_s(OverloadedError("full", 2.5)) == 2.5
    assert several.pause_s(OverloadedError("full", 0.5)) == 0.5
    late = attempts(RetryPolicy(), None, Clock(), chance=0.99)
    assert 2.5 <= late.pause_s(OverloadedError("full", 2.5)) <= 2.5 * 1.1


def test_pauses_double_up_to_the_longest_and_attempts_end():
    policy = RetryPolicy(max_attempts=6, first_pause_s=0.2, max_pause_s=1.0)
    several = attempts(policy, None, Clock(), chance=1.0)
    pauses = [several.pause_s(EngineDeadError("gone")) for _ in range(6)]
    assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0, None]
    half = attempts(policy, None, Clock(), chance=0.0)
    assert half.pause_s(EngineDeadError("gone")) == 0.1


def test_what_another_attempt_would_not_mend_is_not_tried_again():
    for error in (InvalidRequestError("n", 0, "1"), StepFailedError("nan")):
        assert attempts(RetryPolicy(), None, Clock()).pause_s(error) is None


def test_no_pause_goes_beyond_the_deadline():
    clock = Clock()
    several = attempts(RetryPolicy(), 3.0, clock)
    assert several.timeout_s == 3.0
    clock.now_s += 1.0
    assert several.pause_s(OverloadedError("full", 1.5)) == 1.5
    clock.now_s += 1.5
    assert several.timeout_s == 0.5
    assert several.pause_s(OverloadedError("full", 0.6)) is None


@pytest.mark.parametrize(
    "values", [{"max_attempts": 0}, {"first_pause_s": 0.0}, {"first_pause_s": 9.0}]
)
def test_a_policy_out_of_range_is_refused(values):
    with pytest.raises(InvalidConfigError, match=next(iter(values))):
        RetryPolicy(**values)


@pytest.mark.parametrize("timeout_s", [-1, 0, 0.0, float("nan"), float("inf"), "5", True])
def test_what_is_no_deadline_is_refused_by_name(timeout_s):
    with pytest.raises(InvalidRequestError, match=r"timeout_s.*seconds above 0"):
        OctavoClient("127.0.0.1:1", timeout_s=timeout_s)
    with (
        OctavoClient("127.0.0.1:1") as client,
        pytest.raises(InvalidRequestError, match=r"timeout_s.*seconds above 0"),
    ):
        client.generate("Hello", timeout_s=timeout_s)


@pytest.mark.parametrize("number", [np.float32, np.int64, Fraction])
def test_seconds_are_numbers_of_any_kind(number):
    check_timeout(number(2))
    assert 1 < Attempts(NO_RETRIES, number(2)).timeout_s <= 2


def test_calls_are_made_again_until_the_server_takes_them(on_stand):
    async def scenario(stand):
        refusals = iter([OverloadedError("full", 0.05), EngineDeadError("elsewhere")])
        generate = stand.engine.generate
        num_calls = 0

        def refuse_twice(*args, **kwargs):
            nonlocal num_calls
            num_calls += 1
            refusal = next(refusals, None)
            if refusal is not None:
                raise refusal
            return generate(*args, **kwargs)

        stand.engine.generate = refuse_twice
        retry = RetryPolicy(first_pause_s=0.01)
        async with AsyncOctavoClient(stand.address, retry=retry, timeout_s=20) as client:
            assert (await client.generate("x", TWO)).outputs[0].token_ids == [1, 2]
            assert num_calls == 3
            refusals = iter([OverloadedError("full", 0.01)])
            outputs = [output async for output in client.stream("x", TWO)]
            assert [output.outputs[0].token_ids for output in outputs] == [[1], [2]]
            assert num_calls == 5
            refusals = iter([OverloadedError("full", 60.0)])
            with pytest.raises(OverloadedError) as caught:
                await client.generate("x", TWO)
            assert caught.value.retry_after_s == 60.0
            assert num_calls == 6

    on_stand(scenario)


def test_a_stream_that_has_begun_is_not_made_again(on_stand):
    async def scenario(stand):
        stand.engine.failure = OverloadedError("full", 0.01)
        stream = stand.client.stream("x", SamplingParams(max_tokens=4))
        assert (await anext(stream)).outputs[0].token_ids == [1]
        with pytest.raises(OverloadedError):
            await anext(stream)
        assert len(stand.engine.seen) == 1

    on_stand(scenario)


def test_the_blocking_client_waits_for_a_server_that_is_coming(on_stand):
    async def scenario(stand):
        stand.server.front.draining = True
        retry = RetryPolicy(max_attempts=20, first_pause_s=0.02, max_pause_s=0.1)

        def ask():
            with OctavoClient(stand.address, retry=retry, timeout_s=30) as client:
                tokens = [o.outputs[0].token_ids for o in client.stream("x", TWO)]
                return tokens, client.generate("x", TWO).outputs[0].token_ids

        asking = asyncio.create_task(asyncio.to_thread(ask))
        await asyncio.sleep(0.1)
        assert not asking.done()
        stand.server.front.draining = False
        assert await asking == ([[1], [2]], [1, 2])

    on_stand(scenario)


def test_leaving_a_stream_ends_its_request(on_stand):
    async def scenario(stand):
        stand.engine.gate.clear()

        def leave_early():
            with OctavoClient(stand.address) as client:
                stream = client.stream("x", SamplingParams(max_tokens=9))
                next(stream)
                stream.close()

        await asyncio.to_thread(leave_early)
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario)


def test_no_server_at_all_is_an_engine_that_is_not_there():
    retry = RetryPolicy(max_attempts=2, first_pause_s=0.01)
    client = OctavoClient("127.0.0.1:1", retry=retry, timeout_s=20)
    with client, pytest.raises(EngineDeadError):
        client.tokenize("x")
