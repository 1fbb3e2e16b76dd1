"""Pages leave in the order in which they came, whatever left from between."""

from __future__ import annotations

import random

import pytest

from octavo.engine.kv.eviction_queue import EvictionQueue


def test_first_in_first_out():
    queue = EvictionQueue(9)
    queue.extend([3, 1, 2])
    assert list(queue) == [3, 1, 2]
    assert queue.pop(2) == [3, 1]
    assert list(queue) == [2]
    assert 2 in queue
    assert 3 not in queue


def test_a_page_that_left_and_came_back_stands_last():
    queue = EvictionQueue(9)
    queue.extend([3, 1, 2])
    for _ in range(3):
        queue.remove(3)
        queue.extend([3])
    assert list(queue) == [1, 2, 3]
    assert queue.pop(3) == [1, 2, 3]
    assert len(queue) == 0


def test_more_than_there_are_are_not_taken():
    queue = EvictionQueue(9)
    queue.extend([3, 1])
    queue.remove(1)
    with pytest.raises(AssertionError):
        queue.pop(2)
    assert list(queue) == [3]


def test_what_is_not_in_it_cannot_be_taken_out():
    with pytest.raises(AssertionError):
        EvictionQueue(9).remove(1)


def test_a_cleared_queue_can_be_used_again():
    queue = EvictionQueue(9)
    queue.extend([3, 1, 2])
    queue.remove(1)
    queue.clear()
    assert len(queue) == 0
    assert 3 not in queue
    queue.extend([1, 3])
    assert queue.pop(2) == [1, 3]


@pytest.mark.parametrize("seed", range(3))
def test_it_keeps_the_order_of_a_list_and_does_not_grow_without_end(seed):
    rng, queue, expected = random.Random(seed), EvictionQueue(64), []
    for _ in range(20_000):
        turn = rng.random()
        if turn < 0.1:
            count = rng.randint(0, len(expected))
            assert queue.pop(min(count, 3)) == expected[: min(count, 3)]
            del expected[: min(count, 3)]
        elif turn < 0.55 and expected:
            page = rng.choice(expected)
            queue.remove(page)
            expected.remove(page)
        else:
            page = rng.randrange(64)
            if page not in expected:
                queue.extend([page])
                expected.append(page)
        assert len(queue) == len(expected)
    assert list(queue) == expected
    assert all((page in queue) == (page in expected) for page in range(64))
    assert len(queue._queue) < 2000
