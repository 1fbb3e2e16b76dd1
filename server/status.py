"""Typed errors to gRPC statuses with google.rpc details, and back.

Every status carries `ErrorInfo` (domain "octavo"; reason is the error's class in upper case; its
arguments as metadata), so that a client raises the same error with the same message.
INVALID_ARGUMENT and NOT_FOUND also carry `BadRequest`, RESOURCE_EXHAUSTED also carries `RetryInfo`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from octavo.engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
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
    shorten,
)

DOMAIN = "octavo"
DETAILS_KEY = "grpc-status-details-bin"
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")
_MAX_CHARS = 1000
"""Of each string: statuses travel in headers, which are small."""


def status_of(error: OctavoError) -> status_pb2.Status:
    """The rich status of a typed error."""
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error.grpc_status), message=_clean(str(error))
    )
    info = error_details_pb2.ErrorInfo(reason=reason_of(type(error)), domain=DOMAIN)
    info.metadata.update({key: _clean(text) for key, text in _arguments(error).items()})
    _attach(status, info)
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clean(error.field),
            description=_clean(f"{shorten(error.value)} is not allowed: {error.allowed}"),
            reason=info.reason,
        )
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverloadedError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        _attach(status, retry)
    return status


def error_of(call_error: grpc.RpcError) -> OctavoError:
    """The typed error that a failed call stands for; a plain OctavoError if it is none of ours.

    Args:
        call_error: what grpc or grpc.aio raised: it has code(), details(), trailing_metadata().
    """
    code: grpc.StatusCode = call_error.code()
    text: str = call_error.details() or code.name
    info = error_details_pb2.ErrorInfo()
    for detail in _details(call_error.trailing_metadata() or ()):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
    if info.domain == DOMAIN and info.reason in _REBUILD:
        return _REBUILD[info.reason](text, info.metadata)
    # grpc itself answered: no details.
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError(f"timeout_s passed before the answer was complete ({text})")
    if code is grpc.StatusCode.UNAVAILABLE:
        return EngineDeadError(text)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UnauthenticatedError(text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (found := _TOO_LARGE.search(text)):
        size, limit = found.groups()
        return InvalidRequestError(
            "message", RemoteValue(f"{size} bytes"), f"at most {limit} bytes"
        )
    return OctavoError(f"{code.name}: {text}")


class RemoteValue(str):
    """A refused value as the server showed it; its repr is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _details(metadata: Iterable[tuple[str, Any]]) -> list[any_pb2.Any]:
    for key, value in metadata:
        if key == DETAILS_KEY:
            return list(status_pb2.Status.FromString(value).details)
    return []


def _attach(status: status_pb2.Status, detail: Any) -> None:
    status.details.add().Pack(detail)


def reason_of(kind: type[OctavoError]) -> str:
    """InvalidRequestError -> INVALID_REQUEST."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Error")).upper()


def _clean(text: str) -> str:
    return text[:_MAX_CHARS].encode("utf-8", "replace").decode("utf-8")


def _arguments(error: OctavoError) -> dict[str, str]:
    if isinstance(error, UnattainableTargetError):
        value = shorten(error.value)
        return {"field": error.field, "value": value, "least_s": repr(error.least_s)}
    if isinstance(error, (InvalidRequestError, InvalidConfigError)):
        return {"field": error.field, "value": shorten(error.value), "allowed": error.allowed}
    if isinstance(error, OverloadedError):
        reason = str(error).rpartition("; try again in ")[0]
        return {"reason": reason, "retry_after_s": repr(error.retry_after_s)}
    return {}


def _fielded(
    kind: type[InvalidRequestError] | type[InvalidConfigError],
) -> Callable[[str, Mapping[str, str]], OctavoError]:
    return lambda text, data: kind(data["field"], RemoteValue(data["value"]), data["allowed"])


def _plain(kind: type[OctavoError]) -> Callable[[str, Mapping[str, str]], OctavoError]:
    return lambda text, data: kind(text)


_REBUILD: dict[str, Callable[[str, Mapping[str, str]], OctavoError]] = {
    reason_of(InvalidRequestError): _fielded(InvalidRequestError),
    reason_of(UnknownModelError): _fielded(UnknownModelError),
    reason_of(UnknownObjectError): _fielded(UnknownObjectError),
    reason_of(PreviousResponseNotFoundError): _fielded(PreviousResponseNotFoundError),
    reason_of(NothingAllowedError): _fielded(NothingAllowedError),
    reason_of(UnattainableTargetError): lambda text, data: UnattainableTargetError(
        data["field"], RemoteValue(data["value"]), float(data["least_s"])
    ),
    reason_of(InvalidConfigError): _fielded(InvalidConfigError),
    reason_of(OverloadedError): lambda text, data: OverloadedError(
        data["reason"], float(data["retry_after_s"])
    ),
    **{
        reason_of(kind): _plain(kind)
        for kind in (
            DeadlineExceededError,
            ModelLoadError,
            UnsupportedModelError,
            StepFailedError,
            QuarantinedError,
            UnauthenticatedError,
            EngineDeadError,
            StartingError,
            OctavoError,
        )
    },
}
