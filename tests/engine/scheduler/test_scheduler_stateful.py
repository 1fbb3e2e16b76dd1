"""Whatever happens in whatever order: the books balance, and tokens are those of the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.engine.errors import InvalidRequestError, OverloadedError
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority, Request, RequestStatus
from octavo.engine.scheduler.policies import POLICIES, get_policy
from octavo.engine.scheduler.policy import Policy

PROMPT_STOCK = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 3


def _shortest_first(snapshot: Any, requests: Any) -> list[Any]:
    return sorted(requests, key=lambda request: request.max_total_tokens - request.num_tokens)


SHORTEST_FIRST = Policy(
    name="shortest first",
    order=_shortest_first,
    choose_victims=lambda snapshot, *_: _shortest_first(snapshot, snapshot.running)[::-1],
)
"""A policy whose order moves, and whose victims come in any order to the one in need."""


POLICY_NAMES = [
    *(name for name in POLICIES if name != "dynamic"),
    "dynamic:batch_size=3,timeout_s=0",
    "slo:max_wait_s=5",
    "slo:late=serve",
]

request_specs = st.fixed_dictionaries(
    {
        "prompt_len": st.integers(1, 40),
        "offset": st.sampled_from([0, 0, 0, 1]),
        "max_tokens": st.integers(1, 24),
        "seed": st.integers(0, 3),
        "eos": st.sampled_from([(), (1,), (2, 3, 5)]),
        "stops": st.sampled_from([(), (7, 11)]),
        "min_tokens": st.integers(0, 4),
        "salt": st.sampled_from(["", "", "s"]),
        "tenant": st.sampled_from(["", "", "t"]),
        "priority": st.sampled_from(Priority),
        "ttft_s": st.sampled_from([None, None, 2.0, 20.0]),
        "tpot_s": st.sampled_from([None, 0.5]),
        "e2e_s": st.sampled_from([None, None, 15.0]),
        "patience_s": st.sampled_from([None, None, 5.0, 50.0]),
        "logprobs": st.sampled_from([None, 0]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "pooling": st.sampled_from([None, None, "last", "mean", "cls"]),
    }
)


def _request(
    fakes: SimpleNamespace, request_id: str, now_s: float, spec: dict[str, Any]
) -> Request:
    patience_s, max_tokens = spec["patience_s"], spec["max_tokens"]
    pooling = None
    if spec["pooling"] is not None:
        pooling, max_tokens = PoolingParams(pooling=spec["pooling"], normalize=False), 1
        spec = spec | {"eos": (), "stops": (), "logprobs": None, "prompt_logprobs": None}
    request: Request = fakes.request(
        request_id,
        PROMPT_STOCK[spec["offset"] : spec["offset"] + spec["prompt_len"]],
        max_tokens,
        seed=spec["seed"],
        eos=spec["eos"],
        arrival_s=now_s,
        priority=spec["priority"],
        deadline_s=None if patience_s is None else now_s + patience_s,
        tenant=spec["tenant"],
        ttft_target_s=spec["ttft_s"],
        tpot_target_s=spec["tpot_s"],
        e2e_target_s=spec["e2e_s"],
        cache_salt=spec["salt"],
        pooling=pooling,
        params={
            "stop_token_ids": spec["stops"],
            "min_tokens": min(spec["min_tokens"], max_tokens),
            "logprobs": spec["logprobs"],
            "prompt_logprobs": spec["prompt_logprobs"],
        },
    )
    return request


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self, fakes: SimpleNamespace) -> None:
        super().__init__()
        self.fakes = fakes
        self.driver: Any = None

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        num_pages=st.integers(3, 24),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 12),
        max_prefill_rows=st.integers(1, 3),
        policy=st.sampled_from([*POLICY_NAMES, SHORTEST_FIRST]),
        num_host_pages=st.sampled_from([0, 0, 4, 40]),
        swaps=st.sampled_from([None, True, False]),
        caching=st.booleans(),
        chunked=st.booleans(),
        num_decode_steps=st.sampled_from([1, 2, 8]),
        watermark=st.sampled_from([0.0, 0.1]),
        depth=st.integers(0, 2),
        max_model_len=st.sampled_from([48, 48, 24]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        extra_tokens: int,
        max_prefill_rows: int,
        policy: Any,
        num_host_pages: int,
        swaps: bool | None,
        caching: bool,
        chunked: bool,
        num_decode_steps: int,
        watermark: float,
        depth: int,
        max_model_len: int,
    ) -> None:
        limits = self.fakes.limits(
            page_size=page_size,
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_prefill_rows=max_prefill_rows,
            max_model_len=max_model_len,
            num_host_pages=num_host_pages,
        )
        policy = get_policy(policy) if isinstance(policy, str) else policy
        if swaps is not None:
            policy = replace(policy, swap_or_recompute=lambda *_: swaps)
        self.driver = self.fakes.Driver(
            limits,
            depth=depth,
            policy=policy,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            num_decode_steps=num_decode_steps,
            watermark=watermark,
        )

    @rule(specs=st.lists(request_specs, min_size=1, max_size=8))
    def add(self, specs: list[dict[str, Any]]) -> None:
        driver, limits = self.driver, self.driver.limits
        for spec in specs:
            request = _request(self.fakes, str(len(driver.requests)), driver.now_s, spec)
            try:
                driver.add(request)
            except OverloadedError:
                assert str(driver.scheduler.policy.name) == "slo"
            except InvalidRequestError:
                most = min(limits.max_model_len, limits.page_size * (limits.num_pages - 1) + 1)
                too_long = request.max_total_tokens > most
                assert too_long or request.num_prompt_tokens > limits.max_num_batched_tokens

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.driver.turn()

    @rule()
    def plan_only(self) -> None:
        if len(self.driver.in_flight) <= self.driver.depth:
            self.driver.plan()

    @precondition(lambda self: self.driver is not None and self.driver.in_flight)
    @rule()
    def commit_only(self) -> None:
        self.driver.commit()

    @precondition(lambda self: self.driver is not None and self.driver.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.driver.requests))
        was_live = not request.status.is_finished
        assert (self.driver.cancel(request.request_id) is request) == was_live
        assert request.status.is_finished

    @precondition(lambda self: self.driver is not None and self.driver.requests)
    @rule(data=st.data())
    def finish_from_outside(self, data: st.DataObject) -> None:
        driver = self.driver
        request = data.draw(st.sampled_from(driver.requests))
        was_live = not request.status.is_finished
        ended = driver.scheduler.finish(request, RequestStatus.CANCELLED, "a stop", driver.now_s)
        assert ended == was_live
        if ended:
            assert request.stop_reason == "a stop"
            driver.ended(request)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        driver = self.driver
        driver.now_s += seconds
        for request in driver.scheduler.expire(driver.now_s):
            assert request.deadline_s < driver.now_s
            assert request.status is RequestStatus.FAILED
            driver.ended(request)
        for request in driver.requests:
            late = request.deadline_s is not None and request.deadline_s < driver.now_s
            assert request.status.is_finished or not late

    @precondition(lambda self: self.driver is not None and self.driver.device.transfers)
    @rule(data=st.data(), ok=st.booleans())
    def a_copy_ends(self, data: st.DataObject, ok: bool) -> None:
        transfers = sorted(self.driver.device.transfers)
        self.driver.end_transfer(data.draw(st.sampled_from(transfers)), ok)

    @precondition(lambda self: self.driver is not None and self.driver.requests)
    @rule(data=st.data())
    def another_engine_wants_pages(self, data: st.DataObject) -> None:
        self.driver.give_pages(data.draw(st.sampled_from(self.driver.requests)))

    @precondition(lambda self: self.driver is not None and self.driver.requests)
    @rule(data=st.data(), first=st.integers(0, 3))
    def pages_come_from_another_engine(self, data: st.DataObject, first: int) -> None:
        self.driver.take_pages(data.draw(st.sampled_from(self.driver.requests)), first)

    @rule(at=st.sampled_from(["planning", "running"]))
    def a_step_fails(self, at: str) -> None:
        driver = self.driver
        if at == "planning":
            driver.scheduler.plan(driver.now_s)
            for request in driver.scheduler.take_ended():
                driver.ended(request)
        driver.in_flight.clear()
        driver.scheduler.recover(driver.now_s)
        assert driver.scheduler.num_rebuilds == 0
        driver.device.lose_everything()

    @rule(data=st.data())
    def some_are_tried_alone(self, data: st.DataObject) -> None:
        ids = [request.request_id for request in self.driver.scheduler.live_requests]
        if ids:
            self.driver.scheduler.only(data.draw(st.lists(st.sampled_from(ids), min_size=1)))

    @rule()
    def everybody_may_run(self) -> None:
        self.driver.scheduler.only(None)

    @invariant()
    def books_balance(self) -> None:
        if self.driver is not None:
            self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.scheduler.only(None)
            self.driver.drain()


@pytest.mark.hypothesis
def test_any_history_keeps_the_books_and_the_tokens(fakes: SimpleNamespace) -> None:
    # Most histories are dull: it takes a good many to meet every corner.
    examples = max(150, settings().max_examples)
    run_state_machine_as_test(
        partial(SchedulerMachine, fakes), settings=settings(max_examples=examples)
    )
