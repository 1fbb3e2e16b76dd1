"""Whoever follows the events of a prefix cache knows what is in it."""

from __future__ import annotations

import random

import pytest

from octavo.engine.kv import cache_events
from octavo.engine.kv.cache_events import CacheCleared, CacheEvents, PagesRemoved, PagesStored
from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.page_hash import page_hashes, root_hash
from tests.engine.made_requests import make_request

PAGE = 4


def request(prompt, tenant=""):
    return make_request(prompt=prompt, tenant=tenant)


@pytest.fixture
def told():
    return CacheEvents()


@pytest.fixture
def kv(told):
    kv = KVManager(num_pages=17, page_size=PAGE, enable_prefix_caching=True)
    kv.tell(told)
    return kv


def admitted(kv, prompt, tenant=""):
    pages = kv.open(request(prompt, tenant))
    kv.admit(pages, kv.lookup.match(pages), len(prompt))
    kv.register_full_pages(pages, len(prompt))
    return pages


def test_pages_are_told_once_with_their_tokens_and_their_parent(kv, told):
    prompt = list(range(1, 14))
    admitted(kv, prompt)
    names = page_hashes(root_hash("", ""), prompt[:12], PAGE)
    assert told.take() == [PagesStored(tuple(names), None, tuple(prompt[:12]))]
    admitted(kv, [*prompt[:8], 50, 51, 52, 53, 54])
    [stored] = told.take()
    assert (stored.parent, stored.token_ids) == (names[1], (50, 51, 52, 53))
    admitted(kv, prompt)  # all of it is there
    assert told.take() == []


def test_a_part_that_was_lost_is_told_alone(kv, told):
    prompt = list(range(1, 17))
    kv.release(admitted(kv, prompt))
    other = admitted(kv, list(range(100, 152)))  # takes the end of the prefix alone
    names = page_hashes(root_hash("", ""), prompt, PAGE)
    assert told.take()[1] == PagesRemoved((names[3],))
    kv.release(other)
    admitted(kv, prompt)
    *gone, again = told.take()
    assert again == PagesStored((names[3],), names[2], tuple(prompt[12:]))
    assert all(isinstance(event, PagesRemoved) for event in gone)
    kv.forget_prefixes()
    assert told.take()[-1] == CacheCleared()


def test_a_tenants_pages_are_told_to_nobody(kv, told):
    admitted(kv, [1] * 9, tenant="somebody")
    assert told.take() == []


@pytest.mark.parametrize("seed", range(20))
def test_a_follower_knows_what_the_cache_holds(kv, told, seed):
    random_ = random.Random(seed)
    live, known = [], {}
    for _ in range(120):
        prompt = [random_.randrange(2) for _ in range(random_.randrange(1, 24))]
        pages = kv.open(request(prompt, random_.choice(["", "", "other"])))
        match = kv.lookup.match(pages)
        if kv.num_pages_to_take(match, len(prompt)) <= kv.num_available:
            kv.admit(pages, match, len(prompt))
            kv.register_full_pages(pages, len(prompt))
            live.append(pages)
        if live and random_.random() < 0.6:
            kv.release(live.pop(random_.randrange(len(live))))
        if random_.random() < 0.02:
            kv.forget_prefixes()
        kv.flush()
        for event in told.take():
            if isinstance(event, PagesStored):
                for index, name in enumerate(event.names):
                    assert name not in known
                    parent = event.names[index - 1] if index else event.parent
                    assert parent is None or parent in known
                    tokens = event.token_ids[index * PAGE : (index + 1) * PAGE]
                    assert page_hashes(parent or root_hash("", ""), tokens, PAGE) == [name]
                    known[name] = tokens
            elif isinstance(event, PagesRemoved):
                for name in event.names:
                    known.pop(name, None)
            else:
                known.clear()
        held = {name for name in kv.cache.contents if name is not None}
        others = root_hash("other", "")
        theirs, ahead = set(), [others]
        while ahead:  # everything below the other tenant's root that two tokens can spell
            parent = ahead.pop()
            for number in range(2**PAGE):
                tokens = [number >> bit & 1 for bit in range(PAGE)]
                [name] = page_hashes(parent, tokens, PAGE)
                if name in held:
                    theirs.add(name)
                    ahead.append(name)
        assert set(known) <= held
        # Pages whose beginning was lost are not reached from the root: they may be of either.
        assert not theirs & set(known)
        kv.check_integrity(live)


def test_events_that_nobody_takes_are_dropped_and_that_is_told(told, monkeypatch):
    monkeypatch.setattr(cache_events, "MAX_WAITING", 3)
    for number in range(4):
        told.removed([bytes((number,))])
    assert told.take() == [CacheCleared(), PagesRemoved((b"\x03",))]
