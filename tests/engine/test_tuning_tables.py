"""Engines look for measured block sizes, and say at once where a table cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.engine.errors import InvalidConfigError
from octavo.engine.execution.platform import kv_memory
from octavo.engine.sampling_params import SamplingParams
from octavo.models.loading.load import load_config
from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import default_page_size

SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))
    tuning.forget_tables()
    yield tmp_path
    tuning.forget_tables()


def test_a_broken_table_ends_the_start(directory: Path, tiny_model: Path) -> None:
    (directory / "mine.json").write_text("{")
    with pytest.raises(InvalidConfigError, match=r"tuning table = .*mine\.json"):
        LLM(str(tiny_model), progress=False, **SMALL)


def test_an_engine_asks_for_its_own_heads_and_pages(directory: Path, tiny_model: Path) -> None:
    """An entry that no kernel could take is met only by the engine that it was measured for."""
    config = load_config(tiny_model)
    heads = config.layers[0].mixer
    q = (16, heads.num_heads, heads.head_dim)
    pool = (2, 2, heads.num_kv_heads, default_page_size("cpu"), heads.head_dim)
    key = tuning.tuning_key("xla", "prefill", q, "float32", pool, "float32")
    entry = {**tuning.key_fields(key), "tiles": {"warp_groups": 2}}
    (directory / "mine.json").write_text(json.dumps({"device": key.device, "entries": [entry]}))
    with pytest.raises(InvalidConfigError, match="'warp_groups': 2"):
        LLM(str(tiny_model), progress=False, **SMALL)


def test_tokens_do_not_depend_on_the_library_of_products(
    directory: Path, make_llm: Callable[..., Any]
) -> None:
    def tokens(library: str) -> list[list[int]]:
        entry = {"dtype": "float32", "num_cores": tuning.num_cores(), "library": library}
        tuning.write_table(directory / "mine.json", {"device": tuning.tuning_device()}, [], [entry])
        llm = make_llm(max_num_seqs=2, max_num_batched_tokens=32, num_kv_pages=40)
        programs = llm.engine.executor.programs
        assert programs.stats.num_after_ready == 0
        options = [programs.compiler_options(shape) for shape in llm.engine.executor.lattice.shapes]
        named = ["xla_cpu_experimental_ynn_fusion_type" in str(each) for each in options]
        assert len(set(named)) == 1
        asked = named[0]
        assert asked == (library == "eigen")
        prompts, params = [[66, 67, 68], [70, 71]], SamplingParams(temperature=0, max_tokens=12)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert tokens("eigen") == tokens("ynnpack")


def test_tokens_do_not_depend_on_whether_weights_are_sliced(
    directory: Path, make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps of two rows read slices, those of one row and prompts float32 weights."""
    monkeypatch.setattr(kv_memory, "available_memory_bytes", lambda: kv_memory.CPU_KV_BYTES * 8)
    entry = {"dtype": "float32", "num_cores": tuning.num_cores(), "library": "ynnpack"}
    table = {"device": tuning.tuning_device()}
    tuning.write_table(directory / "mine.json", table, [], [{**entry, "int8_split": [2, 16]}])

    def tokens(is_sliced: bool) -> list[list[int]]:
        llm = make_llm(
            max_num_seqs=2, max_num_batched_tokens=32, num_kv_pages=40, sliced_weights=is_sliced,
            warm_up="full",
        )  # fmt: skip
        executor = llm.engine.executor
        read = {
            shape.num_tokens: executor.weights.variants.of(shape) == "int8_split"
            for shape in executor.lattice.shapes
        }
        assert read == {1: False, 2: is_sliced, 32: False}
        # The one with the longer prompt is alone at last.
        prompts = [[66, 67, 68], list(range(40, 80))]
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (8, 24)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert tokens(True) == tokens(False)


def test_without_room_for_slices_or_time_weights_stay_whole(
    directory: Path, make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"dtype": "float32", "num_cores": tuning.num_cores(), "library": "ynnpack"}
    table = {"device": tuning.tuning_device()}
    tuning.write_table(directory / "mine.json", table, [], [{**entry, "int8_split": [1, 32]}])
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_kv_pages": 40}

    def is_sliced(warm_up: str = "full") -> bool:
        executor = make_llm(**small, warm_up=warm_up).engine.executor
        return executor.weights.variants.of(executor.lattice.shapes[0]) == "int8_split"

    monkeypatch.setattr(kv_memory, "available_memory_bytes", lambda: kv_memory.CPU_KV_BYTES * 8)
    assert is_sliced()
    assert not is_sliced("coarse")
    monkeypatch.setattr(kv_memory, "available_memory_bytes", lambda: kv_memory.CPU_KV_BYTES * 2)
    assert not is_sliced()
