"""Two replicas embed as one engine does: the same vectors, and both take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, InvalidRequestError
from octavo.engine.replicas.replicated_engine import ReplicatedEngine
from tests.engine.replicas.conftest import ARGUMENTS, num_cores

TEXTS = [f"{'so ' * n}the {n}th text" for n in range(0, 60, 4)]
TOLERANCE = 1e-5
"""Of each number of a vector of length 1: texts are batched with others in float32."""


@pytest.mark.skipif(num_cores() < 2, reason="replicas want a core each")
def test_vectors_are_those_of_one_engine_and_both_take_part(model: Path) -> None:
    def vectors(llm: LLM) -> list[Any]:
        return [
            each.outputs.data
            for pooling in ("last", "mean", "cls")
            for each in llm.embed(TEXTS, pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
        ]

    arguments = ARGUMENTS | {"task": "embed", "progress": False}
    alone = LLM(str(model), **arguments)
    want = vectors(alone)
    alone.close()
    pair = LLM(str(model), data_parallel_size=2, **arguments)
    assert isinstance(pair.engine, ReplicatedEngine)
    found = vectors(pair)
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE)
    [score] = pair.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    assert score.outputs.score == pytest.approx(want[0] @ want[1], abs=TOLERANCE)
    taken = [replica.report.load.prompt_tokens for replica in pair.engine.replicas]
    assert all(taken), taken
    with pytest.raises(InvalidRequestError, match="task = 'embed'"):
        pair.generate("some text", use_tqdm=False)
    pair.engine.check_integrity()
    pair.close()
