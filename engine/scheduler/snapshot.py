"""What a policy sees: the scheduler's state at one moment, frozen."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.request import Request
from octavo.engine.scheduler.step_plan import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state a policy decides on. Its requests are for reading only.

    Attributes:
        now_s: engine clock.
        waiting, running: live requests, each in order of acceptance.
        num_available_pages: pages that could be allocated now.
        limits: what a step can take.
    """

    now_s: float
    waiting: tuple[Request, ...]
    running: tuple[Request, ...]
    num_available_pages: int
    limits: StepLimits
