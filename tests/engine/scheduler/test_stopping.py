"""Where a sequence stops."""

from __future__ import annotations

import pytest

from octavo.engine.scheduler.committer import find_stop


@pytest.mark.parametrize(
    ("token_ids", "position", "stop_from", "expected"),
    [
        ((1, 2, 3), 0, 0, None),
        ((1, 9, 9), 0, 0, 1),
        ((9,), 5, 0, 0),
        ((9, 9, 9), 0, 2, 2),  # the third token is the first that may stop
        ((9, 9, 9), 1, 2, 1),
        ((9, 9), 0, 2, None),
        ((8,), 0, 0, 0),
        ((), 3, 0, None),
    ],
)
def test_the_first_stop_token_from_its_position_on(token_ids, position, stop_from, expected):
    assert find_stop(token_ids, position, {8, 9}, stop_from) == expected
