"""What became of one request, as its client saw it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from octavo.engine.simulation.workloads.traffic import TrafficClass

SERVED = ("stop", "length")
"""Statuses of requests that got their whole answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """One offered request. Times are the workload's; `None` where it never came to that.

    Attributes:
        request_id, arrival_s, num_input: as offered; `arrival_s` is when it was meant to be sent.
        traffic_class: what it was promised.
        status: its terminal status, "" while it lives; "unfinished" if the run ended before it.
        num_output: tokens received.
        first_token_s, last_token_s, finished_s: when.
        max_stall_s: longest wait between two of its tokens.
        num_preemptions: how often it lost its pages.
        cached_tokens: prompt tokens that the prefix cache held.
    """

    request_id: str
    arrival_s: float
    num_input: int
    traffic_class: TrafficClass
    status: str = ""
    num_output: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    max_stall_s: float = 0.0
    num_preemptions: int = 0
    cached_tokens: int = 0

    @property
    def is_served(self) -> bool:
        """Whether it got its whole answer."""
        return self.status in SERVED

    @property
    def is_counted(self) -> bool:
        """Whether attainment counts it: all but those whose own client left."""
        return self.status != "cancelled"

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.num_output < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token, of a request that got all."""
        if not self.is_served or self.last_token_s is None:
            return None
        return self.last_token_s - self.arrival_s

    def is_late(self, now_s: float) -> bool:
        """Whether, still alive at `now_s`, it cannot be on time any more."""
        goals, waited_s = self.traffic_class, now_s - self.arrival_s
        if goals.e2e_target_s is not None and waited_s > goals.e2e_target_s:
            return True
        if goals.ttft_target_s is None:
            return False
        ttft_s = self.ttft_s
        return (waited_s if ttft_s is None else ttft_s) > goals.ttft_target_s

    @property
    def is_on_time(self) -> bool:
        """Whether it got its whole answer with every goal of its class met."""
        goals = self.traffic_class
        if not self.is_served:
            return False
        ttft_s, tpot_s, e2e_s = self.ttft_s, self.tpot_s, self.e2e_s
        return not (
            (goals.ttft_target_s is not None and (ttft_s or 0.0) > goals.ttft_target_s)
            or (goals.tpot_target_s is not None and (tpot_s or 0.0) > goals.tpot_target_s)
            or (goals.e2e_target_s is not None and (e2e_s or 0.0) > goals.e2e_target_s)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the class by name."""
        values = asdict(self)
        values["traffic_class"] = self.traffic_class.name
        values["on_time"] = self.is_on_time
        return values
