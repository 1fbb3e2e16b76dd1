"""What a run decided, as digests: of its beginning up to every 50th plan, and of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from logging import CRITICAL, getLogger
from typing import Any

from octavo.engine.executor import TransferDone
from octavo.engine.observability.event_log import plan_record
from octavo.engine.request import Request
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.policy import Admission, Policy, Snapshot, admit_everyone
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepPlan, StepResult
from octavo.engine.simulation.simulate import simulate, true_length, undeclared
from octavo.engine.simulation.step_time import StepWork
from tests.oracle.runs import FAULTS, STEP_TIME, Run
from tests.oracle.workloads import WORKLOADS

PLANS_PER_MARK = 50
MARK_DIGITS = 12
"""Hexadecimal digits kept of a SHA-256: 48 bits."""
ROUNDINGS = (1 + 1e-12, 1 - 1e-10)
"""Far above what dot products differ by (about 1e-15), as learning may amplify it."""


class Decisions:
    """An observer that keeps each plan's decisions as a line of text.

    A line holds the plan (`plan_record`: step, rows, pages, preempted ids, copies) with what was
    decided since the plan before it: ids of requests refused at the door, rejected or expired in
    the queue, demoted and restored. No times: what is decided at the same moment is the same.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._refused: list[list[str]] = []
        self._ended: list[list[str]] = []
        self._admission = Admission()
        self._demoted: set[str] = set()
        self._moved: list[list[str]] = []

    def watched(self, policy: Policy) -> Policy:
        """The same policy; whom it demotes and restores is noted."""
        if policy.with_targets is not None:
            policy = replace(policy, with_targets=self.watched(policy.with_targets))
        if policy.admit is admit_everyone:
            return policy  # the scheduler does not ask it
        return replace(policy, admit=self._noting(policy.admit))

    def _noting(self, admit: Callable[[Snapshot], Admission]) -> Callable[[Snapshot], Admission]:
        def noted(snapshot: Snapshot) -> Admission:
            # A plan that is decided anew counts for what came out of it last.
            self._admission = admit(snapshot)
            return self._admission

        return noted

    def added(self, request: Request, now_s: float, refusal: Exception | None) -> None:
        if refusal is not None:
            self._refused.append([request.request_id, type(refusal).__name__])

    def cancelled(self, request_id: str, status: str, found: bool, now_s: float) -> None:
        pass

    def finished(self, request_id: str, stop_reason: Any, found: bool, now_s: float) -> None:
        pass

    def turned(
        self,
        plan: StepPlan | None,
        transfers: Sequence[TransferDone],
        ready: Sequence[Unblocked],
        ended: Iterable[Request],
        now_s: float,
    ) -> None:
        self._ended += [[request.request_id, request.status.value] for request in ended]
        self._note_moves()
        if plan is not None:
            self._close(plan_record(plan))

    def committed(
        self, plan: StepPlan, result: StepResult, ended: Iterable[Request], now_s: float
    ) -> None:
        pass

    def failed(self, broken: Iterable[str], now_s: float) -> None:
        pass

    def only(self, request_ids: Iterable[str] | None, now_s: float) -> None:
        pass

    def end(self) -> list[str]:
        """All lines, with what was decided after the last plan."""
        self._close(None)
        return self.lines

    def _note_moves(self) -> None:
        admission, self._admission = self._admission, Admission()
        for request in admission.demoted:
            if request.request_id not in self._demoted:
                self._demoted.add(request.request_id)
                self._moved.append(["demoted", request.request_id])
        for request in admission.restored:
            self._demoted.discard(request.request_id)
            self._moved.append(["restored", request.request_id])

    def _close(self, plan: dict[str, Any] | None) -> None:
        line = {"refused": self._refused, "ended": self._ended, "moved": self._moved, "plan": plan}
        self.lines.append(json.dumps(line, sort_keys=True, separators=(",", ":")))
        self._refused, self._ended, self._moved = [], [], []


@dataclass(frozen=True, slots=True)
class _Stretched:
    """A device on which every step takes `factor` times as long."""

    factor: float

    def seconds(self, work: StepWork) -> float:
        return self.factor * STEP_TIME.seconds(work)


def play(run: Run, *, stretch: float = 1.0) -> list[str]:
    """What a run decides, a line a plan.

    Args:
        run: which one.
        stretch: factor on the device time of every step.
    """
    decisions = Decisions()
    limits, policy = run.limits, get_policy(run.policy)
    with _quiet():
        simulate(
            run.arrivals(),
            Scheduler(
                limits, policy=decisions.watched(policy), num_decode_steps=limits.max_num_steps
            ),
            _Stretched(stretch),
            link=run.link,
            faults=FAULTS[run.faults].faults,
            max_tokens=WORKLOADS[run.workload].max_tokens,
            declared_length=true_length if policy.uses_declared_lengths else undeclared,
            idle_tick_s=0.01,
            max_turns=30_000,
            num_returns=1,
            observer=decisions,
        )
    return decisions.end()


def is_decided_by_rounding(run: Run, lines: Sequence[str]) -> bool:
    """Whether a run decides otherwise than `lines` if all steps take a trifle longer or shorter.

    Such a run may decide otherwise on another processor, too. The estimates of step times and
    lengths are learned with dot products, and the BLAS libraries behind NumPy round those each in
    its own way.
    """
    return any(play(run, stretch=stretch) != lines for stretch in ROUNDINGS)


def marks(lines: Sequence[str]) -> list[str]:
    """Digests of the first 50 lines, the first 100, …, and of all."""
    digest, result = hashlib.sha256(), []
    for number, line in enumerate(lines, 1):
        digest.update(line.encode() + b"\n")
        if number % PLANS_PER_MARK == 0 or number == len(lines):
            result.append(digest.hexdigest()[:MARK_DIGITS])
    return result


def first_difference(recorded: Sequence[str], found: Sequence[str]) -> tuple[int, int] | None:
    """The (first, last) of the 50 plans in which the first difference is; None if there is none."""
    for index, (old, new) in enumerate(zip_longest(recorded, found)):
        if old != new:
            return index * PLANS_PER_MARK, (index + 1) * PLANS_PER_MARK - 1
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Failed steps are meant to fail."""
    logger = getLogger("octavo.engine.faults.recovery")
    level = logger.level
    logger.setLevel(CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
