"""How many servers Ray Serve keeps: by the rule that a simulated fleet follows, too."""

from __future__ import annotations

from typing import Any

from octavo.engine.routing.autoscaler import Autoscaler, Autoscaling

NUM_REQUESTS, NUM_ROWS = "num_requests", "num_rows"
"""What replicas tell Serve (`ServerReplica.record_autoscaling_stats`)."""


class SaturationPolicy:
    """Serve's policy for an application: Serve calls it several times a second.

    Args:
        rule: as `Autoscaling.parse` reads it; of signal `saturation`.

    Raises:
        InvalidConfigError: it is no rule.
    """

    def __init__(self, rule: str) -> None:
        self._rule = Autoscaling.parse(rule)
        self._scaler = Autoscaler(self._rule)
        self._next_s = 0.0
        self._wanted: int | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas that there should be, and no state.

        Args:
            context: Serve's `AutoscalingContext`.
        """
        num_rows = sum(context.aggregated_metrics.get(NUM_ROWS, {}).values())
        if context.current_time >= self._next_s and num_rows > 0:
            self._next_s = context.current_time + self._rule.every_s
            num_requests = sum(context.aggregated_metrics.get(NUM_REQUESTS, {}).values())
            num_serving = context.current_num_replicas
            num_coming = max(0, context.target_num_replicas - num_serving)
            self._wanted = self._scaler.wanted(num_requests / num_rows, num_serving, num_coming)
        if self._wanted is None:
            return context.target_num_replicas, {}
        return self._wanted, {}
