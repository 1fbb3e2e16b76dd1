"""Whole loads in small pools: each request ends with the oracle's tokens, however scheduled."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from octavo.engine.errors import OverloadedError
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority
from octavo.engine.scheduler.policies import policy_names
from octavo.engine.scheduler.step_time_model import StepTimeModel
from octavo.models.pooling_config import POOLINGS


def _run(fakes: SimpleNamespace, seed: int) -> Counter[str]:
    """Runs one random load to its end; counts what happened on the way."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    num_pages = rng.randint(8, 40)
    max_num_seqs = rng.randint(1, 8)
    limits = fakes.limits(
        page_size=page_size,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(1, 24),
        max_prefill_rows=rng.randint(1, 4),
        max_model_len=60,
        num_host_pages=rng.choice([0, 6, 60]),
    )
    driver = fakes.Driver(
        limits,
        depth=rng.randint(0, 2),
        policy=rng.choice(policy_names()),
        step_time=rng.choice([None, StepTimeModel(limits.token_edges, fixed_s=0.05)]),
        page_copy_s=rng.choice([1e-9, 1.0]),
        enable_prefix_caching=rng.random() < 0.7,
        num_decode_steps=rng.choice([1, 4, 8]),
        watermark=rng.choice([0.0, 0.05]),
    )
    driver.tick_s = 0.1
    most = min(60, (num_pages - 1) * page_size)
    stock = [rng.randrange(5) for _ in range(60)]
    wishes_scores = rng.random() < 0.3
    pools = random.Random(f"pooled {seed}")
    pooled_share = pools.choice([0.0, 0.0, 0.5])
    for i in range(30):
        num_prompt = rng.randint(1, most - 1)
        max_tokens = rng.randint(1, most - num_prompt)
        params = {"prompt_logprobs": 0} if wishes_scores and rng.random() < 0.5 else {}
        pooling = None
        if pools.random() < pooled_share:
            pooling = PoolingParams(pooling=pools.choice(POOLINGS), normalize=False)
            params, max_tokens = {}, 1
        request = fakes.request(
            str(i),
            stock[: num_prompt - num_prompt // 3] + [rng.randrange(5)] * (num_prompt // 3),
            max_tokens,
            seed=rng.randrange(4),
            eos=(3,) if rng.random() < 0.5 else (),
            arrival_s=driver.now_s,
            priority=rng.choice(list(Priority)),
            tenant=rng.choice(["", "a", "b"]),
            ttft_target_s=rng.choice([None, 1.0, 10.0]),
            tpot_target_s=rng.choice([None, 0.3]),
            e2e_target_s=rng.choice([None, None, 8.0]),
            params=params,
            pooling=pooling,
        )
        with contextlib.suppress(OverloadedError):
            driver.add(request)
        for _ in range(rng.randrange(4)):
            driver.now_s += driver.tick_s
            driver.turn()
            if driver.device.transfers and rng.random() < 0.5:
                driver.end_transfer(min(driver.device.transfers), ok=rng.random() < 0.8)
    driver.drain()
    load = driver.scheduler.load()
    pooled = [request for request in driver.requests if request.pooling is not None]
    return Counter(
        preempted=load.num_preemptions,
        swapped=sum(len(plan.copy_ins) for plan in driver.plans),
        rejected=load.num_rejected,
        cached=load.prefix_hit_tokens,
        multi_steps=sum(plan.num_steps > 1 for plan in driver.plans),
        pooled=len(driver.pooled),
        pooled_and_cached=sum(request.num_cached_tokens > 0 for request in pooled),
        chunks=sum(not row.samples for plan in driver.plans for row in plan.prefill_rows),
    )


@pytest.mark.parametrize("batch", range(5))
def test_random_loads_end_with_the_oracles_tokens(fakes: SimpleNamespace, batch: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(40):
        happened += _run(fakes, 1000 * batch + seed)
    assert min(happened[key] for key in ("preempted", "cached", "multi_steps", "chunks")) > 100
    assert min(happened["swapped"], happened["rejected"]) > 0
    assert happened["pooled"] > 100
    assert happened["pooled_and_cached"] > 10
