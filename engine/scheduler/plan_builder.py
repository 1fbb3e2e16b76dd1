"""A plan under construction: what it will say besides its rows."""

from __future__ import annotations

from octavo.engine.scheduler.step_plan import Decision, PageCopy, Reason

MAX_WAITED = 4096
"""Waiting requests of which it is kept what they were told to wait for."""


class PlanBuilder:
    """Notes for the next plan. They are kept until there is one.

    Args:
        explains: whether reasons are kept.

    Attributes:
        page_updates: (slot, index in the row, page id) of pages that running rows gained.
        preempted: ids of requests that lost their slot.
        preempted_numbers: their numbers, of this attempt at a plan alone.
        copy_outs, copy_ins: page copies.
        reasons: why.
    """

    def __init__(self, *, explains: bool) -> None:
        self.explains = explains
        self.page_updates: list[tuple[int, int, int]] = []
        self.preempted: list[str] = []
        self.preempted_numbers: set[int] = set()
        self.copy_outs: list[PageCopy] = []
        self.copy_ins: list[PageCopy] = []
        self.reasons: list[Reason] = []
        self._waited: dict[int, str] = {}

    def begin(self) -> None:
        """Starts an attempt at a plan."""
        if self.page_updates:
            self.page_updates.clear()
        if self.preempted_numbers:
            self.preempted_numbers.clear()

    @property
    def has_copies(self) -> bool:
        return bool(self.copy_outs or self.copy_ins)

    def explain(
        self,
        request_id: str,
        decision: Decision,
        text: str,
        *,
        beneficiary: str = "",
        num_tokens: int = 0,
        cost_s: float = 0.0,
    ) -> None:
        """Notes a reason, if anybody asked for reasons."""
        if self.explains:
            self.reasons.append(Reason(request_id, decision, text, beneficiary, num_tokens, cost_s))

    def waited(self, number: int, request_id: str, what_for: str) -> None:
        """Notes that a request was tried and not admitted; once for each reason and wait."""
        if self.explains and self._waited.get(number) != what_for:
            self._waited[number] = what_for
            self.explain(request_id, Decision.WAITED, what_for)
            if len(self._waited) > MAX_WAITED:
                del self._waited[next(iter(self._waited))]

    def admitted(self, number: int) -> None:
        """A request waits no longer."""
        self._waited.pop(number, None)

    def forget_copies(self) -> None:
        """Takes back the copies that no plan has announced, and nobody will make."""
        self.copy_outs.clear()
        self.copy_ins.clear()

    def clear(self) -> None:
        """Forgets what a plan has said."""
        for notes in (self.preempted, self.copy_outs, self.copy_ins, self.reasons):
            if notes:
                notes.clear()
