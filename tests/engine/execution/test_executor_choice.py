"""A step takes the best program whose weights have come to lie as it reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.engine.execution.platform.engine_setup import EngineSetup
from octavo.engine.execution.platform.traits import CPU, GPU, TPU
from octavo.engine.execution.step_spec import StepShape
from octavo.pallas_kernels.compat import graph_compiler_options

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("most_rows_not_ready", [0, 1, 8])
def test_steps_do_not_wait_for_forms_that_are_made_behind(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, most_rows_not_ready: int
) -> None:
    llm = make_llm(warm_up="full")
    wanted = llm.generate(["abc"], PARAMS)[0].outputs[0].token_ids
    weights, used = llm.engine.executor.weights, []
    of = weights.of

    def is_ready(shape: StepShape) -> bool:
        return not shape.is_decode or shape.num_rows > most_rows_not_ready

    def recorded(shape: StepShape) -> Any:
        used.append(shape)
        return of(shape)

    monkeypatch.setattr(weights, "is_ready", is_ready)
    monkeypatch.setattr(weights, "of", recorded)
    assert llm.generate(["abc"], PARAMS)[0].outputs[0].token_ids == wanted
    # Where no form is ready, the step waits for the one it would have taken.
    expected = {0: 1, 1: 4, 8: 1}[most_rows_not_ready]
    assert {shape.num_rows for shape in used if shape.is_decode} == {expected}


def test_loops_go_into_graphs_where_the_host_would_run_them(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for traits, is_asked in ((CPU, False), (TPU, False), (GPU, True)):
        executor = make_llm().engine.executor
        monkeypatch.setattr(EngineSetup, "traits", traits)
        for shape in executor.lattice.shapes:
            options = executor.programs.compiler_options(shape) or {}
            assert (graph_compiler_options().items() <= options.items()) == is_asked
