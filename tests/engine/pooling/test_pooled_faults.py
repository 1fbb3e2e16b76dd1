"""A text that breaks the model's numbers costs nobody else a vector or a token."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.engine.errors import QuarantinedError
from octavo.engine.faults.quarantine import Quarantine
from octavo.engine.input.input_processor import POOLED
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.sampling_params import SamplingParams

POISON = 271
"""A token whose embedding is not a number."""
TEXT = [20 + index % 90 for index in range(100)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    directory = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(tiny_model, directory, dirs_exist_ok=True)
    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = np.nan
    save_file(tensors, directory / "model.safetensors")
    engine = Engine(
        EngineConfig(
            model=str(directory), task="both", max_num_seqs=6, max_num_batched_tokens=64,
            num_kv_pages=60, block_size=16, warm_up="coarse", fail_on_compile=True,
        )
    )  # fmt: skip
    yield engine
    engine.check_integrity()
    engine.close()


def run(engine: Any, prompts: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    """Every request's last output, by its label."""
    for label, (prompt, params) in prompts.items():
        is_pooled = isinstance(params, PoolingParams)
        engine.submit(
            engine.inputs.process(
                label, prompt, POOLED if is_pooled else params, now_s=engine.clock.now_s(),
                pooling=params if is_pooled else None,
            )
        )  # fmt: skip
    last = {}
    while engine.has_unfinished:
        last |= {output.request_id: output for output in engine.step() if output.finished}
    return last


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("place", [0, 50, 99])
def test_others_get_what_they_get_without_it(engine: Any, pooling: str, place: int) -> None:
    broken = [*TEXT[:place], POISON, *TEXT[place + 1 :]]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    others = {"vector": (TEXT, PoolingParams(pooling="mean")), "tokens": (TEXT[:30], greedy)}
    alone = run(engine, others)
    engine.flush_prefix_cache()
    beside = run(engine, {"broken": (broken, PoolingParams(pooling=pooling)), **others})
    assert isinstance(beside["broken"].error, QuarantinedError)
    assert beside["broken"].pooled is None
    assert beside["tokens"].outputs[0].token_ids == alone["tokens"].outputs[0].token_ids
    np.testing.assert_allclose(beside["vector"].pooled, alone["vector"].pooled, rtol=0, atol=1e-5)
    engine.core.recovery.quarantine = Quarantine()
    engine.core.recovery._broke_once.clear()
