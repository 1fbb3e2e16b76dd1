"""What a fleet is made of: kinds of machines, and how many of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.step_time import StepTime, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of replica.

    Attributes:
        limits: of its engine.
        step_time: of its device.
        speed: how many times as fast it is as `step_time` says.
        name: of the kind.
    """

    limits: StepLimits
    step_time: StepTime
    speed: float = 1.0
    name: str = ""


class HostSpeed:
    """A machine's step times, and how much slower it is at present.

    Attributes:
        factor: what a step takes, in parts of what the machine's model says.
    """

    def __init__(self, machine: Machine) -> None:
        self._step_time = machine.step_time
        self._speed = machine.speed
        self.factor = 1.0

    def seconds(self, work: StepWork) -> float:
        """Prices work at the machine's present speed."""
        return self._step_time.seconds(work) * self.factor / self._speed


def parse_machines(specs: Sequence[str], machine: Machine) -> list[tuple[Machine, float]]:
    """Reads `NAME:share=0.5,speed=0.5,kv_tokens=32000`: kinds with their relative shares.

    Args:
        specs: of each kind; none for a fleet of one.
        machine: what they are but for what they say.

    Raises:
        InvalidConfigError: an unknown key or a bad value.
    """
    if not specs:
        return [(machine, 1.0)]
    kinds = []
    for spec in specs:
        name, _, rest = spec.partition(":")
        share, kind = 1.0, replace(machine, name=name)
        for part in filter(None, rest.split(",")):
            key, _, text = part.partition("=")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if key not in ("share", "speed", "kv_tokens") or not 0 < value < 1e9:
                raise InvalidConfigError(
                    "machine", spec, "NAME:share=, speed= and kv_tokens= with numbers above 0"
                )
            if key == "share":
                share = value
            elif key == "speed":
                kind = replace(kind, speed=value)
            else:
                kind = replace(kind, limits=_with_kv(kind.limits, int(value)))
        kinds.append((kind, share))
    return kinds


def _with_kv(limits: StepLimits, kv_tokens: int) -> StepLimits:
    return replace(
        replica_limits(
            kv_tokens=kv_tokens,
            num_rows=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            page_size=limits.page_size,
            max_model_len=limits.max_model_len,
            max_num_steps=limits.max_num_steps,
            windows=limits.windows,
        ),
        num_host_pages=limits.num_host_pages,
    )


def deal(kinds: Sequence[tuple[Machine, float]], num_replicas: int) -> list[Machine]:
    """The machine of each replica: kinds by their shares, spread evenly over the indices."""
    total, given = sum(share for _, share in kinds), [0] * len(kinds)
    machines = []
    for index in range(num_replicas):
        owed = [(index + 1) * share / total - n for (_, share), n in zip(kinds, given, strict=True)]
        at = max(range(len(kinds)), key=owed.__getitem__)
        given[at] += 1
        machines.append(kinds[at][0])
    return machines
