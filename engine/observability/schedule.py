"""A schedule as people look at it: rows by time, with what each step did for each row and why.

It is read from the lines of the event log (`event_log.py`), whether a file, a simulation or a live
engine has them: the status page, traces for Perfetto and plots all show the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What one step did for one row.

    Attributes:
        request_id: the engine's.
        slot: the row on the device.
        kind: a chunk of a prompt, or decode iterations.
        num_tokens: of the chunk, or emitted.
        slack_s: how much earlier than its target the request was at the step's end, in seconds;
            negative if late, None without a target.
        reason: the plan's own, or empty.
    """

    request_id: str
    slot: int
    kind: Kind
    num_tokens: int
    slack_s: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step that was computed.

    Attributes:
        step_id: of its plan.
        begin_s, end_s: when the device worked on it, on the engine's clock.
        priced_s: seconds that it was expected to take.
        num_steps: most decode iterations of a row.
        cells: its rows.
        reason: the plan's own, of the step as a whole, or empty.
    """

    step_id: int
    begin_s: float
    end_s: float
    priced_s: float
    num_steps: int
    cells: tuple[Cell, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a request at one moment.

    Attributes:
        at_s: when, on the engine's clock.
        kind: "arrived", "refused", "preempted", "swapped out", "swapped in", "lost" (its step
            failed), or the status that it ended with.
        request_id: the engine's; empty for pages of the prefix cache.
        text: more about it, or empty.
    """

    at_s: float
    kind: str
    request_id: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch in which a request had no row.

    Attributes:
        request_id: the engine's.
        begin_s, end_s: on the engine's clock.
    """

    request_id: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Schedule:
    """Steps, marks and waits, each in the order in which they ended."""

    steps: list[ScheduledStep] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def __add__(self, later: Schedule) -> Schedule:
        return Schedule(
            self.steps + later.steps, self.marks + later.marks, self.waits + later.waits
        )

    def since(self, begin_s: float) -> Schedule:
        """What ended at that time or later."""
        return Schedule(
            [step for step in self.steps if step.end_s >= begin_s],
            [mark for mark in self.marks if mark.at_s >= begin_s],
            [wait for wait in self.waits if wait.end_s >= begin_s],
        )


def read_schedule(lines: Iterable[Mapping[str, Any]]) -> Schedule:
    """The schedule that an event log tells of.

    Args:
        lines: of the log, parsed, in order; it may begin at any moment. Steps that were not
            committed are left out.
    """
    reader = ScheduleReader()
    for line in lines:
        reader.read(line)
    return reader.schedule


@dataclass(slots=True)
class _Request:
    """What slack is counted from."""

    arrival_s: float
    ttft_s: float | None
    tpot_s: float | None
    due_s: float | None
    first_token_s: float | None
    num_output: int
    waits_since_s: float | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> _Request:
        arrival_s = record.get("arrival_s", 0.0)
        ends = [record["deadline_s"]] if record.get("deadline_s") is not None else []
        if record.get("e2e_target_s") is not None:
            ends.append(arrival_s + record["e2e_target_s"])
        return cls(
            arrival_s=arrival_s,
            ttft_s=record.get("ttft_target_s"),
            tpot_s=record.get("tpot_target_s"),
            due_s=min(ends, default=None),
            first_token_s=record.get("first_token_s"),
            num_output=record.get("num_output", 0),
            waits_since_s=arrival_s,
        )

    def slack_s(self, now_s: float) -> float | None:
        """Seconds to the earliest thing that it is due, as of after a step."""
        dues = [] if self.due_s is None else [self.due_s]
        if self.first_token_s is None:
            if self.ttft_s is not None:
                dues.append(self.arrival_s + self.ttft_s)
        elif self.tpot_s is not None:
            # The newest token is the one that was due; the first has no pace to keep.
            dues.append(self.first_token_s + max(0, self.num_output - 1) * self.tpot_s)
        return min(dues) - now_s if dues else None


class ScheduleReader:
    """Reads a log line by line.

    Attributes:
        schedule: as far as it was read.
    """

    def __init__(self) -> None:
        self.schedule = Schedule()
        self._requests: dict[str, _Request] = {}
        self._plans: dict[int, tuple[Mapping[str, Any], dict[str, str]]] = {}
        self._free_s = 0.0

    def read(self, line: Mapping[str, Any]) -> None:
        """Takes the log's next line."""
        now_s = line.get("t", 0.0)
        if "add" in line:
            self._added(line["add"], line.get("refused"), now_s)
        elif "turn" in line:
            self._turned(line, now_s)
        elif "commit" in line:
            self._committed(line, now_s)
        elif "fail" in line:
            self._failed(now_s)
        elif "cancel" in line and line["found"]:
            self._end(line["cancel"], line["status"], now_s)
        elif "finish" in line and line["found"]:
            self._end(line["finish"], "stop", now_s)
        for request_id, status in line.get("ended", ()):
            self._end(request_id, status, now_s)

    def knows(self, request_id: str) -> bool:
        """Whether a request has been added, and not ended."""
        return request_id in self._requests

    def _mark(self, now_s: float, kind: str, request_id: str, text: str = "") -> None:
        self.schedule.marks.append(Mark(now_s, kind, request_id, text))

    def _added(self, record: Mapping[str, Any], refused: str | None, now_s: float) -> None:
        name = record["request_id"]
        if refused is not None:
            self._mark(now_s, "refused", name, refused)
            return
        self._requests[name] = _Request.of(record)
        if "first_token_s" not in record:
            self._mark(record.get("arrival_s", now_s), "arrived", name)

    def _end(self, name: str, status: str, now_s: float) -> None:
        request = self._requests.pop(name, None)
        self._stop_waiting(name, request, now_s)
        self._mark(now_s, status, name)

    def _stop_waiting(self, name: str, request: _Request | None, now_s: float) -> None:
        if request is not None and request.waits_since_s is not None:
            self.schedule.waits.append(Wait(name, request.waits_since_s, now_s))
            request.waits_since_s = None

    def _turned(self, line: Mapping[str, Any], now_s: float) -> None:
        for name, _, *forced in line.get("ready", ()):
            if forced and (request := self._requests.get(name)):
                request.num_output += forced[1]
        plan = line["turn"]
        if plan is None:
            return
        why: dict[str, str] = {}
        for name, decision, text, beneficiary, *_ in line.get("why", ()):
            words = f"{decision}: {text}" + (f", for {beneficiary}" if beneficiary else "")
            why[name] = f"{why[name]}; {words}" if name in why else words
        self._plans[plan["step"]] = plan, why
        for name in plan.get("preempted", ()):
            self._mark(now_s, "preempted", name, why.get(name, ""))
            if request := self._requests.get(name):
                request.waits_since_s = now_s
        for kind, copies in (("swapped out", "copy_outs"), ("swapped in", "copy_ins")):
            for _, name, pages, _ in plan.get(copies, ()):
                self._mark(now_s, kind, name, f"{len(pages)} pages")
        for name, *_ in plan["prefill"]:
            self._stop_waiting(name, self._requests.get(name), now_s)
        for name, *_ in plan["decode"]:  # back from the host's memory
            self._stop_waiting(name, self._requests.get(name), now_s)

    def _committed(self, line: Mapping[str, Any], now_s: float) -> None:
        found = self._plans.pop(line["commit"], None)
        if found is None:
            return  # it was planned before the log began
        plan, why = found
        tokens = [len(row) for row in line["rows"]]
        rows: list[tuple[str, int, Kind, int]] = [
            (name, slot, "decode", 0) for name, slot, *_ in plan["decode"]
        ]
        rows += [(name, slot, "prefill", size) for name, slot, _, size, *_ in plan["prefill"]]
        cells = []
        for (name, slot, kind, size), emitted in zip(rows, tokens, strict=True):
            if not size and not emitted:
                continue  # a step before had ended the request
            slack_s = None
            if (request := self._requests.get(name)) is not None:
                request.num_output += emitted
                slack_s = request.slack_s(now_s)
                if emitted and request.first_token_s is None:
                    request.first_token_s = now_s
            cells.append(Cell(name, slot, kind, size or emitted, slack_s, why.get(name, "")))
        begin_s = max(self._free_s, now_s - line["duration_s"])
        self._free_s = now_s
        self.schedule.steps.append(
            ScheduledStep(
                step_id=line["commit"],
                begin_s=min(begin_s, now_s),
                end_s=now_s,
                priced_s=line.get("priced_s", 0.0),
                num_steps=plan["num_steps"],
                cells=tuple(cells),
                reason=why.get("", ""),
            )
        )

    def _failed(self, now_s: float) -> None:
        """All steps on their way are lost, and every row waits again."""
        for plan, _ in self._plans.values():
            for name in {row[0] for row in (*plan["decode"], *plan["prefill"])}:
                if request := self._requests.get(name):
                    self._mark(now_s, "lost", name)
                    request.waits_since_s = now_s
        self._plans.clear()
