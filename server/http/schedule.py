"""GET /v1/schedule: what the last steps did for each row, and why."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.errors import InvalidRequestError
from octavo.engine.observability.schedule import Schedule
from octavo.server.front import Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.errors import encode_long


def schedule_routes(front: Front) -> APIRouter:
    """The route of the schedule."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/v1/schedule")
    async def schedule(request: Request) -> Response:
        """Rows by time over the last seconds, for each replica.

        Query: `since_s` (0): only what ended after that time, on the engine's clock.
        """
        since_s = _seconds(request.query_params.get("since_s", "0"))
        engine = front.ready_engine()
        schedules = await engine.schedules()
        now_s = engine.engine.clock.now_s()
        data = await asyncio.to_thread(lambda: encode_long(_content(schedules, now_s, since_s)))
        return Response(data, media_type="application/json")

    return router


def _content(schedules: Sequence[Schedule], now_s: float, since_s: float) -> dict[str, Any]:
    return {"now_s": now_s, "replicas": [_replica(each.since(since_s)) for each in schedules]}


def _replica(schedule: Schedule) -> dict[str, Any]:
    return {
        "steps": [
            {
                "step": step.step_id,
                "begin_s": step.begin_s,
                "end_s": step.end_s,
                "priced_s": step.priced_s,
                "num_steps": step.num_steps,
                "why": step.reason,
                # Thousands: a list each, not an object.
                "rows": [
                    [
                        cell.slot, cell.request_id, cell.kind, cell.num_tokens,
                        None if cell.slack_s is None else round(cell.slack_s, 4), cell.reason,
                    ]
                    for cell in step.cells
                ],
            }
            for step in schedule.steps
        ],
        "marks": [
            {"at_s": mark.at_s, "kind": mark.kind, "id": mark.request_id, "text": mark.text}
            for mark in schedule.marks
        ],
    }  # fmt: skip


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidRequestError("since_s", text, "seconds on the engine's clock, 0 or more")
    return seconds
