"""Who sees to the machines of a fleet: kills who is silent, starts who died, and scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from octavo.engine.routing.autoscaler import Autoscaler, Autoscaling
from octavo.engine.routing.router import Router
from octavo.engine.simulation.fleet.disasters import DEATH, PARTITION, SLOW, Disaster, Disasters
from octavo.engine.simulation.fleet.messages import Order
from octavo.engine.simulation.fleet.replica import DRAIN, KILL, START

LOOK_EVERY_S = 1.0


class Keeper:
    """The replicas that there are, and whether each serves.

    Args:
        num_first: replicas that serve from the start.
        num_most: replicas that there may be.
        fronts: are told of each change.
        disasters: how long a death lasts, and after what silence a replica is killed.
        scaling: how many replicas there should be; None for as many as there were.
        order: sends an order to a replica.
        later: calls a function with the time, at a time.
        notice_s: until fronts hear that a replica died.

    Attributes:
        is_serving: by replica.
        life: times that each was started before.
        sizes: (when, how many serve), at each change.
        num_routed, num_refused, num_forecast_late: requests since the last look of the scaler.
    """

    def __init__(
        self,
        num_first: int,
        num_most: int,
        fronts: Sequence[Router],
        disasters: Disasters,
        scaling: Autoscaling | None,
        order: Callable[[int, Order], None],
        later: Callable[[float, Callable[[float], None]], None],
        notice_s: float,
    ) -> None:
        self.is_serving = [index < num_first for index in range(num_most)]
        self.life = [0] * num_most
        self.sizes = [(0.0, num_first)]
        self.num_routed = self.num_refused = self.num_forecast_late = 0
        self._is_coming = [False] * num_most
        self._is_draining = [False] * num_most
        self._heard_s = [0.0] * num_most
        self._cut: dict[tuple[int, int], float] = {}
        self._fronts = fronts
        self._disasters = disasters
        self._scaling = scaling
        self._scaler = Autoscaler(scaling) if scaling else None
        self._next_scaling_s = scaling.every_s if scaling else math.inf
        self._order = order
        self._later = later
        self._notice_s = notice_s
        for index in range(num_first, num_most):
            for front in fronts:
                front.lost(index, 0)

    @property
    def num_serving(self) -> int:
        """Replicas that take requests."""
        return sum(self.is_serving)

    def hears(self, at: int, life: int, now_s: float) -> bool:
        """A replica has reported; whether it is the one that is known by that index."""
        if life != self.life[at]:
            return False
        self._heard_s[at] = now_s
        return True

    def is_cut(self, at: int, front: int, time_s: float) -> bool:
        """Whether a front hears nothing of a replica."""
        return self._cut.get((at, front), 0.0) > time_s

    def befall(self, now_s: float, disaster: Disaster) -> None:
        """Something happens to a replica."""
        at, kind = disaster.replica, disaster.kind
        if not self.is_serving[at] and not self._is_draining[at]:
            return
        factor = self._disasters.slow_factor if kind == SLOW else 1.0
        self._order(at, Order(now_s, kind, disaster.for_s, disaster.front, factor))
        if kind == DEATH:
            life = self.life[at]
            self._later(now_s + self._notice_s, functools.partial(self._lose, at, life))
        elif kind == PARTITION:
            self._cut[at, disaster.front] = now_s + disaster.for_s

    def look(self, now_s: float) -> None:
        """Kills who is silent, lets go of who is done, and scales; again every second."""
        self._later(now_s + LOOK_EVERY_S, self.look)
        for at in range(len(self.is_serving)):
            is_up = self.is_serving[at] or self._is_draining[at]
            is_silent = now_s - self._heard_s[at] > self._disasters.watch_s
            is_done = self._is_draining[at] and not self._num_under_way([at])
            if is_up and (is_silent or is_done):
                self._order(at, Order(now_s, KILL))
                self._lose(at, self.life[at], now_s)
        if self._scaler is not None and now_s >= self._next_scaling_s:
            self._scale(self._scaler, now_s)

    def _lose(self, at: int, life: int, now_s: float) -> None:
        """A replica is gone; it is started again unless it was to leave."""
        if life != self.life[at]:
            return
        self.life[at] += 1
        for front in self._fronts:
            front.lost(at, self.life[at])
        if not self._is_draining[at]:
            self._is_coming[at] = True
            self._later(now_s + self._disasters.restart_s, functools.partial(self._start, at))
        self.is_serving[at] = self._is_draining[at] = False
        self._resized(now_s)

    def _start(self, at: int, now_s: float) -> None:
        self._is_coming[at], self.is_serving[at] = False, True
        self._heard_s[at] = now_s
        self._order(at, Order(now_s, START))
        for front in self._fronts:
            front.started(at, self.life[at], now_s)
        self._resized(now_s)

    def _resized(self, now_s: float) -> None:
        self.sizes.append((now_s, self.num_serving))

    def _num_under_way(self, replicas: list[int]) -> float:
        return sum(float(front.view.own_requests[replicas].sum()) for front in self._fronts)

    def _scale(self, scaler: Autoscaler, now_s: float) -> None:
        scaling = self._scaling
        assert scaling is not None
        self._next_scaling_s = now_s + scaling.every_s
        num_coming = sum(self._is_coming)
        wanted = scaler.wanted(self._signal(scaling), self.num_serving, num_coming)
        self.num_routed = self.num_refused = self.num_forecast_late = 0
        more = wanted - self.num_serving - num_coming
        for at in range(len(self.is_serving)):
            if more <= 0:
                break
            if not (self.is_serving[at] or self._is_coming[at] or self._is_draining[at]):
                self._is_coming[at] = True
                self._later(now_s + scaling.start_s, functools.partial(self._start, at))
                more -= 1
        if more < 0:
            at = max(index for index, serves in enumerate(self.is_serving) if serves)
            self.is_serving[at], self._is_draining[at] = False, True
            self._order(at, Order(now_s, DRAIN))
            for front in self._fronts:
                front.drain(at)
            self._resized(now_s)

    def _signal(self, scaling: Autoscaling) -> float:
        """What the rule looks at."""
        if scaling.signal == "refusals":
            return self.num_refused / max(1, self.num_routed)
        if scaling.signal == "attainment":
            return self.num_forecast_late / max(1, self.num_routed)
        serving = [at for at, serves in enumerate(self.is_serving) if serves]
        if not serving:
            return 1.0
        num_rows = float(self._fronts[0].view.num_rows[serving].sum())
        return self._num_under_way(serving) / max(1.0, num_rows)
