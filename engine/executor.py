"""What the engine's loop asks of whatever computes its plans: a device, or a simulation of one."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from octavo.engine.scheduler.step_plan import StepLimits, StepPlan, StepResult


class TransferDone(NamedTuple):
    """The end of a page copy that a plan began.

    Attributes:
        transfer_id: of the plan's `PageCopy`.
        ok: whether every page arrived; if not, what was copied is lost.
        seconds: what the copy itself took, its wait for steps before it left out; 0 if nobody
            measured that.
    """

    transfer_id: int
    ok: bool
    seconds: float = 0.0


class StepExecutor(Protocol):
    """Computes plans in dispatch order.

    Attributes:
        limits: what plans may ask for.
    """

    limits: StepLimits

    def dispatch(self, plan: StepPlan) -> Any:
        """Queues the plan's step and copies; returns a handle at once."""
        ...

    def result(self, handle: Any) -> StepResult:
        """Waits for a dispatched step. Handles are collected in dispatch order."""
        ...

    def poll_transfers(self) -> list[TransferDone]:
        """Copies that ended since the last call, each told once, in the order they ended."""
        ...

    def idle(self) -> None:
        """Hears that no step is wanted now."""
        ...

    def reset(self) -> None:
        """Fresh device state, after a failed step."""
        ...
