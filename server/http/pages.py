"""The pages that a person looks at: the server's state, and a chat."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}
"""The page loads nothing from anywhere, and shows nothing inside another page."""


def page_routes() -> APIRouter:
    """The routes of the pages. Their scripts ask the other routes, with the reader's token."""
    router = APIRouter()
    folder = Path(__file__).parent
    status, chat = ((folder / f"{name}_page.html").read_bytes() for name in ("status", "chat"))

    @router.get("/", include_in_schema=False)
    async def status_page() -> Response:
        """Reads /v1/load and /metrics every two seconds, and /v1/schedule every second."""
        return Response(status, media_type="text/html", headers=_PAGE_HEADERS)

    @router.get("/chat", include_in_schema=False)
    async def chat_page() -> Response:
        """Talks to /v1/chat/completions."""
        return Response(chat, media_type="text/html", headers=_PAGE_HEADERS)

    return router
