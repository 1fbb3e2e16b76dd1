"""The gRPC client: `OctavoClient` for threads, `AsyncOctavoClient` for asyncio.

What goes in and comes out are the engine's own types, and what is raised are its own errors:

>>> from octavo.client import OctavoClient, SamplingParams
>>> with OctavoClient("127.0.0.1:50051", timeout_s=30) as client:
...     for output in client.stream("The capital of France is", SamplingParams(max_tokens=8)):
...         print(output.outputs[0].text, end="")
"""

from octavo.engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    NothingAllowedError,
    OctavoError,
    OverloadedError,
    PreviousResponseNotFoundError,
    StepFailedError,
    UnattainableTargetError,
    UnauthenticatedError,
    UnknownModelError,
    UnknownObjectError,
)
from octavo.engine.output.outputs import CompletionOutput, RequestOutput
from octavo.engine.request import Priority
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.server.client import AsyncOctavoClient, OctavoClient
from octavo.server.retries import RetryPolicy

__all__ = [
    "AsyncOctavoClient",
    "CompletionOutput",
    "DeadlineExceededError",
    "EngineDeadError",
    "InvalidRequestError",
    "NothingAllowedError",
    "OctavoClient",
    "OctavoError",
    "OverloadedError",
    "PreviousResponseNotFoundError",
    "Priority",
    "RequestOutput",
    "RequestOutputKind",
    "RetryPolicy",
    "SamplingParams",
    "StepFailedError",
    "StructuredOutputsParams",
    "UnattainableTargetError",
    "UnauthenticatedError",
    "UnknownModelError",
    "UnknownObjectError",
]
