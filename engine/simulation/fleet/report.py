"""How a fleet's run went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from octavo.engine.simulation.fleet.messages import Counts
from octavo.engine.simulation.metrics import attainment, summarize
from octavo.engine.simulation.request_record import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """A run's outcome.

    Attributes:
        records: every offered request, in order of arrival.
        places: of each, the replicas that it was sent to, in order.
        counts: by replica, what it did.
        duration_s: virtual seconds from the start to the last event.
        num_retried: times that a request which a replica refused was sent to another.
        num_continued: times that a request went on elsewhere because its replica was lost.
        num_forecast: (in time, late): how the router's forecasts of first tokens came true, of
            requests that it sent where they would be in time; (0, 0) of a policy that makes none.
        num_replicas: (when, how many serve), at each change.
    """

    records: list[RequestRecord]
    places: list[list[int]]
    counts: Mapping[int, Counts]
    duration_s: float
    num_retried: int = 0
    num_continued: int = 0
    num_forecast: tuple[int, int] = (0, 0)
    num_replicas: Sequence[tuple[float, int]] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """Share of the offered requests that were on time."""
        return attainment(self.records)

    @property
    def num_turns(self) -> int:
        """Turns of all loops."""
        return sum(count.num_turns for count in self.counts.values())

    def digest(self) -> str:
        """Equal for two runs that went the same way, wherever they ran."""
        found = blake2b(digest_size=16)
        for record, places in zip(self.records, self.places, strict=True):
            found.update(
                repr(
                    (record.request_id, record.status, record.num_output, record.first_token_s,
                     record.last_token_s, record.finished_s, record.num_preemptions,
                     record.cached_tokens, places)
                ).encode()
            )  # fmt: skip
        for index in sorted(self.counts):
            found.update(repr((index, tuple(self.counts[index]))).encode())
        return found.hexdigest()

    def summary(self) -> dict[str, Any]:
        """Figures fit for JSON: see `summarize`."""
        counts = self.counts.values()
        cached = sum(r.cached_tokens for r in self.records if r.num_output)
        prompts = max(1, sum(r.num_input for r in self.records if r.num_output))
        busy_s = [count.busy_s for count in counts]
        in_time, late = self.num_forecast
        return {
            **summarize(self.records),
            "duration_s": self.duration_s,
            "device_busy_share": sum(busy_s) / max(len(busy_s) * self.duration_s, 1e-9),
            "most_busy_s": max(busy_s, default=0.0),
            "least_busy_s": min(busy_s, default=0.0),
            "num_steps": sum(count.num_steps for count in counts),
            "prefill_tokens": sum(count.num_prefill_tokens for count in counts),
            "cached_share": cached / prompts,
            "num_retried": self.num_retried,
            "num_continued": self.num_continued,
            "forecast_attainment": in_time / (in_time + late) if in_time + late else None,
            "most_replicas": max((num for _, num in self.num_replicas), default=len(busy_s)),
            "digest": self.digest(),
        }
