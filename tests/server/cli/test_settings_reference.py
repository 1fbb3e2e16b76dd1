"""The generated page says what the code says."""

from __future__ import annotations

from pathlib import Path

from octavo.server.cli.settings import setting_kinds
from octavo.server.cli.settings_reference import render

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_current():
    assert PAGE.read_text() == render()


def test_every_setting_is_described():
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    assert [row[0].strip("|` ") for row in rows] == list(setting_kinds())
    assert all(len(row[4]) > 10 for row in rows)
