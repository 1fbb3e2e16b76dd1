"""A policy: the decisions of a scheduler that are a matter of taste, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.engine.request import Request
from octavo.engine.scheduler.snapshot import Snapshot

Place = tuple[float, ...]
"""A request's place in an order that never changes while it lives; smaller is served first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Pure functions of a snapshot. A new decision joins as a field with a default.

    Attributes:
        name: what users call it.
        order: the given requests, first to be served first. Requests come in order of acceptance,
            so a stable sort keeps that order between equals.
        choose_victims: running requests to take pages from, one after the other, until a running
            request finds the pages it needs; called with that request and the number of pages
            missing. The request itself may be among them, and then ends the list.
        place: for an order that never changes: the key `order` sorts by, so that the queue is
            kept sorted instead of being sorted again in every plan. None when urgency moves with
            time or load.
    """

    name: str
    order: Callable[[Snapshot, Sequence[Request]], list[Request]]
    choose_victims: Callable[[Snapshot, Request, int], list[Request]]
    place: Callable[[Request], Place] | None = None
