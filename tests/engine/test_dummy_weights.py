"""An engine of a config.json alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from tests.engine.conftest import SMALL


def test_an_engine_of_a_config_alone_computes_as_one_of_a_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copyfile(tiny_model / "config.json", tmp_path / "config.json")
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    llm = LLM(tmp_path, load_format="dummy", **SMALL)
    [output] = llm.generate(["hello"], params)
    assert len(output.prompt_token_ids) == 5
    assert len(output.outputs[0].token_ids) == 6
    with pytest.raises((ModelLoadError, UnsupportedModelError), match="holds neither"):
        LLM(tmp_path, **SMALL)
