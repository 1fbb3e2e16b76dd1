"""Places of snapshots: what is found, what is given away first, what a plan protects."""

from __future__ import annotations

from octavo.engine.kv.state_snapshots import StateSnapshots

HASHES = [bytes([number]) for number in range(12)]


def written(snapshots: StateSnapshots, *num_pages: int) -> list[int]:
    """Snapshots of so many pages each are taken and found."""
    places = []
    for each in num_pages:
        place = snapshots.take()
        assert place is not None
        snapshots.put(HASHES[each - 1], place)
        places.append(place)
    return places


def test_the_longest_prefix_with_one_is_found() -> None:
    snapshots = StateSnapshots(4, num_pages=2)
    written(snapshots, 2, 4, 8)
    found = [snapshots.longest(HASHES, most) for most in (1, 2, 3, 4, 7, 8, 11)]
    assert found == [0, 2, 2, 4, 4, 8, 8]
    others = [b"x", *HASHES[1:]]  # the hash of a last page covers all before it
    assert snapshots.longest(others[:1], 1) == 0


def test_what_was_not_read_for_longest_is_given_away_first() -> None:
    snapshots = StateSnapshots(3, num_pages=1)
    first, second, third = written(snapshots, 1, 2, 3)
    assert snapshots.read(HASHES[0]) == first
    snapshots.flush()
    assert [snapshots.take() for _ in range(4)] == [second, third, first, None]
    assert snapshots.longest(HASHES, 12) == 0
    snapshots.release([second])
    snapshots.check_integrity([first, third])


def test_what_a_plan_reads_it_does_not_write() -> None:
    snapshots = StateSnapshots(2, num_pages=1)
    first, second = written(snapshots, 1, 2)
    snapshots.read(HASHES[0])
    assert [snapshots.take(), snapshots.take()] == [second, None]
    snapshots.flush()
    assert snapshots.take() == first


def test_one_that_its_only_follower_passed_is_given_away_first() -> None:
    snapshots = StateSnapshots(3, num_pages=1)
    oldest, passed, _ = written(snapshots, 1, 2, 3)
    snapshots.read(HASHES[1])
    snapshots.flush()
    assert [snapshots.take(HASHES[1]), snapshots.take()] == [passed, oldest]


def test_one_that_several_go_on_from_is_not_passed() -> None:
    snapshots = StateSnapshots(3, num_pages=1)
    oldest, shared, _ = written(snapshots, 1, 2, 3)
    for _ in range(2):
        snapshots.read(HASHES[1])
        snapshots.flush()
    assert snapshots.take(HASHES[1]) == oldest
    snapshots.put(HASHES[4], oldest, is_branch=True)  # as is one at which prompts part
    assert snapshots.take(HASHES[4]) != oldest
    assert snapshots.take() == shared


def test_what_a_sequence_alone_reads_it_may_write() -> None:
    one, other = "one", "other"
    snapshots = StateSnapshots(1, num_pages=1)
    (place,) = written(snapshots, 1)
    snapshots.read(HASHES[0], one)
    assert snapshots.take(HASHES[0], other) is None  # it left what another goes on from now
    assert snapshots.take(HASHES[0], one) == place
    snapshots.put(HASHES[1], place)
    snapshots.read(HASHES[1], one)
    snapshots.read(HASHES[1], other)
    assert snapshots.take(HASHES[1], other) is None
    snapshots.check_integrity([])
    snapshots = StateSnapshots(2, num_pages=1)
    (place,) = written(snapshots, 1)
    snapshots.read(HASHES[0], one)
    assert snapshots.take(HASHES[0], one) != place  # there is a free one
    assert snapshots.take(HASHES[1], other) is None  # and this one is still read


def test_a_sequence_goes_on_once_from_where_another_ended() -> None:
    snapshots = StateSnapshots(1, num_pages=1)
    snapshots.end(HASHES[0])
    assert [snapshots.goes_on(HASHES[index]) for index in (1, 0, 0)] == [False, True, False]
    for number in range(1000):  # no more are remembered than are of use
        snapshots.end(b"%d" % number)
    assert [snapshots.goes_on(b"%d" % number) for number in (0, 999)] == [False, True]


def test_one_of_two_that_are_equal_comes_free() -> None:
    snapshots = StateSnapshots(2, num_pages=1)
    first, second = snapshots.take(), snapshots.take()
    assert first is not None
    assert second is not None
    snapshots.put(HASHES[0], first)
    snapshots.put(HASHES[0], second)
    snapshots.check_integrity([])
    assert snapshots.take() == second
    snapshots.forget()
    snapshots.check_integrity([second])
    assert HASHES[0] not in snapshots
