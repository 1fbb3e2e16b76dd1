"""`octavo profile` refuses what it cannot measure before it loads a model."""

from __future__ import annotations

import pytest

from octavo.server.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--longest-context", "31"],
            "longest_context = 31 is not allowed: an integer of at least 32",
        ),
        (["--repeats", "0"], "repeats = 0 is not allowed: an integer of at least 1"),
    ],
)
def test_sizes_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err
