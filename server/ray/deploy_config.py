"""How an application of servers is laid out on a Ray cluster."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from octavo.engine.errors import InvalidConfigError
from octavo.engine.routing.autoscaler import Autoscaling

MOST_REPLICAS = 10_000
LOOPBACK, NODE = "loopback", "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """How many servers, and what each of them gets. Immutable; checked on construction.

    Attributes:
        replicas: servers that are kept running, or those that autoscale begins with; none is one,
            or the least of autoscale.
        autoscale: rule for the number of servers, as of `octavo simulate`, of signal saturation:
            "saturation:least=2,most=8,high=0.7,low=0.3"; none keeps as many as there are.
        cpus_per_replica: CPU cores of the cluster that each is counted for.
        gpus_per_replica: GPUs that each gets, whole ones.
        resources: other resources of the cluster that each gets, a JSON object such as {"TPU": 4}.
        listen: where each server listens: loopback, for fronts on its own node, or node, the node's
            address, which needs a token_file of the server.
    """

    replicas: int | None = None
    autoscale: str | None = None
    cpus_per_replica: float = 1.0
    gpus_per_replica: int = 0
    resources: str | None = None
    listen: str = LOOPBACK

    def __post_init__(self) -> None:
        rule = self.autoscaling()
        least, most = (1, MOST_REPLICAS) if rule is None else (rule.least, rule.most)
        _number("replicas", least if self.replicas is None else self.replicas, least, most)
        _number("cpus_per_replica", self.cpus_per_replica, 0, 4096)
        _number("gpus_per_replica", self.gpus_per_replica, 0, 64)
        if self.listen not in (LOOPBACK, NODE):
            raise InvalidConfigError("listen", self.listen, f"{LOOPBACK} or {NODE}")
        self.other_resources()

    def autoscaling(self) -> Autoscaling | None:
        """The rule; None for a fixed number.

        Raises:
            InvalidConfigError: `autoscale` is no rule, or one that needs another signal.
        """
        if self.autoscale is None:
            return None
        rule = Autoscaling.parse(self.autoscale)
        if rule.signal != "saturation":
            allowed = "of signal saturation: servers tell Serve of no other"
            raise InvalidConfigError("autoscale", self.autoscale, allowed)
        return rule

    def other_resources(self) -> dict[str, float]:
        """Name -> amount.

        Raises:
            InvalidConfigError: `resources` is no such object.
        """
        allowed = 'a JSON object of amounts above 0, such as {"TPU": 4}'
        if self.resources is None:
            return {}
        try:
            found = json.loads(self.resources)
        except (TypeError, ValueError) as error:
            raise InvalidConfigError("resources", self.resources, f"{allowed} ({error})") from None
        if not isinstance(found, dict) or not all(_is_amount(each) for each in found.values()):
            raise InvalidConfigError("resources", self.resources, allowed)
        return found


def _is_amount(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


def _number(name: str, value: object, least: int, most: int) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not least <= value <= most:  # type: ignore[operator]
        raise InvalidConfigError(name, value, f"from {least} to {most}")
