"""How a model's caches share arrays and pages."""

from __future__ import annotations

import pytest

from octavo.models.cache_groups import MOST_GROUPS, CachePlace, cache_layout
from octavo.models.cache_spec import LatentCache, PagedKVCache, RecurrentState, StateArray


def cache(window: int | None = None, *, heads: int = 2) -> PagedKVCache:
    return PagedKVCache(num_kv_heads=heads, key_size=16, value_size=16, window=window)


def pattern(letters: str, window: int = 512) -> list[PagedKVCache]:
    """A layer a letter: W has a window."""
    return [cache(window if letter == "W" else None) for letter in letters]


def test_layers_of_one_kind_are_one_group_with_an_array_each() -> None:
    for window in (None, 4096):
        layout = cache_layout([cache(window)] * 5)
        assert [group.caches for group in layout.groups] == [(0, 1, 2, 3, 4)]
        assert layout.windows == (window,)
        assert layout.arrays == (cache(window),) * 5
        assert layout.places() == tuple(CachePlace(i, 0) for i in range(5))


def test_latents_are_one_group_and_take_no_room_for_values() -> None:
    latent = LatentCache(key_size=576, value_size=512)
    assert latent.numbers_per_token == 576
    layout = cache_layout([latent] * 3)
    assert [group.caches for group in layout.groups] == [(0, 1, 2)]
    assert (layout.windows, layout.arrays) == ((None,), (latent,) * 3)


def test_latents_beside_keys_and_values_have_arrays_of_their_own() -> None:
    latent, window = LatentCache(key_size=32, value_size=16), cache(7)
    layout = cache_layout([window, latent, window])
    assert layout.arrays == (window, latent, window)
    assert layout.windows == (None,)


def test_five_windows_to_one_layer_that_sees_all_make_six_groups() -> None:
    layout = cache_layout(pattern("WWWWWF" * 3))
    assert len(layout.arrays) == 3
    assert layout.windows == (None, *(512,) * 5)
    assert layout.groups[0].caches == (5, 11, 17)
    assert layout.groups[1].caches == (0, 1, 2)
    places = layout.places()
    assert places[11] == CachePlace(1, 0)
    assert places[17] == CachePlace(2, 0)
    assert places[3] == CachePlace(0, 2)


def test_layers_that_alternate_make_two_groups() -> None:
    layout = cache_layout(pattern("WF" * 13))
    assert layout.windows == (None, 512)
    assert len(layout.arrays) == 13


@pytest.mark.parametrize(
    ("letters", "num_groups", "num_arrays"),
    [("WWWWWF" * 4 + "WW", 7, 4), ("W" * 31 + "F", MOST_GROUPS, 5), ("F" * 20 + "W" * 4, 6, 4)],
)
def test_groups_are_as_many_as_the_rarest_kind_asks_for_and_no_more_than_tables_are_worth(
    letters: str, num_groups: int, num_arrays: int
) -> None:
    layout = cache_layout(pattern(letters))
    assert (len(layout.groups), len(layout.arrays)) == (num_groups, num_arrays)
    held = [index for group in layout.groups for index in group.caches]
    assert sorted(held) == list(range(len(letters)))
    assert all(
        letters[index] == ("F" if group.window is None else "W")
        for group in layout.groups
        for index in group.caches
    )
    assert len(set(layout.places())) == len(letters)


def test_groups_that_see_more_come_first() -> None:
    layout = cache_layout([cache(4), cache(), cache(64)])
    assert layout.windows == (None, 64, 4)


def test_caches_of_differing_shapes_keep_all_pages_in_arrays_of_their_own() -> None:
    caches = [cache(), cache(8, heads=4), cache(8)]
    layout = cache_layout(caches)
    assert layout.windows == (None,)
    assert layout.arrays == tuple(caches)
    assert layout.places() == tuple(CachePlace(i, 0) for i in range(3))


def test_recurrent_states_lie_behind_the_arrays_and_in_no_group_of_pages():
    state = RecurrentState((StateArray((3, 8), split=1), StateArray((2, 4, 4), split=0)))
    assert state.num_bytes == 4 * (24 + 32)
    pages = pattern("WFWF")
    layout = cache_layout([state, *pages[:2], state, *pages[2:], state])
    alone = cache_layout(pages)
    assert layout.arrays == alone.arrays
    assert layout.windows == alone.windows
    assert layout.states == (state,) * 3
    places = layout.places()
    assert [places[index] for index in (1, 2, 4, 5)] == list(alone.places())
    assert [places[index] for index in (0, 3, 6)] == [
        CachePlace(len(layout.arrays) + index, len(layout.groups)) for index in range(3)
    ]
