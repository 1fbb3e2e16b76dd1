"""A plan on its way to the device, and what it takes to commit it."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.request import Request
from octavo.engine.scheduler.committed import Committed
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.rows import Rows
from octavo.engine.scheduler.step_plan import StepPlan
from octavo.engine.scheduler.step_time_model import NO_FEATURES, StepFeatures


@dataclass(slots=True, eq=False)
class Dispatched:
    """A plan on its way.

    Attributes:
        plan: the plan.
        now_s: when it was made.
        decoding: its decode rows.
        prefilling: the records of its other rows' requests.
        ending: decode rows, by index, that come to their limit with it, ascending. This and
            `features` are known once `Planner.apply_plan` was called.
        overlaps: whether another plan was on its way when it was made.
        features: what its time depends on.
        ended: the last news of requests that its commit ended.
        scored: records of requests that its commit handed prompt log-probabilities, each with how
            many they had before.
    """

    plan: StepPlan
    now_s: float
    decoding: Rows
    prefilling: list[LiveRequest]
    ending: list[int] = field(default_factory=list)
    overlaps: bool = False
    features: StepFeatures = NO_FEATURES
    ended: list[Committed] = field(default_factory=list)
    scored: list[tuple[LiveRequest, int]] = field(default_factory=list)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All its rows' requests, in their order."""
        return (*self.decoding.requests, *[entry.request for entry in self.prefilling])

    def count(self) -> None:
        """Works out `features`."""
        num_prefill = prefill_context = 0
        for row in self.plan.prefill_rows:
            num_tokens = row.num_tokens
            num_prefill += num_tokens
            prefill_context += num_tokens * row.start
        self.features = StepFeatures(
            len(self.decoding), num_prefill, self.decoding.context, float(prefill_context)
        )
