"""One engine, or several behind the face of one: whichever the configuration wants."""

from __future__ import annotations

from octavo.engine.config import EngineConfig, of_one_engine
from octavo.engine.early_checks import check_early
from octavo.engine.engine import Engine
from octavo.engine.replicas.replica_group import ReplicaGroup
from octavo.engine.replicas.replicated_engine import ReplicatedEngine

AnyEngine = Engine | ReplicaGroup


def open_engine(config: EngineConfig, *, progress: bool = False) -> AnyEngine:
    """Builds what serves `config`: in this process, or in one for each replica.

    Args:
        progress: show a bar while programs compile.

    Raises: as for `Engine`.
    """
    check_early(config)
    if config.data_parallel_size == 1:
        return Engine(config, progress=progress)
    return ReplicatedEngine(config, progress=progress)


def engine_of_this_process(engine: AnyEngine, name: str, value: object) -> Engine:
    """The engine, for what watches its steps.

    Args:
        name, value: the setting that wants to.

    Raises:
        InvalidConfigError: its steps are run in other processes.
    """
    of_one_engine(engine.config, name, value)
    assert isinstance(engine, Engine)
    return engine
