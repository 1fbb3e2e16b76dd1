"""What befalls the machines of a fleet, drawn by seed before the run begins."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from typing import NamedTuple

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.faults import read_numbers

DEATH, HANG, SLOW, PARTITION = "death", "hang", "slow", "partition"


class Disaster(NamedTuple):
    """Something that befalls a replica.

    Attributes:
        at_s: when.
        replica: which.
        kind: `DEATH`, `HANG`, `SLOW` or `PARTITION`.
        for_s: for how long; a death lasts until the replica is started again.
        front: that a partition cuts off from the replica.
    """

    at_s: float
    replica: int
    kind: str
    for_s: float = 0.0
    front: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disasters:
    """How often machines fail; the default is never.

    Attributes:
        deaths, hangs, slows, partitions: of each kind, in the mean, for a replica and an hour.
        hang_s: for how long a hung replica does nothing and says nothing.
        slow_s, slow_factor: for how long a slow one takes so many times as long for its steps.
        partition_s: for how long a front and a replica do not hear of each other.
        restart_s: until a dead replica serves again.
        watch_s: a replica that said nothing for so long is killed.
        detect_s: until both ends of a cut connection notice.
    """

    deaths: float = 0.0
    hangs: float = 0.0
    slows: float = 0.0
    partitions: float = 0.0
    hang_s: float = 60.0
    slow_s: float = 20.0
    slow_factor: float = 3.0
    partition_s: float = 5.0
    restart_s: float = 30.0
    watch_s: float = 5.0
    detect_s: float = 1.0

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not 0 <= value < 1e6:
                raise InvalidConfigError(f"disasters.{spec.name}", value, "a number from 0 to 1e6")
        if self.slow_factor < 1:
            raise InvalidConfigError("disasters.slow_factor", self.slow_factor, "at least 1")
        for name in ("restart_s", "watch_s", "detect_s"):
            if getattr(self, name) <= 0:
                raise InvalidConfigError(f"disasters.{name}", getattr(self, name), "above 0")

    @classmethod
    def parse(cls, text: str) -> Disasters:
        """Reads `"deaths=2,hangs=1,hang_s=30"`.

        Raises:
            InvalidConfigError: an unknown name, or a value out of range.
        """
        return cls(**read_numbers("disasters", text, [spec.name for spec in fields(cls)]))

    def draw(
        self, num_replicas: int, num_fronts: int, duration_s: float, seed: int
    ) -> list[Disaster]:
        """What happens in a run, by time. Each kind has a stream of its own."""
        found = []
        for kind, rate, for_s in (
            (DEATH, self.deaths, self.restart_s),
            (HANG, self.hangs, self.hang_s),
            (SLOW, self.slows, self.slow_s),
            (PARTITION, self.partitions, self.partition_s),
        ):
            if not rate:
                continue
            rng, now_s = random.Random(f"{kind} {seed}"), 0.0
            while now_s < duration_s:
                now_s += rng.expovariate(rate * num_replicas / 3600.0)
                replica, front = rng.randrange(num_replicas), rng.randrange(num_fronts)
                if now_s < duration_s:
                    found.append(Disaster(now_s, replica, kind, for_s, front))
        return sorted(found)


NO_DISASTERS = Disasters()
NEVER = math.inf
