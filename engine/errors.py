"""Every error Octavo raises on purpose, in one tree.

::

    OctavoError
    ├── InvalidRequestError        a request that can never be served      INVALID_ARGUMENT    400
    │   ├── UnknownModelError      the named model is not the one served   NOT_FOUND           404
    │   ├── UnknownObjectError     an id of which nothing is kept here     NOT_FOUND           404
    │   ├── PreviousResponseNotFoundError  what to go on from is not kept  INVALID_ARGUMENT    400
    │   ├── UnattainableTargetError  a target that an idle server misses   FAILED_PRECONDITION 422
    │   └── NothingAllowedError    its own fields forbid every token       INVALID_ARGUMENT    400
    ├── UnauthenticatedError       no token that the server knows          UNAUTHENTICATED     401
    ├── OverloadedError            a good request, but not now             RESOURCE_EXHAUSTED  429
    ├── DeadlineExceededError      the client's own deadline has passed    DEADLINE_EXCEEDED   504
    ├── InvalidConfigError         engine arguments that cannot work       FAILED_PRECONDITION 500
    ├── ModelLoadError             a checkpoint that cannot be trusted     FAILED_PRECONDITION 500
    │   └── UnsupportedModelError  mathematics Octavo does not implement   UNIMPLEMENTED       501
    ├── StepFailedError            a step failed, and the request with it  INTERNAL            500
    │   └── QuarantinedError       a request that makes steps fail         INTERNAL            500
    ├── AsleepError                the engine sleeps until it is woken     UNAVAILABLE         503
    └── EngineDeadError            the engine stopped, draining or broken  UNAVAILABLE         503
        ├── StartingError          a server whose model is still loading   UNAVAILABLE         503
        ├── HostLostError          a host of a group died or fell silent   UNAVAILABLE         503
        └── HostsDivergedError     hosts of a group computed other tokens  UNAVAILABLE         503

A message names the field, the value and what is allowed. Each class carries the one gRPC status
and the one HTTP status it maps to, so that no front has a table of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import PurePath
from typing import Any, ClassVar

NOT_FAILURES = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that end what runs because somebody wants it to end. Any other `BaseException` is a
failure: a panic in a library's Rust code is one, and no `Exception`."""
SHOWN_DEPTH = 4
"""Levels of a value that an error shows."""


class OctavoError(Exception):
    """Base of all errors raised on purpose."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500

    def __reduce__(self) -> tuple[Any, ...]:
        """By its message and fields: what is unpickled is not built from its words again."""
        return _restore, (type(self), self.args, self.__dict__)


class InvalidRequestError(OctavoError, ValueError):
    """A request that can never be served as it stands.

    Args:
        field: name of the offending field as the user wrote it.
        value: the offending value (shown shortened).
        allowed: what would have been accepted, as a phrase.
    """

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {shorten(value)} is not allowed: {allowed}")


class UnknownModelError(InvalidRequestError):
    """The request names a model that this engine does not serve."""

    grpc_status = "NOT_FOUND"
    http_status = 404


class UnknownObjectError(InvalidRequestError):
    """The request names a response, file or batch that is not kept here, or is another caller's."""

    grpc_status = "NOT_FOUND"
    http_status = 404


class PreviousResponseNotFoundError(InvalidRequestError):
    """The request goes on from a response that is not kept here, or whose conversation is not."""


class NothingAllowedError(InvalidRequestError):
    """The request came to a place at which its own fields forbid every token."""


class UnattainableTargetError(InvalidRequestError):
    """The request asks for an answer sooner than an idle server has given one: there is no time at
    which to come back.

    Args:
        field: name of the target.
        value: the target, in seconds.
        least_s: the smallest target that could be met, in seconds, by the best that was measured.
    """

    grpc_status = "FAILED_PRECONDITION"
    http_status = 422

    def __init__(self, field: str, value: Any, least_s: float) -> None:
        self.least_s = least_s
        # Rounded up: what is named must be enough.
        digits = 2 - math.floor(math.log10(max(least_s, 1e-9)))
        named_s = math.ceil(least_s * 10**digits) / 10**digits
        allowed = f"at least {named_s:.3g} s, the least that this server has been measured to take"
        super().__init__(field, value, allowed)


class UnauthenticatedError(OctavoError):
    """The caller showed no token, or none that the server knows."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class OverloadedError(OctavoError):
    """A good request that cannot be taken now; try again after `retry_after_s` seconds."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, reason: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{reason}; try again in {retry_after_s:.3g} s")


class DeadlineExceededError(OctavoError, TimeoutError):
    """The request's own deadline passed before it finished."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class InvalidConfigError(OctavoError, ValueError):
    """An engine argument that cannot work.

    Args: as for `InvalidRequestError`.
    """

    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {shorten(value)} is not allowed: {allowed}")


class ModelLoadError(OctavoError, ValueError):
    """A checkpoint, tokenizer or configuration that is damaged, incomplete or unsafe."""

    grpc_status = "FAILED_PRECONDITION"


class UnsupportedModelError(ModelLoadError):
    """A model whose mathematics Octavo does not implement."""

    grpc_status = "UNIMPLEMENTED"
    http_status = 501


class StepFailedError(OctavoError):
    """A step failed, and the request could not be finished otherwise; the engine goes on."""


class QuarantinedError(StepFailedError):
    """The request made steps fail again and again; its prompt is refused for some minutes."""


class AsleepError(OctavoError):
    """The engine has given its memory back, and takes no work until it is woken."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class EngineDeadError(OctavoError):
    """The engine no longer takes work: it is draining, was shut down, or broke."""

    grpc_status = "UNAVAILABLE"
    http_status = 503


class StartingError(EngineDeadError):
    """The server does not take work yet: its model is still loading."""


class HostLostError(EngineDeadError):
    """A host of a group died, fell silent, or failed where the others did not: the group ends."""


class HostsDivergedError(EngineDeadError):
    """Two hosts of a group computed different things, so that no token can be trusted any more: the
    group ends.

    Args:
        host_id: whose digest differs from the leader's.
        step: the last step that both digests cover; counted since the start or the last reset.
    """

    def __init__(self, host_id: int, step: int) -> None:
        self.host_id = host_id
        self.step = step
        super().__init__(f"host {host_id} computed another step {step} than the leader")


def _restore(kind: type[OctavoError], args: tuple[Any, ...], fields: dict[str, Any]) -> OctavoError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def shorten(value: Any, limit: int = 80) -> str:
    """`repr(value)` cut to `limit` characters, so that a message never repeats a whole prompt.

    Paths are shown whole: what tells files apart is at the end.
    """
    if isinstance(value, PurePath):
        return repr(str(value))
    try:
        text = repr(_cut(value, limit, limit))
    except (ValueError, RecursionError):  # Python writes no number of thousands of digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _cut(value: Any, chars: int, parts: int, depth: int = 0) -> Any:
    """The first parts of a value, so that `repr` of it takes no time whatever its size."""
    if isinstance(value, (str, bytes)):
        return value[:chars] if len(value) > chars else value
    if type(value) not in (list, tuple, dict):
        return value
    if depth == SHOWN_DEPTH:
        return ...
    within = max(1, parts // 8)
    if isinstance(value, dict):
        first = itertools.islice(value.items(), parts)
        return {_cut(k, chars, within): _cut(v, chars, within, depth + 1) for k, v in first}
    return type(value)(_cut(item, chars, within, depth + 1) for item in value[:parts])
