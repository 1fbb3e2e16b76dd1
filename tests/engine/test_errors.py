"""Messages name the value, and stay short enough to be read."""

from __future__ import annotations

from pathlib import Path

from octavo.engine.errors import InvalidConfigError, InvalidRequestError


def test_a_long_value_is_cut() -> None:
    error = InvalidRequestError("prompt", "x" * 5000, "at most 100 tokens")
    assert "prompt = 'xxx" in str(error)
    assert len(str(error)) < 150


def test_a_long_path_is_shown_to_its_end() -> None:
    path = Path("/" + "folder/" * 40) / "table.json"
    assert f"trace = '{path}' is not allowed" in str(InvalidConfigError("trace", path, "a CSV"))
