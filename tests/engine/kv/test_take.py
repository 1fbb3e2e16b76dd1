"""Growing many sequences at once gives each the page that growing them in turn would."""

from __future__ import annotations

import pytest

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams


def request_of(name: str, num_prompt: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[hash(name) % 1000 + index for index in range(num_prompt)],
        sampling_params=SamplingParams(),
        seed=0,
        eos_token_ids=(),
        max_tokens=8,
        arrival_s=0.0,
    )


def full_pool(num_host_pages: int):
    """Three running sequences, a free page, and three that only the prefix cache holds."""
    kv = KVManager(
        num_pages=11, page_size=2, enable_prefix_caching=True, num_host_pages=num_host_pages
    )
    ended = kv.open(request_of("ended", 6))
    kv.admit(ended, kv.match_prefix(ended), 6)
    kv.register_full_pages(ended, 6)
    running = [kv.open(request_of(name, 4)) for name in "abc"]
    for pages in running:
        kv.admit(pages, kv.match_prefix(pages), 4)
    kv.release(ended)
    return kv, [ended, *running], running


@pytest.mark.parametrize("num_host_pages", [0, 4])
def test_pages_and_evictions_are_those_of_growing_one_after_the_other(num_host_pages: int) -> None:
    kv, _, running = full_pool(num_host_pages)
    assert (kv.pool.num_free, kv.num_available) == (1, 4)
    expected = [kv.grow(pages, 5)[0] for pages in running]
    evicted = kv.take_evicted()
    assert len(evicted) == (2 if num_host_pages else 0)

    kv, live, running = full_pool(num_host_pages)
    new = kv.take(3)
    for pages, page in zip(running, new, strict=True):
        pages.page_ids.append(page)
    assert new == expected
    assert kv.take_evicted() == evicted
    assert [len(pages.page_ids) for pages in running] == [3, 3, 3]
    kv.check_integrity(live)
