"""Several listeners to the engine's loop in the place of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from octavo.engine.executor import TransferDone
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.request import Request
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.step_plan import StepPlan, StepResult


class Observer(Protocol):
    """What the loop tells of, in its own thread, as it happens. See `EventLog` for each method."""

    def added(self, request: Request, now_s: float, refusal: Exception | None) -> None: ...

    def cancelled(self, request_id: str, status: str, found: bool, now_s: float) -> None: ...

    def finished(self, request_id: str, stop_reason: Any, found: bool, now_s: float) -> None: ...

    def turned(
        self,
        plan: StepPlan | None,
        transfers: Sequence[TransferDone],
        ready: Sequence[Unblocked],
        ended: Iterable[Request],
        now_s: float,
    ) -> None: ...

    def committed(
        self, plan: StepPlan, result: StepResult, ended: Iterable[Request], now_s: float
    ) -> None: ...

    def failed(self, broken: Iterable[str], now_s: float) -> None: ...

    def only(self, request_ids: Iterable[str] | None, now_s: float) -> None: ...

    def pages_named(self, request_id: str, now_s: float) -> None: ...

    def pages_wanted(
        self, names: Iterable[PageHash], transfer_id: int | None, now_s: float
    ) -> None: ...

    def pages_came(
        self, names: Iterable[PageHash], host_pages: Iterable[int], now_s: float
    ) -> None: ...


class Observers:
    """Tells each of them in turn.

    Attributes:
        observers: all of them.
    """

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(observer, name) for observer in self.observers]

        def tell(*args: Any) -> None:
            for method in methods:
                method(*args)

        return tell
