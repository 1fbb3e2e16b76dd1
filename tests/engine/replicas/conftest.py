"""An engine of two replicas over the tiny model, one for all tests: each takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.replicas import replica as replica_module
from octavo.engine.replicas.replicated_engine import ReplicatedEngine
from tests.engine.conftest import write_tiny_model

ARGUMENTS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_decode_steps": 2,
    "warm_up": "coarse",
    "block_size": 16,
    "host_kv_memory_bytes": 8 << 20,
}


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    """One engine, in this process."""
    engine = Engine(EngineConfig(model=str(model), **ARGUMENTS))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[ReplicatedEngine]:
    """Two replicas, each with a core of its own; idle before and after each test."""
    if num_cores() < 2:
        pytest.skip("replicas want a core each")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replica_module, "MAX_DEATHS", 100)  # tests kill more of them than that
        engine = ReplicatedEngine(EngineConfig(model=str(model), data_parallel_size=2, **ARGUMENTS))
    yield engine
    engine.close()
    for replica in engine.replicas:
        assert replica.process_id is not None
        with pytest.raises(ProcessLookupError):
            os.kill(replica.process_id, 0)
