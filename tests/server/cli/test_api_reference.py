"""The generated page says what the code says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from octavo.server.cli.api_reference import MODULES, public_names, render

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_is_current():
    assert PAGE.read_text() == render()


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_described(name):
    module = importlib.import_module(name)
    sections = PAGE.read_text().split("\n### ")
    for public in public_names(module):
        [section] = [text for text in sections if text.startswith(f"{name}.{public}\n")]
        assert len(section.split()) > 5, public
