"""/v1/files and /v1/batches."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, Response

from octavo.engine.errors import InvalidRequestError, UnknownObjectError
from octavo.server.http.batches.protocol import BatchRequest
from octavo.server.http.batches.records import FileRecord
from octavo.server.http.batches.service import BatchService
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.errors import json_response
from octavo.server.http.listing import Limit, Order, page_of

FILES_PATH = "/v1/files"
SETTING = "--batch-files-dir"
"""Turns files and batches on."""
MAX_NAME_CHARS = 256
MAX_FIELDS, MAX_FIELD_BYTES = 8, 1024
"""Of an upload, beside its file."""


def batch_routes(service: BatchService | None) -> APIRouter:
    """OpenAI's files and batches.

    Args:
        service: None where they are not offered: every route then says how to turn them on.
    """
    router = APIRouter(route_class=JsonRoute)

    def offered() -> BatchService:
        if service is None:
            allowed = f"a folder on the server: files and batches are off (octavo serve {SETTING})"
            raise UnknownObjectError("batch_files_dir", None, allowed)
        return service

    @router.post(FILES_PATH)
    async def upload(request: Request) -> Response:
        """Takes a file of requests, as multipart/form-data."""
        files = offered()
        with files.receiving():
            made = await _uploaded(files, request)
        return json_response(made.shown())

    @router.get(FILES_PATH)
    async def list_files(
        purpose: str | None = None,
        limit: Limit = 100,
        order: Order = "desc",
        after: str | None = None,
    ) -> Response:
        """The caller's files."""
        shown = [file.shown() for file in offered().files(purpose)]
        return json_response(page_of(shown, limit=limit, order=order, after=after))

    @router.get(FILES_PATH + "/{file_id}")
    async def retrieve_file(file_id: str) -> Response:
        """What is known of a file."""
        return json_response(offered().file(file_id).shown())

    @router.get(FILES_PATH + "/{file_id}/content")
    async def content(file_id: str) -> Response:
        """A file as it is."""
        files = offered()
        path = files.folder.data_path(files.file(file_id))
        return FileResponse(path, media_type="application/octet-stream")

    @router.delete(FILES_PATH + "/{file_id}")
    async def delete_file(file_id: str) -> Response:
        """Forgets a file."""
        await offered().delete(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @router.post("/v1/batches")
    async def create(body: BatchRequest) -> Response:
        """Begins to answer the lines of a file."""
        return json_response((await offered().create(body)).shown())

    @router.get("/v1/batches")
    async def list_batches(limit: Limit = 20, after: str | None = None) -> Response:
        """The caller's batches, the newest first."""
        shown = [batch.shown() for batch in offered().batches()]
        return json_response(page_of(shown, limit=limit, after=after))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve(batch_id: str) -> Response:
        """How far a batch is."""
        return json_response(offered().batch(batch_id).shown())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        """Ends a batch early: what is answered stays."""
        return json_response((await offered().cancel(batch_id)).shown())

    return router


async def _uploaded(files: BatchService, request: Request) -> FileRecord:
    """Reads a form, and keeps its file.

    Raises:
        InvalidRequestError: a field is missing, not known, or not as it should be.
    """
    async with request.form(
        max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
    ) as form:
        for name, value in form.multi_items():
            if name not in ("file", "purpose"):
                raise InvalidRequestError(name, value, "not given: file and purpose are")
        purpose, file = form.get("purpose"), form.get("file")
        if purpose != "batch":
            raise InvalidRequestError("purpose", purpose, '"batch"')
        if not isinstance(file, UploadFile):
            raise InvalidRequestError("file", file, "a file, in multipart/form-data")
        filename = file.filename or ""
        if not 1 <= len(filename) <= MAX_NAME_CHARS or not filename.isprintable():
            allowed = f"a name of 1 to {MAX_NAME_CHARS} printable characters"
            raise InvalidRequestError("file", filename, allowed)
        if not file.size:
            raise InvalidRequestError("file", "no bytes", "a file with at least one line")
        if file.size > files.max_file_bytes:
            allowed = f"at most {files.max_file_bytes} bytes"
            raise InvalidRequestError("file", f"{file.size} bytes", allowed)
        return await files.upload(filename, file.file)
