from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.text.stops import StopStringMatcher

_letters = st.text("ab", max_size=24)
_stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def _search(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The obvious search: (start, stop) of what is complete first, the longest of several."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


@given(pieces=st.lists(_letters, max_size=8), stops=_stops, include=st.booleans())
def test_it_finds_what_a_search_of_the_whole_text_finds(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStringMatcher(stops, include)
    emitted, matched = "", None
    for piece in pieces:
        safe, matched = matcher.feed(piece)
        emitted += safe
        if matched is not None:
            break
    emitted += matcher.flush()
    expected = _search("".join(pieces), stops)
    if expected is None:
        assert (emitted, matched) == ("".join(pieces), None)
    else:
        start, stop = expected
        end = start + len(stop) if include else start
        assert (emitted, matched) == ("".join(pieces)[:end], stop)
        assert matcher.matched == stop


@given(text=_letters, stops=_stops)
def test_it_holds_back_exactly_what_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    safe, matched = matcher.feed(text)
    if matched is None:
        beginnings = [
            size
            for stop in stops
            for size in range(len(stop))
            if text.endswith(stop[:size])
        ]  # fmt: skip
        assert len(safe) == len(text) - max(beginnings, default=0)


def test_a_stop_string_may_lie_across_pieces() -> None:
    matcher = StopStringMatcher(["</done>"])
    assert matcher.feed("text </d") == ("text ", None)
    assert matcher.feed("one") == ("", None)
    assert matcher.feed("> more") == ("", "</done>")
    assert matcher.flush() == ""


def test_what_was_held_back_in_vain_is_let_out() -> None:
    matcher = StopStringMatcher(["abc"])
    assert matcher.feed("xab") == ("x", None)
    assert matcher.feed("d") == ("abd", None)
    assert matcher.feed("ab") == ("", None)
    assert matcher.flush() == "ab"


def test_after_a_match_nothing_more_comes_out() -> None:
    matcher = StopStringMatcher(["b"], include_stop=True)
    assert matcher.feed("abc") == ("ab", "b")
    assert matcher.feed("abc") == ("", "b")


def test_without_stop_strings_all_text_passes() -> None:
    matcher = StopStringMatcher([])
    assert matcher.feed("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_a_mistake() -> None:
    with pytest.raises(AssertionError):
        StopStringMatcher([""])
