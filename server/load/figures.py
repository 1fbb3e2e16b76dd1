"""What clients of a server saw, and the figures that a serving benchmark makes of it.

Times count from the moment a request is sent, as in vLLM's serving benchmark, whose names the
figures have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.engine.simulation.workloads.traffic import PLAIN, TrafficClass


@dataclass(slots=True)
class Sent:
    """One request as its client saw it.

    Attributes:
        num_prompt, num_output: tokens, as the server counted them; 0 if it did not answer.
        sent_s: on the client's clock, seconds.
        token_s: when each part of the text came.
        ended_s: end of the stream.
        error: what went wrong, if anything.
        traffic_class: what the request was promised.
    """

    num_prompt: int = 0
    num_output: int = 0
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None
    traffic_class: TrafficClass = PLAIN

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds a token after the first; None of one token."""
        if self.num_output < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_output - 1)


def summarize(sent: Sequence[Sent], goals_ms: dict[str, float] | None = None) -> dict[str, Any]:
    """The benchmark's figures, times in milliseconds.

    Args:
        goals_ms: most `ttft`, `tpot`, `e2el`; requests within all of them are the goodput. None
            holds each request to its own targets, if any request has some.
    """
    good = [item for item in sent if item.error is None]
    duration_s = max((item.ended_s for item in sent), default=0.0) - min(
        (item.sent_s for item in sent), default=0.0
    )
    times = {
        "ttft": [item.ttft_s for item in good],
        "tpot": [item.tpot_s for item in good if item.tpot_s is not None],
        "itl": [gap for item in good for gap in np.diff(item.token_s).tolist()],
        "e2el": [item.e2e_s for item in good],
    }
    num_input, num_output = (
        sum(getattr(item, name) for item in good) for name in ("num_prompt", "num_output")
    )
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    report: dict[str, Any] = {
        "completed": len(good),
        "failed": len(sent) - len(good),
        "duration": duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) * per_s,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
    }
    if goals_ms or any(_own_goals_ms(item) for item in sent):
        within = sum(_is_within(item, goals_ms or _own_goals_ms(item)) for item in good)
        report["request_goodput"] = within * per_s
    for name, values in times.items():
        values_ms = np.array(values) * 1e3
        if len(values_ms):
            report[f"mean_{name}_ms"] = float(values_ms.mean())
            for percent, label in ((50, "median"), (90, "p90"), (99, "p99")):
                report[f"{label}_{name}_ms"] = float(np.percentile(values_ms, percent))
    return report


def _own_goals_ms(item: Sent) -> dict[str, float]:
    promised = item.traffic_class
    goals_s = {
        "ttft": promised.ttft_target_s,
        "tpot": promised.tpot_target_s,
        "e2el": promised.e2e_target_s,
    }
    return {name: goal_s * 1e3 for name, goal_s in goals_s.items() if goal_s is not None}


def _is_within(item: Sent, goals_ms: dict[str, float]) -> bool:
    took_s = {"ttft": item.ttft_s, "tpot": item.tpot_s or 0.0, "e2el": item.e2e_s}
    return all(took_s[name] * 1e3 <= goal_ms for name, goal_ms in goals_ms.items())
