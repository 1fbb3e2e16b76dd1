"""Were a log's refusals right? Each refused request is put into the log alone, all else as it was.

A refusal was wrong if the request, let in, would have been on time and made nobody else late. Its
steps are put in as late as its own target allows, behind those that were on their way when it came.
What the log computed after them comes later by what they take, less each pause of the device on
the way, until pauses have made up for all of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine.scheduler.refusals import wilson_interval
from octavo.engine.simulation.replay import read_log

_TARGETS = ("ttft_target_s", "tpot_target_s", "e2e_target_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCheck:
    """What the refused requests would have come to.

    Attributes:
        num_requests: requests with a target in the log.
        refused: ids of those that were refused, at the door or as they waited.
        wrong: ids of those whose refusal was wrong.
        num_late: requests that were served and missed a target.
    """

    num_requests: int
    refused: tuple[str, ...]
    wrong: tuple[str, ...]
    num_late: int

    def to_dict(self) -> dict[str, Any]:
        """Counts, the share of wrong refusals and its 95% interval."""
        num_refused, num_wrong = len(self.refused), len(self.wrong)
        return {
            "requests": self.num_requests,
            "refused": num_refused,
            "wrong": num_wrong,
            "wrong_share": num_wrong / max(1, num_refused),
            "interval": list(wilson_interval(num_wrong, num_refused)),
            "late": self.num_late,
        }


def check_refusals(path: str | Path) -> RefusalCheck:
    """Puts each refused request of a recorded log into it, one at a time.

    Raises:
        InvalidConfigError: the file is no log.
    """
    head, events = read_log(path)
    timeline = _Timeline(int(head["limits"]["max_num_batched_tokens"]))
    for event in events:
        timeline.take(event)
    timeline.finish()
    targeted = [record for record in timeline.added.values() if any(map(record.get, _TARGETS))]
    refused = [record for record in targeted if record["request_id"] in timeline.refused]
    wrong = [record["request_id"] for record in refused if timeline.has_room_for(record)]
    return RefusalCheck(
        num_requests=len(targeted),
        refused=tuple(record["request_id"] for record in refused),
        wrong=tuple(wrong),
        num_late=len({m.request_id for m in timeline.milestones if m.time_s > m.due_s}),
    )


@dataclass(frozen=True, slots=True)
class _Milestone:
    """A first or last token that was promised: when it came, and when it was due."""

    time_s: float
    due_s: float
    request_id: str


@dataclass(slots=True)
class _Timeline:
    """What a log says of the device and of promises.

    Attributes:
        max_num_tokens: of a step.
        added: request id -> its record.
        refused: ids of the requests that were refused.
        milestones: by time.
    """

    max_num_tokens: int
    added: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    milestones: list[_Milestone] = field(default_factory=list)
    _pauses: list[tuple[float, float]] = field(default_factory=list)
    _plans: dict[int, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    _first_s: dict[str, float] = field(default_factory=dict)
    _last_s: dict[str, float] = field(default_factory=dict)
    _steps: list[tuple[list[float], float]] = field(default_factory=list)
    _spans: list[tuple[float, float]] = field(default_factory=list)
    _done_s: float = 0.0
    _cost: list[float] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Takes in a line."""
        if "add" in event:
            self.added[event["add"]["request_id"]] = event["add"]
            if "refused" in event:
                self.refused.add(event["add"]["request_id"])
        elif event.get("turn"):
            if not self._plans and event["t"] > self._done_s:
                self._pauses.append((self._done_s, event["t"] - self._done_s))
            self._plans[event["turn"]["step"]] = event["t"], event["turn"]
        elif "commit" in event:
            self._commit(event)
        elif "fail" in event:
            self._plans.clear()
        self.refused.update(name for name, status in event.get("ended", ()) if status == "rejected")

    def _commit(self, event: dict[str, Any]) -> None:
        planned_s, plan = self._plans.pop(event["commit"])
        now_s, decode, prefill = event["t"], plan["decode"], plan["prefill"]
        for row, token_ids in zip((*decode, *prefill), event["rows"], strict=True):
            if token_ids:
                self._first_s.setdefault(row[0], now_s)
                self._last_s[row[0]] = now_s
        work = [1.0, len(decode), sum(chunk[3] for chunk in prefill), sum(r[2] for r in decode)]
        seconds = (now_s - max(planned_s, self._done_s)) / plan["num_steps"]
        self._steps.append((work, max(seconds, 1e-6)))
        self._spans.append((planned_s, now_s))
        self._done_s = now_s

    def finish(self) -> None:
        """Works out what steps take, and what was promised."""
        self._pauses.append((self._done_s, math.inf))
        self._cost = fit_step_time(self._steps)
        for request_id, record in self.added.items():
            for name, times in (("ttft_target_s", self._first_s), ("e2e_target_s", self._last_s)):
                target_s, time_s = record.get(name), times.get(request_id)
                if target_s is not None and time_s is not None and request_id not in self.refused:
                    due_s = record["arrival_s"] + target_s
                    self.milestones.append(_Milestone(time_s, due_s, request_id))
        self.milestones.sort(key=lambda milestone: milestone.time_s)

    def has_room_for(self, record: dict[str, Any]) -> bool:
        """Whether a refused request could have been on time without making anybody late."""
        step_s, row_s, token_s, _ = self._cost
        num_tokens, num_output = len(record["prompt_token_ids"]), record["max_tokens"]
        # In steps that are full without it, it takes steps of its own.
        num_steps = num_tokens / self.max_num_tokens
        prefill_s = token_s * num_tokens + step_s * num_steps
        alone_s = token_s * num_tokens + step_s * math.ceil(num_steps)
        decode_s, arrival_s = row_s * num_output, record["arrival_s"]
        due_s = arrival_s + record.get("ttft_target_s", math.inf)
        if "e2e_target_s" in record:
            rest_s = (step_s + row_s) * (num_output - 1)
            due_s = min(due_s, arrival_s + record["e2e_target_s"] - rest_s)
        if due_s == math.inf:
            return True  # its pace is no matter of when it is let in
        begin_s = max(self._free_s(arrival_s), due_s - alone_s)
        if begin_s + alone_s > due_s:
            return False
        return not self._makes_late(begin_s, prefill_s + decode_s)

    def _free_s(self, now_s: float) -> float:
        """When the steps that were planned before a moment were done: that moment, if they were."""
        index = bisect_right(self._spans, now_s, key=lambda span: span[0]) - 1
        return max(now_s, self._spans[index][1]) if index >= 0 else now_s

    def _makes_late(self, begin_s: float, delay_s: float) -> bool:
        """Whether anybody is late if all that comes after `begin_s` comes later by `delay_s`."""
        for moment_s, pause_s, milestone in self._after(begin_s):
            if milestone is None:
                delay_s -= moment_s + pause_s - max(moment_s, begin_s)
                if delay_s <= 0:
                    return False
            elif milestone.time_s <= milestone.due_s < milestone.time_s + delay_s:
                return True
        return False

    def _after(self, begin_s: float) -> Iterator[tuple[float, float, _Milestone | None]]:
        """(time, 0, milestone) and (time, length, None) of pauses, from a time on, in order."""
        pauses = iter(self._pauses[self._first_pause(begin_s) :])
        start = bisect_left(self.milestones, begin_s, key=lambda milestone: milestone.time_s)
        pause = next(pauses)
        for milestone in self.milestones[start:]:
            while pause[0] < milestone.time_s:
                yield *pause, None
                pause = next(pauses)
            yield milestone.time_s, 0.0, milestone
        yield *pause, None

    def _first_pause(self, begin_s: float) -> int:
        ends = [start_s + length_s for start_s, length_s in self._pauses]
        return bisect_left(ends, begin_s)


def fit_step_time(steps: Iterable[tuple[list[float], float]]) -> list[float]:
    """Seconds of an iteration, of a decode row, a prompt token and a position of decode context in
    it: a line through (work, seconds) of steps."""
    steps = list(steps)
    if not steps:
        return [0.0] * 4
    x, y = np.array([work for work, _ in steps]), np.array([seconds for _, seconds in steps])
    # Relative errors count, and a step that hung is left out.
    kept = y <= 10 * np.median(y)
    x, y = x[kept], y[kept]
    found = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)[0]
    return [max(float(value), 0.0) for value in found]
