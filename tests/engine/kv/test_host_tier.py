"""Pages of host memory: each in one place, the least used prefix gives way first."""

from __future__ import annotations

import random

import pytest

from octavo.engine.kv.host_tier import HostTier


def key(number):
    return number.to_bytes(16, "little")


def cache(tier, numbers):
    """Caches pages with contents `numbers`, one after the other."""
    for number in numbers:
        (page,) = tier.allocate(1)
        tier.remember(page, key(number))


def test_pages_are_given_while_there_are_any():
    tier = HostTier(3)
    pages = tier.allocate(2)
    assert tier.allocate(2) is None
    assert (tier.num_owned, tier.num_free) == (2, 1)
    tier.release(pages)
    assert len(set(tier.allocate(3))) == 3


def test_the_least_recently_used_prefix_gives_way():
    tier = HostTier(3)
    cache(tier, [1, 2, 3])
    read = tier.longest_match([key(1)])
    tier.begin_read(read)
    tier.end_read(read)
    tier.allocate(1)
    assert [key(n) in tier for n in (1, 2, 3)] == [True, False, True]


def test_a_page_that_is_read_keeps_its_content():
    tier = HostTier(2)
    cache(tier, [1, 2])
    read = tier.longest_match([key(1), key(2)])
    tier.begin_read(read)
    assert tier.num_available == 0
    assert tier.allocate(1) is None
    tier.forget_prefixes()
    assert tier.num_cached == 2
    tier.end_read(read)
    tier.forget_prefixes()
    assert tier.num_free == 2


def test_a_match_ends_at_the_first_unknown_page():
    tier = HostTier(4)
    cache(tier, [1, 3])
    assert len(tier.longest_match([key(1), key(2), key(3)])) == 1


def test_the_same_content_is_kept_once():
    tier = HostTier(2)
    cache(tier, [1, 1])
    assert (tier.num_cached, tier.num_free) == (1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_any_history_keeps_the_books(seed):
    rng = random.Random(seed)
    tier, owned, reading = HostTier(12), [], []
    for _ in range(600):
        action = rng.randrange(5)
        if action == 0:
            owned += tier.allocate(rng.randint(1, 3)) or []
        elif action == 1 and owned:
            tier.release([owned.pop(rng.randrange(len(owned)))])
        elif action == 2 and owned:
            tier.remember(owned.pop(rng.randrange(len(owned))), key(rng.randrange(9)))
        elif action == 3:
            pages = tier.longest_match([key(rng.randrange(9))])
            tier.begin_read(pages)
            reading.append(pages)
        elif reading:
            tier.end_read(reading.pop(rng.randrange(len(reading))))
        tier.check_integrity(owned)
