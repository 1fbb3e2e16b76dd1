"""What a policy sees: every replica's newest report, and what this router sent since."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.engine.routing.report import NUM_CLASSES, ReplicaReport
from octavo.engine.scheduler.standing import UNKNOWN

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class FleetView:
    """Replicas by column, an array over replicas each. Policies read it and change nothing.

    Attributes:
        candidates: indices of the replicas that may take the request, ascending, one at least.
        cached_tokens: of the request's prompt, that each replica is thought to hold.
        num_routed: requests that this router has placed so far: what a policy without a memory of
            its own takes turns by.
        output_len: tokens that the request's answer is expected to have, all sequences together.

        own_work, own_requests: what this router has under way there, in tokens of prompts and in
            requests, as it sent and saw it end. Known at once, and blind to other routers.

        age_s: how old each report is.
        num_live: requests there by the newest report, and those sent since.
        prompt_tokens: float64[classes, replicas], prompt tokens to compute before a new request of
            a class has its turn, by the newest report.
        sent_tokens: the same of what was sent since.
        sent_requests, sent_output: requests sent since, and tokens that they are expected to emit.
        sent_kv: tokens of KV that they take.
        sent_rate: tokens a second that they were promised.
        num_running, num_waiting, num_rows, kv_tokens, free_tokens, output_tokens, busy_s,
            prompt_token_s, step_s, fixed_s, row_s, pace_rate, least_pace_s: as in `Standing`.
    """

    candidates: Ints
    cached_tokens: Ints
    num_routed: int
    output_len: float
    own_work: Floats
    own_requests: Floats
    age_s: Floats
    prompt_tokens: Floats
    sent_tokens: Floats
    sent_requests: Floats
    sent_output: Floats
    sent_kv: Floats
    sent_rate: Floats
    sent_least_pace_s: Floats
    num_running: Floats
    num_waiting: Floats
    num_rows: Floats
    kv_tokens: Floats
    free_tokens: Floats
    output_tokens: Floats
    busy_s: Floats
    prompt_token_s: Floats
    step_s: Floats
    fixed_s: Floats
    row_s: Floats
    pace_rate: Floats
    least_pace_s: Floats

    @property
    def num_live(self) -> Floats:
        """Requests there by the newest report, and those sent since."""
        found: Floats = self.num_running + self.num_waiting + self.sent_requests
        return found

    @classmethod
    def blank(cls, num_replicas: int) -> FleetView:
        """Of replicas that have told nothing, and were sent nothing."""
        columns: dict[str, Any] = {
            name: np.zeros(num_replicas)
            for name in ("own_work", "own_requests", "age_s", "sent_requests", "sent_output",
                         "sent_kv", "sent_rate")
        }  # fmt: skip
        for name in _FROM_STANDING:
            columns[name] = np.full(num_replicas, float(getattr(UNKNOWN, name)))
        return cls(
            candidates=np.arange(num_replicas),
            cached_tokens=np.zeros(num_replicas, np.int64),
            num_routed=0,
            output_len=0.0,
            prompt_tokens=np.zeros((NUM_CLASSES, num_replicas)),
            sent_tokens=np.zeros((NUM_CLASSES, num_replicas)),
            sent_least_pace_s=np.full(num_replicas, np.inf),
            **columns,
        )

    def add_replica(self) -> None:
        """Makes room for one more, which has told nothing and was sent nothing."""
        blank = FleetView.blank(1)
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray):
                more = np.concatenate([column, getattr(blank, field.name)], axis=-1)
                setattr(self, field.name, more)

    def take(self, report: ReplicaReport) -> None:
        """Takes in a report's figures."""
        at, standing = report.replica, report.standing
        for name in _FROM_STANDING:
            getattr(self, name)[at] = getattr(standing, name)
        self.prompt_tokens[:, at] = standing.prompt_tokens


_FROM_STANDING = (
    "num_running", "num_waiting", "num_rows", "kv_tokens", "free_tokens", "output_tokens", "busy_s",
    "prompt_token_s", "step_s", "fixed_s", "row_s", "pace_rate", "least_pace_s",
)  # fmt: skip
