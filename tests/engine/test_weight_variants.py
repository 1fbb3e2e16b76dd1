"""Greedy tokens of real GGUF weights in every weight variant that ships, alone and in a batch.

Programs of different sizes and variants add the products of a sum in different orders, so logits
move by their rounding. Tokens of a prompt must be the same up to a position where the model itself
is undecided within that rounding: `TIE` nats between its two likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.sampling_params import SamplingParams
from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import multiplies_bfloat16
from octavo.pallas_kernels.cpu.block_quantized_linear import BlockQuantizedWeight, PanelWeight
from octavo.pallas_kernels.cpu.eigen_linear import EigenWeight
from octavo.pallas_kernels.cpu.int8_split_linear import Int8SplitWeight
from octavo.pallas_kernels.packed_linear import PackedWeight

TIE = 1e-3
"""Logits of these weights are up to 35 and agree within 1e-3 between frameworks: the tolerance of
tests/models/test_real_models.py."""
NUM_PROMPTS, NUM_ROWS = 24, 2
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
PLAIN = {"packed_weights": False, "sliced_weights": False, "screened_argmax": False}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "plain": ({}, {}),
    "block-quantized": ({"block_quantized": NUM_ROWS}, {"packed_weights": True}),
    "int8-split": ({"int8_split": [1, 32]}, {"sliced_weights": True}),
    "bounded argmax, Eigen's products": (
        {"library": "eigen", "bounded_argmax": [1, 32]},
        {"screened_argmax": True},
    ),
    "as stored": ({}, {"quantization": "stored", "packed_weights": True}),
}
"""By name: what a tuning table says, and engine arguments."""


def make_prompts(tokenizer: Any) -> list[list[int]]:
    """Windows of English and, every other one, random tokens."""
    from octavo.engine.measuring.accuracy import TEXT_FILE

    rng = np.random.default_rng(3)
    ids = tokenizer.encode(TEXT_FILE.read_text("utf-8"))
    made = []
    for index in range(NUM_PROMPTS):
        length = int(rng.integers(4, 40))
        start = int(rng.integers(0, len(ids) - length))
        drawn = rng.integers(256, 40_000, size=length).tolist()
        made.append(ids[start : start + length] if index % 2 else drawn)
    return made


@pytest.fixture
def compile_for_speed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has programs compiled as outside of tests: blocks and whole vocabularies take longer to run
    through plain machine code than code that takes twice as long to make."""
    options_of = DeviceExecutor._compiler_options

    def with_speed(self: DeviceExecutor, shape: StepShape) -> dict[str, str]:
        return (options_of(self, shape) or {}) | {"xla_backend_optimization_level": "3"}

    return lambda: monkeypatch.setattr(DeviceExecutor, "_compiler_options", with_speed)


@pytest.fixture
def write_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes the tuning table that engines read."""
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))

    def write(entry: dict[str, Any]) -> None:
        row = {"dtype": "float32", "num_cores": tuning.num_cores(), "library": "ynnpack", **entry}
        tuning.write_table(tmp_path / "mine.json", {"device": tuning.tuning_device()}, [], [row])
        tuning.forget_tables()

    yield write
    tuning.forget_tables()


def make_llm(model: str, num_rows: int, **changes: Any) -> Any:
    from octavo import LLM

    return LLM(
        model, progress=False, dtype="float32", max_num_seqs=num_rows, max_num_batched_tokens=32,
        max_model_len=64, num_kv_pages=64, enable_prefix_caching=False, **PLAIN | changes,
    )  # fmt: skip


class Served(NamedTuple):
    """What a request was given alone: at each position the token, and the gap in nats between the
    two likeliest ones."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


@pytest.fixture(scope="module")
def alone(first_layers: str) -> list[Served]:
    """Prompts and their tokens by plain float32 weights, one request at a time."""
    llm = make_llm(first_layers, 1, warm_up="coarse")
    found = []
    for prompt in make_prompts(llm.tokenizer):
        output = llm.generate(prompt, PARAMS.replace(logprobs=2), use_tqdm=False)[0].outputs[0]
        tops = [sorted((s.logprob for s in at.values()), reverse=True) for at in output.logprobs]
        found.append(Served(prompt, list(output.token_ids), [top[0] - top[1] for top in tops]))
    llm.close()
    return found


def kinds_read(llm: Any) -> set[type]:
    """The classes of the linear layers' weights that the engine's programs read."""
    executor = llm.engine.executor
    trees = [executor.weights.of(shape) for shape in executor.lattice.shapes]
    return {type(tree["layers"][0]["w_down"]) for tree in trees}


EXPECTED: dict[str, set[type]] = {
    "block-quantized": {BlockQuantizedWeight, PanelWeight},
    "int8-split": {Int8SplitWeight},
    "bounded argmax, Eigen's products": {EigenWeight},
    "as stored": {PackedWeight, BlockQuantizedWeight, PanelWeight},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_differ_only_where_the_model_is_undecided(
    variant: str,
    write_table: Any,
    first_layers: str,
    alone: list[Served],
    compile_for_speed: Callable[[], None],
) -> None:
    entry, changes = VARIANTS[variant]
    if "bounded_argmax" in entry and not multiplies_bfloat16():
        pytest.skip("this JAX multiplies bfloat16 slowly: no engine screens")
    write_table(entry)
    if entry.keys() & {"block_quantized", "bounded_argmax"} or "quantization" in changes:
        compile_for_speed()
    llm = make_llm(first_layers, NUM_ROWS, warm_up="full", **changes)
    assert kinds_read(llm) >= EXPECTED.get(variant, set())
    reads = [
        llm.engine.executor.weights.variants.reads_bounds(s)
        for s in llm.engine.executor.lattice.shapes
    ]
    assert any(reads) == ("bounded_argmax" in entry)
    outputs = llm.generate([each.prompt for each in alone], PARAMS, use_tqdm=False)
    llm.close()
    llm.engine.check_integrity()
    num_same = 0
    for one, output in zip(alone, outputs, strict=True):
        pairs = zip(one.tokens, output.outputs[0].token_ids, strict=True)
        first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        num_same += first is None
        assert first is None or one.gaps[first] < TIE, (first, one.gaps[first])
    assert num_same >= 0.9 * NUM_PROMPTS
