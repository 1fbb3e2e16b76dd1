"""What the comparison of simulation and engine says about single steps."""

from __future__ import annotations

import pytest

from benchmarks import fidelity
from octavo.engine.execution.step_spec import StepShape
from octavo.engine.simulation.executor import HostOverhead
from octavo.engine.simulation.profile import Profile, ProgramCost, Sample
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.step_time import StepWork


def profile(decode_s: float, mixed_s: float) -> Profile:
    return Profile(
        programs=(
            ProgramCost(num_tokens=8, num_rows=8, num_new_rows=0, num_steps=4, base_s=decode_s),
            ProgramCost(num_tokens=32, num_rows=8, num_new_rows=4, num_steps=0, base_s=mixed_s),
        ),
        host=HostOverhead(),
        limits=replica_limits(kv_tokens=1024),
    )


DECODE = StepShape(8, 8, 4, "general")
MIXED = StepShape(32, 8, 0, "general")
STEPS = [
    (DECODE, Sample(work=StepWork(3, decode_context=90, longest_decode=40), seconds=0.03)),
    (DECODE, Sample(work=StepWork(5, decode_context=200, longest_decode=80), seconds=0.06)),
    (MIXED, Sample(work=StepWork(2, 1, 20), seconds=0.11)),
]


def test_steps_are_held_against_their_prices_by_program() -> None:
    found = fidelity.over_profile(STEPS, profile(0.05, 0.1))
    assert found == {
        "all": pytest.approx(1.0),  # 0.2 s measured, 0.2 s priced
        "decode 8": pytest.approx(0.9),
        "mixed 32": pytest.approx(1.1),
    }


def test_drift_is_what_a_later_profile_asks_more_for_the_same_steps() -> None:
    # 2 * 50 ms + 100 ms before, 2 * 55 ms + 100 ms after.
    assert fidelity.drift(STEPS, profile(0.05, 0.1), profile(0.055, 0.1)) == pytest.approx(0.05)


def test_every_step_is_written_beside_its_price() -> None:
    rows = fidelity.step_rows(STEPS, profile(0.05, 0.1))
    assert [(row["program"], row["seconds"], row["priced_s"]) for row in rows] == [
        ("decode 8", 0.03, 0.05),
        ("decode 8", 0.06, 0.05),
        ("mixed 32", 0.11, 0.1),
    ]
    assert rows[1]["num_decode_rows"] == 5
    assert rows[1]["longest_decode"] == 80
