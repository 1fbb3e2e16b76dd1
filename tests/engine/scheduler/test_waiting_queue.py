"""The queue of those who hold nothing."""

from __future__ import annotations

import random

import pytest

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.policies.baselines import by_arrival
from octavo.engine.scheduler.waiting_queue import WaitingQueue


@pytest.fixture
def entry(fakes):
    kv = KVManager(num_pages=2, page_size=4, enable_prefix_caching=False)

    def make(number, arrival_s):
        request = fakes.request(str(number), arrival_s=arrival_s)
        return LiveRequest(request=request, number=number, pages=kv.open(request))

    return make


def test_entries_keep_their_place_through_any_removals_and_returns(entry):
    rng = random.Random(0)
    entries = [entry(number, float(rng.randrange(5))) for number in range(60)]
    queue, inside = WaitingQueue(lambda entry: by_arrival(entry.request, None)), []
    for _ in range(500):
        chosen = rng.choice(entries)
        if chosen in inside:
            queue.remove(chosen)
            inside.remove(chosen)
        else:
            queue.insert(chosen)
            inside.append(chosen)
        inside.sort(key=lambda item: (item.request.arrival_s, item.number))
        assert list(queue) == inside
        assert len(queue) == len(inside)
        if inside:
            assert queue.head is inside[0]
    queue.check_integrity()


def test_without_places_the_order_of_acceptance_stays(entry):
    queue = WaitingQueue(lambda entry: ())
    entries = [entry(number, -float(number)) for number in range(5)]
    for item in reversed(entries):
        queue.insert(item)
    assert list(queue) == entries


def test_what_is_not_in_the_queue_cannot_leave_it(entry):
    queue = WaitingQueue(lambda entry: by_arrival(entry.request, None))
    queue.insert(entry(0, 0.0))
    with pytest.raises((AssertionError, IndexError)):
        queue.remove(entry(1, 0.0))
