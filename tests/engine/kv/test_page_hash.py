"""A page's hash names everything before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.kv.page_hash import HASH_BYTES, page_hashes, root_hash


def test_roots_differ_by_tenant_and_salt_and_by_where_one_ends():
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "a")]
    assert len({root_hash(*pair) for pair in pairs}) == len(pairs)
    assert root_hash("a", "b") == root_hash("a", "b")


@given(st.lists(st.integers(0, 2**31 - 1), min_size=12, max_size=12), st.integers(1, 11))
def test_hashing_in_parts_is_hashing_at_once(tokens, cut):
    root = root_hash("", "")
    whole = page_hashes(root, tokens, 1)
    first = page_hashes(root, tokens[:cut], 1)
    assert whole == first + page_hashes(first[-1], tokens[cut:], 1)


@given(st.integers(0, 11), st.integers(1, 2**31 - 1))
def test_a_changed_token_changes_its_page_and_every_later_one(position, change):
    tokens = list(range(12))
    changed = [*tokens]
    changed[position] ^= change
    root = root_hash("", "")
    before, after = page_hashes(root, tokens, 4), page_hashes(root, changed, 4)
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert same == [page < position // 4 for page in range(3)]
    assert {len(page_hash) for page_hash in before} == {HASH_BYTES}
