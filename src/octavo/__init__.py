"""Octavo: a JAX serving engine for large language models.

The public names are loaded when first used, so that ``import octavo`` costs nothing and does not
start JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from octavo.engine.config import EngineConfig
    from octavo.engine.errors import (
        AsleepError,
        DeadlineExceededError,
        EngineDeadError,
        HostLostError,
        HostsDivergedError,
        InvalidConfigError,
        InvalidRequestError,
        ModelLoadError,
        NothingAllowedError,
        OctavoError,
        OverloadedError,
        PreviousResponseNotFoundError,
        QuarantinedError,
        StartingError,
        StepFailedError,
        UnattainableTargetError,
        UnauthenticatedError,
        UnknownModelError,
        UnknownObjectError,
        UnsupportedModelError,
    )
    from octavo.engine.input.targets import Targets
    from octavo.engine.input.tokenization import Tokenization
    from octavo.engine.llm import LLM
    from octavo.engine.output.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.engine.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from octavo.engine.pooling.params import PoolingParams
    from octavo.engine.sampling_params import SamplingParams
    from octavo.engine.structured.params import StructuredOutputsParams
    from octavo.engine.text.assistant.message import AssistantMessage, ToolCall

__version__ = "0.1.0"

_HOMES = {
    "octavo.engine.llm": ("LLM",),
    "octavo.engine.async_engine": ("AsyncEngine",),
    "octavo.engine.beam_search": ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    "octavo.engine.config": ("EngineConfig",),
    "octavo.engine.sampling_params": ("SamplingParams",),
    "octavo.engine.input.targets": ("Targets",),
    "octavo.engine.input.tokenization": ("Tokenization",),
    "octavo.engine.structured.params": ("StructuredOutputsParams",),
    "octavo.engine.text.assistant.message": ("AssistantMessage", "ToolCall"),
    "octavo.engine.output.outputs": ("CompletionOutput", "Logprob", "RequestOutput"),
    "octavo.engine.pooling.outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "octavo.engine.pooling.params": ("PoolingParams",),
    "octavo.engine.errors": (
        "AsleepError",
        "DeadlineExceededError",
        "EngineDeadError",
        "HostLostError",
        "HostsDivergedError",
        "InvalidConfigError",
        "InvalidRequestError",
        "ModelLoadError",
        "NothingAllowedError",
        "OctavoError",
        "OverloadedError",
        "PreviousResponseNotFoundError",
        "QuarantinedError",
        "StartingError",
        "StepFailedError",
        "UnattainableTargetError",
        "UnauthenticatedError",
        "UnknownModelError",
        "UnknownObjectError",
        "UnsupportedModelError",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsleepError",
    "AssistantMessage",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "DeadlineExceededError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "HostLostError",
    "HostsDivergedError",
    "InvalidConfigError",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "NothingAllowedError",
    "OctavoError",
    "OverloadedError",
    "PoolingParams",
    "PreviousResponseNotFoundError",
    "QuarantinedError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StartingError",
    "StepFailedError",
    "StructuredOutputsParams",
    "Targets",
    "Tokenization",
    "ToolCall",
    "UnattainableTargetError",
    "UnauthenticatedError",
    "UnknownModelError",
    "UnknownObjectError",
    "UnsupportedModelError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
