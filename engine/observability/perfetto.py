"""Schedules as files that Perfetto opens (https://ui.perfetto.dev), in Chrome's trace event format:
"Trace Event Format", Google, 2016."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.engine.observability.schedule import Cell, Schedule, ScheduledStep

_DEVICE, _ROWS, _REQUESTS = 1, 2, 3
_NUM_PROCESSES = 3


def perfetto_trace(schedules: Sequence[Schedule]) -> dict[str, Any]:
    """A trace of one engine, or of replicas side by side; values fit for JSON.

    Each has three processes: the device with its steps, the rows with what each step did for them
    and for whom, and the requests with the time that they waited and what happened to them.
    Times begin at the first of all.
    """
    starts = [
        begin_s
        for schedule in schedules
        for begin_s in (
            *(step.begin_s for step in schedule.steps[:1]),
            *(mark.at_s for mark in schedule.marks),
            *(wait.begin_s for wait in schedule.waits),
        )
    ]
    begin_s = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for index, schedule in enumerate(schedules):
        name = f"replica {index}: " if len(schedules) > 1 else ""
        events += _Writer(schedule, begin_s, index * _NUM_PROCESSES, name).events()
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Writer:
    """Writes one engine's events.

    Args:
        begin_s: time 0 of the trace.
        first: number of its first process, less one.
        name: of the replica.
    """

    def __init__(self, schedule: Schedule, begin_s: float, first: int, name: str) -> None:
        self._schedule = schedule
        self._begin_s = begin_s
        self._first = first
        self._name = name

    def events(self) -> Iterator[dict[str, Any]]:
        """All events, the names of processes and threads first."""
        slots = sorted({cell.slot for step in self._schedule.steps for cell in step.cells})
        for number, title in ((_DEVICE, "device"), (_ROWS, "rows"), (_REQUESTS, "requests")):
            yield self._named("process_name", number, 0, self._name + title)
            yield self._named("process_sort_index", number, 0, number, "sort_index")
        yield self._named("thread_name", _DEVICE, 0, "steps")
        for slot in slots:
            yield self._named("thread_name", _ROWS, slot, f"row {slot}")
            yield self._named("thread_sort_index", _ROWS, slot, slot, "sort_index")
        for step in self._schedule.steps:
            yield from self._step(step)
        yield from self._stays()
        for wait in self._schedule.waits:
            shared = {"cat": "wait", "id": wait.request_id, "name": f"{wait.request_id} waits"}
            yield self._event("b", wait.begin_s, _REQUESTS, 0, **shared)
            yield self._event("e", wait.end_s, _REQUESTS, 0, **shared)
        for mark in self._schedule.marks:
            args = {"request": mark.request_id, "text": mark.text}
            name = f"{mark.kind} {mark.request_id}".strip()
            yield self._event("i", mark.at_s, _REQUESTS, 0, name=name, s="p", args=args)

    def _step(self, step: ScheduledStep) -> Iterator[dict[str, Any]]:
        num_decode = sum(cell.kind == "decode" for cell in step.cells)
        chunks = [cell.num_tokens for cell in step.cells if cell.kind == "prefill"]
        parts = [f"decode {num_decode}"] if num_decode else []
        parts += [f"prefill {'+'.join(map(str, chunks))}"] if chunks else []
        args = {
            "step": step.step_id, "priced_ms": round(step.priced_s * 1e3, 3),
            "num_steps": step.num_steps, "why": step.reason,
        }  # fmt: skip
        name = ", ".join(parts) or "copies"
        yield self._slice(step.begin_s, step.end_s, _DEVICE, 0, name, args)
        tokens = {"decode": num_decode, "prefill": sum(chunks)}
        yield self._event("C", step.begin_s, _DEVICE, 0, name="tokens in the step", args=tokens)
        for cell in step.cells:
            yield self._slice(
                step.begin_s, step.end_s, _ROWS, cell.slot, _name_of(cell),
                {
                    "request": cell.request_id, "tokens": cell.num_tokens, "why": cell.reason,
                    "slack_ms": None if cell.slack_s is None else round(cell.slack_s * 1e3, 3),
                },
            )  # fmt: skip

    def _stays(self) -> Iterator[dict[str, Any]]:
        """For each row, who had it from when to when, around what the steps did."""
        open_stays: dict[int, tuple[str, float, float]] = {}
        for step in self._schedule.steps:
            for cell in step.cells:
                name, begin_s, end_s = open_stays.get(cell.slot, ("", 0.0, 0.0))
                if name != cell.request_id:
                    if name:
                        yield self._slice(begin_s, end_s, _ROWS, cell.slot, name, {})
                    begin_s = step.begin_s
                open_stays[cell.slot] = cell.request_id, begin_s, step.end_s
        for slot, (name, begin_s, end_s) in open_stays.items():
            yield self._slice(begin_s, end_s, _ROWS, slot, name, {})

    def _slice(
        self, begin_s: float, end_s: float, process: int, thread: int, name: str, args: Any
    ) -> dict[str, Any]:
        duration_us = round((end_s - begin_s) * 1e6, 3)
        return self._event(
            "X", begin_s, process, thread, name=name, dur=duration_us, args=args
        )  # fmt: skip

    def _named(
        self, kind: str, process: int, thread: int, value: object, field: str = "name"
    ) -> dict[str, Any]:
        event = {"ph": "M", "name": kind, "pid": self._first + process, "tid": thread}
        return event | {"args": {field: value}}

    def _event(
        self, phase: str, at_s: float, process: int, thread: int, **rest: Any
    ) -> dict[str, Any]:
        time_us = round((at_s - self._begin_s) * 1e6, 3)
        return {
            "ph": phase, "ts": time_us, "pid": self._first + process, "tid": thread, **rest
        }  # fmt: skip


def _name_of(cell: Cell) -> str:
    """Perfetto colours by name: what is late stands out."""
    late = " late" if cell.slack_s is not None and cell.slack_s < 0 else ""
    return f"{cell.kind}{late}"
