"""Engines with bounds of logits: the same tokens, logits only for those who need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from octavo.engine.execution.platform import kv_memory
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.execution.weights.program_weights import ProgramWeights
from octavo.engine.execution.weights.weight_variants import plain_variants
from octavo.engine.sampling_params import SamplingParams
from octavo.models import decoder
from octavo.models.decoder import LOGIT_BOUNDS
from octavo.models.loading.load import load_config, open_model
from octavo.models.weight_variants.logit_bounds import can_bound_logits
from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import multiplies_bfloat16, product_compiler_options
from octavo.pallas_kernels.cpu.eigen_linear import EigenWeight
from octavo.sharding.mesh import make_mesh
from tests.engine.conftest import write_tiny_model

pytestmark = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this JAX multiplies bfloat16 slowly: no engine bounds logits"
)

PROMPTS = [[66, 67, 68], list(range(40, 80)), [90], [5, 7, 9, 11]]


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture
def tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[list[int] | None], None]]:
    """Writes a table that says which rows' logits are bounded."""
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(kv_memory, "available_memory_bytes", lambda: kv_memory.CPU_KV_BYTES * 8)

    def write(bounded: list[int] | None, library: str = "ynnpack", **more: Any) -> None:
        entry = {"dtype": "float32", "num_cores": tuning.num_cores(), "library": library}
        table = {"device": tuning.tuning_device()}
        path = tmp_path / "mine.json"
        tuning.write_table(path, table, [], [{**entry, "bounded_argmax": bounded, **more}])
        tuning.forget_tables()

    yield write
    tuning.forget_tables()


def greedy(length: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **more)


PARAMS = {
    "all greedy": [greedy(12), greedy(5), greedy(20), greedy(9)],
    "some drawn": [
        greedy(12),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=6),
        greedy(20),
        SamplingParams(temperature=1.2, top_k=20, seed=4, max_tokens=14),
    ],
    "some with more than a token": [
        greedy(12, logprobs=3),
        greedy(5, presence_penalty=1.0),
        greedy(20, logit_bias={70: 4.0}),
        SamplingParams(temperature=0, max_tokens=9, min_tokens=4),
    ],
}


SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_kv_pages": 40, "warm_up": "full"}


@pytest.mark.parametrize("library", ["ynnpack", "eigen"])
def test_tokens_do_not_depend_on_the_bounds(
    tuned: Callable[..., None], make_llm: Callable[..., Any], tied_model: Path, library: str
) -> None:
    tuned([1, 8], library)

    def tokens(has_bounds: bool) -> dict[str, list[list[int]]]:
        llm = make_llm(model=str(tied_model), screened_argmax=has_bounds, **SMALL)
        executor = llm.engine.executor
        reads = {executor.weights.variants.reads_bounds(shape) for shape in executor.lattice.full}
        # Prompts' products stay Eigen's.
        assert reads == {has_bounds, has_bounds and library == "ynnpack"}
        return {
            name: [
                list(output.outputs[0].token_ids)
                for output in llm.generate(PROMPTS, params, use_tqdm=False)
            ]
            for name, params in PARAMS.items()
        }

    bounded, plain = tokens(True), tokens(False)
    assert bounded == plain
    assert len({token for each in bounded["all greedy"] for token in each}) > 8


def test_logits_are_computed_only_where_somebody_needs_them(
    tuned: Callable[..., None],
    make_llm: Callable[..., Any],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned([1, 8])
    computed: list[None] = []
    unembed = decoder.unembed

    def counted(*args: Any) -> jax.Array:
        jax.debug.callback(lambda: computed.append(None))
        return unembed(*args)

    monkeypatch.setattr(decoder, "unembed", counted)
    llm = make_llm(model=str(tied_model), compile_cache_dir="", **SMALL)
    computed.clear()
    llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    jax.effects_barrier()
    assert not computed
    llm.generate(PROMPTS, greedy(6, logprobs=1), use_tqdm=False)
    jax.effects_barrier()
    assert computed


@pytest.mark.parametrize(
    ("library", "int8_split", "bounded"),
    [
        ("eigen", None, ["decode 8 x 4 8", "decode 16 x 4 16"]),
        ("eigen", (8, 32), ["decode 8 x 4 8", "decode 16 x 4 16"]),
        ("eigen", (8, 64), ["decode 8 x 4 8", "decode 16 x 4 16", "mixed 64"]),
        ("ynnpack", None, ["decode 8 x 4 8", "decode 16 x 4 16", "mixed 64"]),
    ],
)
def test_prompts_have_bounds_where_their_products_are_ynnpacks(
    tuned: Callable[..., None],
    tied_model: Path,
    library: str,
    int8_split: tuple[int, int] | None,
    bounded: list[str],
) -> None:
    """Eigen has products of float32 alone; what reads digits is YNNPACK's. Bounds make a decode
    program YNNPACK's, whose layers are Eigen's all the same."""
    tuned(None, library)
    mesh = make_mesh(1)
    abstract = open_model(str(tied_model), "float32", mesh, "none").abstract_weights()
    variants = replace(
        plain_variants(abstract, jnp.dtype("float32")),
        int8_split_tokens=int8_split,
        bounded_rows=(8, 16),
    )
    weights = ProgramWeights(abstract, mesh, variants)
    shapes = [StepShape(rows, rows, 4) for rows in (4, 8, 16, 24)]
    shapes += [StepShape(64, 16, 0), StepShape(64, 16, 0, quick=True), StepShape(64, 32, 0)]
    read = [shape for shape in shapes if variants.reads_bounds(shape)]
    assert [str(shape) for shape in read] == [f"{name} general" for name in bounded]
    for shape in shapes:
        tree = weights.abstract_of(shape)
        assert (LOGIT_BOUNDS in tree) == (shape in read)
        is_split = variants.of(shape) == "int8_split"
        is_marked = isinstance(tree["layers"][0]["w_down"], EigenWeight)
        assert is_marked == (library == "eigen" and shape in read and not is_split)
        is_ynnpacks = library == "ynnpack" or is_split or shape in read
        assert weights.compiler_options(shape) == (
            {} if is_ynnpacks else product_compiler_options("eigen")
        )


def test_without_room_for_bounds_or_time_there_are_none(
    tuned: Callable[..., None],
    make_llm: Callable[..., Any],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned([1, 8])
    changes = {"model": str(tied_model), **SMALL, "warm_up": "coarse"}
    assert make_llm(**changes).engine.executor.weights.variants.bounded_rows is None
    monkeypatch.setattr(kv_memory, "available_memory_bytes", lambda: kv_memory.CPU_KV_BYTES)
    changes["warm_up"] = "early"
    assert make_llm(**changes).engine.executor.weights.variants.bounded_rows is None


def test_a_models_logits_have_to_be_those_of_its_embedding_table(
    tied_model: Path, tiny_model: Path
) -> None:
    tied = load_config(tied_model)
    assert can_bound_logits(tied)
    assert not can_bound_logits(load_config(tiny_model))
    assert not can_bound_logits(replace(tied, final_logit_softcap=30.0))
