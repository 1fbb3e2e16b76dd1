"""The generated page says what the table of families says."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.models.families.composite import COMPOSITES, WRAPPED
from octavo.models.families.table import FAMILIES
from octavo.server.cli.models import families
from octavo.server.cli.models_reference import render

ROOT = Path(__file__).parents[3]


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == render()


def test_every_family_has_the_tiny_model_that_the_page_says_it_has() -> None:
    tiny = json.loads((ROOT / "tests/golden/tiny_configs.json").read_text(encoding="utf-8"))
    compared = {values["model_type"] for values in tiny.values()}
    # Compared as a part of its composite checkpoint.
    assert {family.model_type for family in FAMILIES} - compared == {"qwen3_vl_text"}


def test_composite_checkpoints_stand_beside_their_text_models() -> None:
    wrapped = [name for names in WRAPPED.values() for name in names]
    assert set(wrapped) == set(COMPOSITES)
    assert WRAPPED.keys() <= {family.model_type for family in FAMILIES}
    listed = {name for family in families() for name in family["architectures"]}
    assert listed >= set(COMPOSITES)
