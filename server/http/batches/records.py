"""What is known of a file and of a batch: as it is kept, and as OpenAI's API shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that are still to end."""
_MOMENTS = (
    *("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file that a client uploaded, or that a batch made.

    Attributes:
        id: "file-…".
        owner: the credential that it belongs to; see `Caller.owner`.
        filename: the client's name for it; no path is ever made of it.
        purpose: "batch" or "batch_output".
        num_bytes: its size.
        created_at: seconds since 1970.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(slots=True, kw_only=True)
class BatchRecord:
    """A batch. Its runner alone changes it, but for its cancelling.

    Attributes:
        id: "batch_…".
        owner, tenant, reserved: the caller that its requests belong to; see `Caller`.
        endpoint: path that answers its lines.
        input_file_id: the file of lines.
        completion_window: as the client wrote it.
        created_at, expires_at: seconds since 1970.
        metadata: the client's.
        status: OpenAI's.
        moments: status -> when it was come to, seconds since 1970.
        total, completed, failed: lines; of those with an answer, how many were answered well.
        ends_as: its last status, once that is certain.
        output_file_id, error_file_id: files of results, once there are to be any.
        errors: why the whole batch failed.
    """

    id: str
    owner: str
    tenant: str | None
    reserved: list[str]
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    moments: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    ends_as: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_unfinished(self) -> bool:
        """Whether it is still to end."""
        return self.status in UNFINISHED

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        has_ended = not self.is_unfinished
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if has_ended else None,
            "error_file_id": self.error_file_id if has_ended else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.moments.get(name) for name in _MOMENTS},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }
